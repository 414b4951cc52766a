# SPDX-License-Identifier: Apache-2.0
"""Copies of the model, each with a scheduler of its own: each attends and counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from live_server import LiveServer, token_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
TOKENS = 8
TURNS = 4


def steps(live: LiveServer) -> list[dict[str, int]]:
    """Decode steps of each copy."""
    states = live.call("/server_info")["internal_states"]
    return [state["sparse"]["decode_steps"] for state in states]


def test_copies_answer_alike_and_each_selects(server: Server, prompts: list[list[int]]) -> None:
    live, dense = server("page_minmax-copies"), server("dense")
    ids = [prompt[:600] for prompt in prompts[:2]]
    expected = [token_ids(dense.generate([p], TOKENS, ignore_eos=True))[0] for p in ids]
    before = steps(live)
    assert len(before) == 2
    whole = {"custom_params": {"sparse": {"budget": 32768}}}
    for prompt, answer in zip(ids, expected, strict=True):
        for _ in range(TURNS):
            found = token_ids(live.generate([prompt], TOKENS, ignore_eos=True, **whole))
            assert found == [answer]
    sparse = [new["sparse"] - old["sparse"] for old, new in zip(before, steps(live), strict=True)]
    # Requests go to the copies in turn.
    assert sparse == [len(ids) * TURNS // 2 * (TOKENS - 1)] * 2
