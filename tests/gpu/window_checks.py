# SPDX-License-Identifier: Apache-2.0
"""What a server of the reference model answers whose streaming heads hold sinks and windows only.

Windows as long as the context give dense's answers. Short windows give those of a server with the
same heads that holds every token: cold, behind a prefix whose windows were given back, in a batch.
"""

from __future__ import annotations

import json
from typing import Any

from client import call
from served_checks import (
    EQUAL,
    SELECTED,
    Answer,
    Outcome,
    alone,
    answers,
    arriving,
    compare,
    flush,
    sparse_state,
)
from streaming_heads import EQUALLY_STREAMING

WHOLE, KEPT, GIVEN_BACK = "windows of the context", "windows kept", "windows given back"
_FLAGS = ["--attention-backend", "sparse", "--sparse-method", "page_minmax"]
_FLAGS += ["--disable-overlap-schedule", "--chunked-prefill-size", "512", "--sparse-config"]
_EVERYTHING = {"budget": {"tokens": 32768, "max_tokens": 32768}, "min_sparse_tokens": 64}
_BACK = {"kind": "streaming_window", "share": 0.5}
_BLOCKS = {"kind": "block_bounds", "fraction": 1.0, "floor": 256, "min_tokens": 1}


def configurations() -> dict[str, list[str]]:
    """Flags of each server; the last two differ in what they hold alone."""
    whole = EQUALLY_STREAMING | {"heads": EQUALLY_STREAMING["heads"] | {"local": 4096}}
    changes = {
        WHOLE: whole | {"retention": _BACK},
        KEPT: EQUALLY_STREAMING | {"prefill": _BLOCKS},
        GIVEN_BACK: EQUALLY_STREAMING | {"retention": _BACK},
    }
    return {name: [*_FLAGS, json.dumps(_EVERYTHING | more)] for name, more in changes.items()}


def branches(prompts: list[list[int]]) -> list[list[int]]:
    """A prompt, then others that leave it at its sinks, in its window and between the two."""
    first, second = prompts[-1], prompts[-2]
    return [first, *(first[:length] + second[:20] for length in (40, 130, 700, 1900)), first]


def check(
    outcome: Outcome,
    urls: dict[str, str],
    prompts: list[list[int]],
    dense: tuple[list[Answer], float],
    graphs: bool,
) -> None:
    """Compare what the servers of :func:`configurations` answer.

    Args:
        outcome: is added to.
        urls: of the servers, by name.
        prompts: shorter than the windows of :data:`WHOLE`.
        dense: answers to them, and their noise.
        graphs: whether decode graphs must be captured.
    """
    want, noise = dense
    for how, ask in {"alone": alone, "in batches": arriving}.items():
        compare(outcome, f"{WHOLE}, {how}", want, ask(urls[WHOLE], prompts), noise, EQUAL)
    asked, found = branches(prompts), {}
    for name in (KEPT, GIVEN_BACK):
        flush(urls[name])
        each = [answers(urls[name], [prompt])[0] for prompt in asked]
        flush(urls[name])
        found[name] = {"one after the other": each, "one batch": answers(urls[name], asked)}
    for how, kept in found[KEPT].items():
        compare(outcome, f"{GIVEN_BACK}, {how}", kept, found[GIVEN_BACK][how], noise, SELECTED)
    for name, url in urls.items():
        state = sparse_state(url)
        facts: dict[str, Any] = {
            "decode_graphs": state["graphs"]["decode"],
            "kv_bytes": state["kv_bytes"],
            "max_total_num_tokens": call(url, "/server_info")["max_total_num_tokens"],
        }
        outcome.facts[name] = facts
        if graphs:
            captured = facts["decode_graphs"]
            outcome.check(captured == "captured", f"{name}: decode graphs are {captured}")
    held = {name: outcome.facts[name]["kv_bytes"] for name in (KEPT, GIVEN_BACK)}
    outcome.check(held[GIVEN_BACK] < held[KEPT], f"{GIVEN_BACK}: {held} bytes are held")
