# SPDX-License-Identifier: Apache-2.0
"""Kascade on a real server, prompts sparse too: prefixes, chunks and neighbours change nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from expected_mass import ExpectedMass, seen_since
from live_server import KERNEL_ERROR, MASS_ERROR, LiveServer, token_ids
from machine import HAS_GPU

from sglang_sparse.config import load_preset
from sglang_sparse.research.kascade import sharing
from sglang_sparse.research.policies import Policy
from sglang_sparse.tasks import TaskSuite

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
TOKENS = 6
# The layer that reuses lists, and the heads whose lists its heads take; on the first server, two
# ranks have two each.
REUSING = 3
REUSED = {"kascade-mapped-ranks": (1, 0, 3, 3), "kascade": sharing()["head_maps"][REUSING]}


def answers_one_by_one(
    live: LiveServer, prompts: list[list[int]], **options: Any
) -> list[list[int]]:
    """Greedy tokens of each prompt, asked alone on a cold cache."""
    found = []
    for prompt in prompts:
        live.flush()
        found.append(token_ids(live.generate([prompt], TOKENS, ignore_eos=True, **options))[0])
    return found


@pytest.mark.skipif(HAS_GPU, reason="rounding of bf16 is more than a token of a list may be worth")
@pytest.mark.parametrize("name", REUSED)
def test_anchors_and_reuse_layers_reach_the_mass_of_an_implementation_of_its_own(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    # Too short for sparse prefill, so that nothing but decoding selects.
    ids = [prompts[0][:255], prompts[1][:250], prompts[2][:200]]
    live = server(name)
    before = live.sparse_state()
    assert before["axes"]["layers"]["reuse"] == [{"layer": REUSING, "heads": list(REUSED[name])}]
    answers_one_by_one(live, ids)
    layers = seen_since(before["fidelity"], live.sparse_state()["fidelity"])
    config = load_preset("reference", "kascade")
    floor, fraction = (before["axes"]["budget"][key] for key in ("floor", "fraction"))
    assert fraction * (255 + TOKENS) < floor
    # A policy counts the token that is decoded among the recent ones.
    policy = Policy(
        "oracle",
        floor + 1,
        sink=config.sink_tokens,
        recent=config.recent_tokens + 1,
        anchors=sharing()["anchors"],
        head_maps=(*[()] * REUSING, REUSED[name], (), ()),
    )
    expected = ExpectedMass(ids, TOKENS - 1)
    ranges = expected.range_of(policy)
    assert set(layers) == set(ranges) - {"0"}  # the first anchor attends to everything
    for layer, seen in layers.items():
        low, high = ranges[layer]
        assert low <= seen["mass"] <= high, layer
        assert seen["kernel_error"] < KERNEL_ERROR, layer
    # Heads that take their own lists would reach another mass.
    low, high = expected.range_of(replace(policy, head_maps=()))[str(REUSING)]
    assert not low <= layers[str(REUSING)]["mass"] <= high


@pytest.mark.parametrize("name", ["kascade-sketch-everything", "kascade-heads-everything"])
def test_budgets_above_the_context_give_the_dense_answers(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    ids = [prompts[0][:800], prompts[1][:450]]
    want = answers_one_by_one(server("dense"), ids)
    live = server(name)
    assert answers_one_by_one(live, ids) == want
    state = live.sparse_state()
    # The equality means nothing unless these went through selection.
    assert state["decode_steps"]["sparse"] >= len(ids) * (TOKENS - 1)
    assert state["prefill_batches"]["sparse"] >= len(ids)
    assert state["layers"] == {"dense_select": [0], "select": [1, 2, 4, 5], "reuse": [REUSING]}


@pytest.mark.parametrize("name", ["kascade-shipped", "kascade-sketch-shipped"])
def test_requests_that_ask_for_the_whole_context_get_the_dense_answers(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    ids = [prompts[0][:800], prompts[1][:450]]
    want = answers_one_by_one(server("dense"), ids)
    live = server(name)
    before = live.sparse_state()["decode_steps"]["sparse"]
    whole = {"custom_params": {"sparse": {"budget": 1.0}}}
    assert answers_one_by_one(live, ids, **whole) == want
    steps = live.sparse_state()["decode_steps"]["sparse"] - before
    assert steps >= len(ids) * (TOKENS - 1)


@pytest.mark.parametrize("name", ["kascade", "kascade-shipped", "kascade-sketch-shipped"])
def test_prefixes_chunks_and_neighbours_do_not_change_answers(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    live = server(name)
    # The second shares a prefix with the first, of a length that is no multiple of the chunks.
    short, long, other = prompts[0][:450], prompts[0][:900], prompts[1][:330]
    cold = answers_one_by_one(live, [short, long, other])
    live.flush()
    live.generate([short], TOKENS, ignore_eos=True)
    warm = live.generate([long], TOKENS, ignore_eos=True)
    assert warm[0]["meta_info"]["cached_tokens"] % 256 != 0
    assert warm[0]["meta_info"]["cached_tokens"] > 256
    assert token_ids(warm)[0] == cold[1]
    live.flush()
    together = live.generate([short, long, other, short[:90]], TOKENS, ignore_eos=True)
    assert token_ids(together)[:3] == cold


def test_prompts_in_chunks_get_the_answers_of_whole_ones(
    server: Server, prompts: list[list[int]]
) -> None:
    ids = [prompts[0][:900], prompts[1][:1500]]
    cut = answers_one_by_one(server("kascade"), ids)
    live = server("kascade-whole")
    assert answers_one_by_one(live, ids) == cut
    # One batch each: none of them was cut.
    assert live.sparse_state()["prefill_batches"]["sparse"] == len(ids)


def test_facts_far_back_are_found_with_a_tenth_of_the_context(
    server: Server, suite: TaskSuite
) -> None:
    live = server("kascade")
    for sample in suite.samples("multi_key", length=1500, count=1, seed=6):
        body = {"input_ids": sample.prompt_ids}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 24}
        reply = live.call("/generate", body)["text"]
        assert all(value in reply for value in sample.values)
    layers = live.sparse_state()["fidelity"]
    assert set(layers) == {"1", "2", "3", "4", "5"}
    for layer, seen in layers.items():
        assert seen["mass"] <= seen["oracle_mass"] + MASS_ERROR, layer
        assert seen["kernel_error"] < KERNEL_ERROR, layer


def test_metrics_tell_anchors_from_the_layers_that_reuse_their_lists(
    server: Server, prompts: list[list[int]]
) -> None:
    live, prompt = server("kascade"), prompts[2][:700]
    live.generate([prompt], 1)
    before = live.metrics()
    live.generate([prompt], TOKENS, ignore_eos=True)
    after = live.metrics()
    lengths = range(len(prompt) + 1, len(prompt) + TOKENS)  # the prefill makes the first token
    # A tenth is less than the floor of 128 tokens; the token being decoded comes on top.
    expected = {
        "dense_select": (1, sum(lengths)),
        "select": (4, 129 * len(lengths)),
        "reuse": (1, 129 * len(lengths)),
    }
    for role, (layers, attended) in expected.items():
        for name, tokens in (
            ("kv_tokens_total", sum(lengths)),
            ("kv_tokens_attended_total", attended),
        ):
            assert after[name, role] - before.get((name, role), 0) == layers * tokens, (name, role)
