# SPDX-License-Identifier: Apache-2.0
"""Branch, score, keep the best, branch again: a tree of forks that share ever longer prefixes."""

from typing import Any

import sglang as sgl

BRANCHES, DEPTH = 3, 2


@sgl.function
def solve(s: Any, before: str, text: str, question: str, after: str) -> None:
    """`DEPTH` rounds of `BRANCHES` thoughts each; the next goes on with the likeliest."""
    s += f"{before}{text}\n\n{question}{after}"
    s.sync()
    metas, thoughts, state = [], [], s
    for level in range(DEPTH):
        forks = state.fork(BRANCHES)
        for number, fork in enumerate(forks):
            fork += f" {level + 1}.{number + 1}:"
            fork += sgl.gen("thought", max_tokens=16, temperature=0, return_logprob=True)
        scores = []
        for fork in forks:
            meta = fork.get_meta_info("thought")
            tokens = [logprob for logprob, *_ in meta["output_token_logprobs"]]
            scores.append(sum(tokens) / max(len(tokens), 1))
            metas.append(meta)
            thoughts.append(fork["thought"])
        state = forks[max(range(BRANCHES), key=lambda i: scores[i])]
    state += " So:" + sgl.gen("answer", max_tokens=24, temperature=0)
    metas.append(state.get_meta_info("answer"))
    s["answers"] = [*thoughts, state["answer"]]
    s["metas"] = metas


def run(url: str, text: str, question: str, before: str, after: str) -> dict[str, Any]:
    """Every thought and the answer, and the cached tokens of each call."""
    backend = sgl.RuntimeEndpoint(url)
    state = solve.run(before=before, text=text, question=question, after=after, backend=backend)
    return {
        "answers": state["answers"],
        "cached_tokens": [meta["cached_tokens"] for meta in state["metas"]],
        "prompt_tokens": [meta["prompt_tokens"] for meta in state["metas"]],
    }
