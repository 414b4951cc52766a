# SPDX-License-Identifier: Apache-2.0
"""First steps of a prompt that comes back."""

from argparse import Namespace

import pytest
import scripts  # noqa: F401  # the load tests

import first_steps  # isort: skip
from client import Record  # isort: skip


def test_a_prompt_comes_back_cold_and_then_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    total, sent = {"hits": 9, "loads": 9, "stall_nanoseconds": 0}, [([0], 0)]

    def ask(url: str, prompt: list[int], tokens: int) -> Record:
        loads = 0 if prompt == sent[-1][0] else 6
        sent.append((prompt, tokens))
        total["hits"] += 8 - loads
        total["loads"] += loads
        return Record("", cached_tokens=48, first_token=1.0)

    monkeypatch.setattr(first_steps, "ask", ask)
    monkeypatch.setattr(first_steps, "frames_of", lambda url: dict(total))
    args = Namespace(context=50, new=2, tokens=3, others=2, repeats=2, vocab=1000)
    found = first_steps.measure("", args, page=16)
    cold, warm = (found[name]["median"] for name in ("cold", "warm"))
    assert (cold["found"], cold["loads"]) == (0.25, 6)
    assert warm["found"] == 1
    assert [tokens for _, tokens in sent[1:]] == [4, 4, *[40, 40, 4, 4] * 2]
    assert sent[5][0][:50] == sent[9][0][:50] == sent[1][0]
    assert sent[5] == sent[6] != sent[9]
    with pytest.raises(RuntimeError, match="48 of 50 tokens were cached"):
        first_steps.measure("", args, page=1)
