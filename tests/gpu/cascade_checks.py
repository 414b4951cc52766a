# SPDX-License-Identifier: Apache-2.0
"""What servers of the reference model answer that hold a bounded number of tokens a request.

A window above the context gives dense's answers. Prompts far beyond the window are answered in a
batch, and from a snapshot, as they are alone and cold. What is held then depends on sums whose
order a batch changes: of two tokens with nearly equal scores either may stay (`SELECTED`).
Moving averages that decode steps bring up to date evict what those of prompts do (`AVERAGED`).
"""

from __future__ import annotations

import json
from typing import Any

from client import call
from served_checks import (
    EQUAL,
    SELECTED,
    SHORT,
    Answer,
    Outcome,
    Tolerance,
    alone,
    answers,
    arriving,
    compare,
    flush,
    sparse_state,
)

from sglang_sparse.config import load_preset
from sglang_sparse.tasks import TaskSuite

WHOLE, BOUNDED, SHARED = "cascade whole", "cascade", "cascade with snapshots"
DECODING = "cascade with a short window"
# Text of the model itself, drawn at temperature 1, says most about what is held. With this window
# and average, and by the definition, these change its log-probabilities on average: decode steps
# that leave the averages as they are, by 1.0; that update those of the next request, by 0.8; that
# update them twice, by 0.35; keys and values held in bf16 rather than float32, by 0.05.
SENSITIVE = {"window": 64, "sinks": 4, "levels": 4, "stride": 32, "beta": 0.9}
AVERAGED = Tolerance(tie=0.0, mean=0.15)
DECODED = 544  # tokens, hence seventeen strides
_FLAGS = ["--attention-backend", "sparse", "--sparse-method", "cascade"]
HELD = load_preset("reference", "cascade").retention.most_tokens or 0


def configurations() -> dict[str, list[str]]:
    """Flags of each server."""
    whole = {"retention": {"window": 4096, "stride": 1024}}
    return {
        WHOLE: [
            *_FLAGS,
            *("--disable-radix-cache", "--sparse-config", json.dumps(whole)),
            *("--chunked-prefill-size", "1024"),
        ],
        BOUNDED: [*_FLAGS, "--disable-radix-cache", "--chunked-prefill-size", "2048"],
        SHARED: [
            *_FLAGS,
            *("--sparse-config", '{"retention": {"snapshots": 4}}'),
            *("--chunked-prefill-size", "1024"),
        ],
        DECODING: [
            *_FLAGS,
            *("--disable-radix-cache", "--sparse-config", json.dumps({"retention": SENSITIVE})),
        ],
    }


def long_prompts(suite: TaskSuite) -> list[list[int]]:
    """Prompts of up to nine times what is held, one short one."""
    lengths = (HELD + 300, 3 * HELD + 17, 6 * HELD, 9 * HELD)
    found = [suite.samples("passkey", length=n, count=1, seed=n)[0].prompt_ids for n in lengths]
    return [*found, found[0][:SHORT]]


def check(
    outcome: Outcome,
    urls: dict[str, str],
    suite: TaskSuite,
    prompts: list[list[int]],
    dense: tuple[list[Answer], float],
    graphs: bool,
) -> None:
    """Compare what the servers of :func:`configurations` answer.

    Args:
        outcome: is added to.
        urls: of the servers, by name.
        suite: of the long prompts.
        prompts: shorter than the window of :data:`WHOLE`.
        dense: answers to them, and their noise.
        graphs: whether decode graphs and the overlap scheduler must be on.
    """
    want, noise = dense
    for how, ask in {"alone": alone, "in batches": arriving}.items():
        compare(outcome, f"{WHOLE}, {how}", want, ask(urls[WHOLE], prompts), noise, EQUAL)
    asked, url = long_prompts(suite), urls[BOUNDED]
    singly = alone(url, asked)
    for how, got in {"one batch": answers(url, asked), "arriving": arriving(url, asked)}.items():
        compare(outcome, f"{BOUNDED}, {how} against alone", singly, got, noise, SELECTED)
    _check_snapshots(outcome, urls[SHARED], suite, noise)
    _check_decoding(outcome, urls[DECODING], suite, noise)
    for name, url in urls.items():
        state, info = sparse_state(url), call(url, "/server_info")
        facts: dict[str, Any] = {
            "decode_graphs": state["graphs"]["decode"],
            "overlap": not info.get("disable_overlap_schedule"),
            "slots": state["slots"],
            "slot_bytes": state["slot_bytes"],
        }
        outcome.facts[name] = facts
        if graphs:
            found = facts["decode_graphs"]
            outcome.check(found == "captured", f"{name}: decode graphs are {found}")
            outcome.check(facts["overlap"], f"{name}: the overlap scheduler is off")


def _check_snapshots(outcome: Outcome, url: str, suite: TaskSuite, noise: float) -> None:
    """A second question to a document: from a snapshot as cold, and a flush forgets it."""
    document = suite.samples("passkey", length=5000, count=1, seed=8)[0].prompt_ids
    first, second = (document[:4500] + document[-n:] for n in (40, 90))
    cold = alone(url, [second])
    flush(url)
    answers(url, [first])
    before = sparse_state(url)["snapshots"]["restored"]
    cached = answers(url, [second])
    state = sparse_state(url)["snapshots"]
    outcome.check(state["restored"] > before, f"{SHARED}: the document was computed again")
    compare(outcome, f"{SHARED}, second question", cold, cached, noise, SELECTED)
    flush(url)
    kept = sparse_state(url)["snapshots"]["kept"]
    outcome.check(kept == 0, f"{SHARED}: {kept} snapshots outlived a flush")


def _check_decoding(outcome: Outcome, url: str, suite: TaskSuite, noise: float) -> None:
    """What was decoded is as likely when it is sent as a prompt, whose scores prefill computes."""
    prompts = list(suite.heldout_text(600, 4))
    sampling = {"temperature": 1.0, "max_new_tokens": DECODED, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    decoded = []
    for reply in call(url, "/generate", body, timeout=600):
        rows = reply["meta_info"]["output_token_logprobs"]
        decoded.append(Answer([token for _, token, _ in rows], [p for p, _, _ in rows], []))
    prefilled = []
    for prompt, answer in zip(prompts, decoded, strict=True):
        body = {
            "input_ids": [*prompt, *answer.tokens],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        found = call(url, "/generate", body, timeout=600)["meta_info"]["input_token_logprobs"]
        # Their tokens are those that were sent, but for the vocabulary's last one: SGLang says 0.
        prefilled.append(Answer(answer.tokens, [p for p, _, _ in found[-DECODED:]], []))
    compare(outcome, f"{DECODING}, decoded", prefilled, decoded, noise, AVERAGED)
