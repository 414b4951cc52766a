# SPDX-License-Identifier: Apache-2.0
"""Streaming heads beside heads that select, over HTTP: answers, caches, ranks and counts."""

from collections.abc import Callable
from typing import Any

import pytest
from expected_mass import seen_since
from live_server import KERNEL_ERROR, MASS_ERROR, LiveServer, logprobs, token_ids
from streaming_heads import STREAMING

from sglang_sparse.tasks import TaskSuite

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
TOKENS, KV_HEADS, UNIT, EVERY, BUDGET = 8, 4, 16, 4, 256
WINDOW = STREAMING["sink"] + STREAMING["local"]
# Layer 0 of the reference model attends to everything.
STREAMS = [len(heads) for heads in STREAMING["streaming"][1:]]


def alone(live: LiveServer, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Greedy tokens of each prompt, asked alone on a cold cache."""
    live.flush()
    return [token_ids(live.generate([p], TOKENS, ignore_eos=True, **options))[0] for p in prompts]


def test_windows_as_long_as_the_context_give_the_dense_answers_on_two_ranks(
    server: Server, prompts: list[list[int]]
) -> None:
    dense = alone(server("dense"), prompts[:6])
    live = server("streaming-everything")
    before = live.sparse_state()["prefill_batches"]["sparse"]
    assert alone(live, prompts[:6]) == dense
    state = live.sparse_state()
    assert state["prefill_batches"]["sparse"] - before >= 6
    assert state["decode_steps"]["sparse"] >= 6 * (TOKENS - 1)
    assert len(state["ranks"]) == 2
    assert state["streaming_heads"] == {"select": sum(STREAMS)}
    # Streaming heads are complete before the first stop check, and no list is counted for them.
    pairs = {int(layer): seen["pairs"] for layer, seen in state["progress"].items()}
    steps = 6 * (TOKENS - 1)
    assert pairs == {
        layer: (KV_HEADS - streams) * steps for layer, streams in enumerate(STREAMS, start=1)
    }


def test_what_both_kinds_of_heads_attend_to_is_what_dense_attention_over_it_gives(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("streaming")
    alone(live, prompts[10:13])
    state = live.sparse_state()
    assert sorted(state["fidelity"]) == ["1", "2", "3", "4", "5"]
    for layer, seen in state["fidelity"].items():
        assert seen["kernel_error"] < KERNEL_ERROR, layer
    assert state["axes"]["heads"]["streaming"] == STREAMING["streaming"]
    # Where the others may take everything, streaming heads alone leave some of the mass.
    longest = max(map(len, prompts[10:13])) + TOKENS
    whole = {"custom_params": {"sparse": {"budget": longest}}}
    alone(live, prompts[10:13], **whole)
    seen = seen_since(state["fidelity"], live.sparse_state()["fidelity"])
    streams = {str(layer): bool(heads) for layer, heads in enumerate(STREAMING["streaming"])}
    assert {layer: one["mass"] < 0.999 for layer, one in seen.items()} == {
        layer: streams[layer] for layer in seen
    }, seen


def test_a_cached_prefix_and_neighbours_do_not_change_answers(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("streaming")
    ids = [prompts[i] for i in (0, 7, 14)] + [prompts[3][:40]]
    cold = alone(live, ids)
    live.flush()
    assert token_ids(live.generate(ids, TOKENS, ignore_eos=True)) == cold
    live.flush()
    first = live.generate([ids[1]], TOKENS, ignore_eos=True)
    again = live.generate([ids[1]], TOKENS, ignore_eos=True)
    assert live.sparse_state()["prefill_batches"]["sparse"] > 0
    assert first[0]["meta_info"]["cached_tokens"] == 0
    assert again[0]["meta_info"]["cached_tokens"] >= len(ids[1]) - 64
    assert token_ids(again) == token_ids(first)
    change = [abs(a - b) for a, b in zip(logprobs(first), logprobs(again), strict=True)]
    assert max(change) <= 1e-3


def test_a_dense_request_has_no_windows(server: Server, prompts: list[list[int]]) -> None:
    asked = {"custom_params": {"sparse": {"mode": "dense"}}, "ignore_eos": True}
    live = server("streaming")
    live.flush()
    dense = token_ids(live.generate(prompts[:3], TOKENS, **asked))
    assert dense == alone(server("dense"), prompts[:3])


def test_metrics_count_what_each_kind_of_head_attends_to(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("streaming")
    live.flush()
    before = live.metrics()
    prompt = prompts[8][:700]
    live.generate([prompt], TOKENS, ignore_eos=True)
    live.sparse_state()
    after = live.metrics()
    listed = visible = 0
    for step in range(TOKENS - 1):
        length = len(prompt) + 1 + step
        tail = length - 1 - step % EVERY
        units = -(-tail // UNIT)
        kept = min(-(-BUDGET // UNIT), units)
        listed += kept * UNIT - (units * UNIT - tail) + length - tail
        visible += length
    steps = TOKENS - 1
    lists, layers = sum(KV_HEADS - streams for streams in STREAMS), len(STREAMS)
    want = (listed * lists + WINDOW * steps * sum(STREAMS)) / KV_HEADS
    name = "kv_tokens_attended_total", "select"
    # Sums since the start are divided by the heads, so that each publication rounds.
    assert abs(after[name] - before.get(name, 0) - want) <= 1
    assert after["kv_tokens_total", "select"] - before["kv_tokens_total", "select"] == (
        visible * layers
    )


def test_the_shipped_preset_answers_from_thousands_of_tokens_back(
    server: Server, suite: TaskSuite
) -> None:
    live = server("lserve")
    samples = suite.samples("passkey", length=4000, count=2, seed=5)
    for sample in samples:
        body = {
            "model": "reference",
            "messages": [{"role": "user", "content": sample.content}],
            "temperature": 0,
            "max_tokens": 24,
        }
        reply = live.call("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert all(value in reply for value in sample.values)
    state = live.sparse_state()
    assert state["unit"] == 64
    assert state["axes"]["score"]["logical_page"] == 16
    assert state["streaming_heads"]["select"] > 0
    for layer, seen in state["fidelity"].items():
        assert seen["kernel_error"] < KERNEL_ERROR, layer
        assert seen["mass"] <= seen["oracle_mass"] + MASS_ERROR, layer
