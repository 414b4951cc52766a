# SPDX-License-Identifier: Apache-2.0
"""What a server of the reference model answers to prompts that went to host memory and came back.

Two servers of each method are asked the same prompts, many times, in the same random order. One has
room on the device for few of them and a hierarchical cache, the other for all. Their answers, the
lengths of the prefixes that they find, and their planes have to be the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from random import Random

from local import METHODS
from served_checks import (
    EQUAL,
    PROMPTS,
    WITH_SPARSE_PROMPTS,
    Answer,
    Outcome,
    answer_of,
    compare,
    flush,
    replies,
    sparse_state,
)

CONFIGS: dict[str, dict[str, object]] = {
    **{method: {} for method in METHODS},
    # Tiles that select, so that planes of what comes back matter to prompts.
    **{
        method + WITH_SPARSE_PROMPTS: {"prefill": prefill | {"fraction": 0.25, "floor": 256}}
        for method, prefill in PROMPTS.items()
    },
}
EVICTS, ROOMY = " with prompts in host memory", " that evicts nothing"
SMALL = ["--enable-hierarchical-cache", "--hicache-ratio", "8", "--max-total-tokens", "5120"]
LARGE = ["--max-total-tokens", "65536"]
ROUNDS = 3  # times that each prompt is asked


def configurations(methods: Sequence[str]) -> dict[str, list[str]]:
    """Flags of each server of some methods."""
    found = {}
    for name, config in CONFIGS.items():
        if name.split()[0] not in methods:
            continue
        flags = ["--attention-backend", "sparse", "--sparse-method", name.split()[0]]
        flags += ["--sparse-config", json.dumps({"min_sparse_tokens": 512} | config)]
        flags += ["--chunked-prefill-size", "2048"]
        found |= {name + EVICTS: [*flags, *SMALL], name + ROOMY: [*flags, *LARGE]}
    return found


def ask(url: str, prompt: list[int]) -> tuple[Answer, Counter[str]]:
    """Greedy answer, and how many tokens of its prefix were where."""
    [reply] = replies(url, [prompt])
    return answer_of(reply), Counter(reply["meta_info"]["cached_tokens_details"] or {})


def check(
    outcome: Outcome,
    urls: dict[str, str],
    prompts: list[list[int]],
    dense: tuple[list[Answer], float],
) -> None:
    """Compare what the servers of :func:`configurations` answer.

    Args:
        outcome: is added to.
        urls: of the servers, by name, with planes verified.
        prompts: far more than the small servers have room for.
        dense: answers to them, and their noise.
    """
    for method in (name for name in CONFIGS if name + EVICTS in urls):
        pair = urls[method + ROOMY], urls[method + EVICTS]
        for url in pair:
            flush(url)
        order = Random(method).sample(prompts * ROUNDS, len(prompts) * ROUNDS)
        asked = [[ask(url, prompt) for url in pair] for prompt in order]
        (stayed, there), (back, found) = (
            zip(*one, strict=True) for one in zip(*asked, strict=True)
        )
        compare(outcome, method + EVICTS, stayed, back, dense[1], EQUAL)
        lengths = [[sum(where.values()) for where in one] for one in (there, found)]
        outcome.check(lengths[0] == lengths[1], f"{method}: prefixes have other lengths")
        cached = sum(found, Counter())
        few = 4 * cached["host"] < cached.total()
        outcome.check(not few, f"{method}: under a quarter came from the host: {cached}")
        same = sum(a.tokens == b.tokens for a, b in zip(stayed, back, strict=True))
        state = [sparse_state(url) for url in pair]
        outcome.facts[method] = {
            "answers": len(order), "same": same, "cached": dict(cached),
            "recomputed_pages": state[1]["plane_reuse"]["recomputed_pages"],
            "planes": [one["plane_check"] for one in state],
        }  # fmt: skip
        for one in state:
            planes = one["plane_check"]
            outcome.check(planes["pages"] > 0 == planes["wrong"], f"{method}: planes {planes}")
