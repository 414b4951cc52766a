# SPDX-License-Identifier: Apache-2.0
"""Random schedules over the real memory side: after every step planes equal recomputation, and no
request took over KV that saw sparse attention of another kind than its own."""

import os
from collections import Counter

import pytest
import torch
from radix_harness import MemorySide
from schedule_machine import SPECS, Schedules, run_schedules, run_until_seen

from sglang_sparse_kernels.common import computable
from sglang_sparse_kernels.planes import by_page
from sglang_sparse_radix import radix_cache
from sglang_sparse_radix.branches import (
    DENSE,
    NEVER,
    Branch,
    Section,
    allowed,
    sections,
)


def test_planes_equal_recomputation_after_every_step_of_random_schedules(model_config):
    machine = type("Machine", (Schedules,), {"model_config": model_config})
    hard = (
        "_split_node",
        "_delete_leaf",
        "chunk that ends inside a page",
        "finish with a step in flight",
        "reused tokens",
        "branch",
        "dense prefix",
        "sparse prefix",
    )
    run_until_seen(machine, hard, examples=40)


def forgets_one_pass(side, update):
    passes = iter(range(1000))

    def mutant(*arguments):
        if next(passes) != 1:
            update(*arguments)

    return mutant


def stops_one_token_short(side, update):
    return lambda table, start, end, most: update(table, start, end - 1, most)


def starts_at_the_next_page(side, update):
    def mutant(table, start, end, most):
        aligned = -(-start // side.page_size) * side.page_size
        update(table, torch.minimum(aligned, end), end, most)

    return mutant


def updates_all_but_the_last_row(side, update):
    def mutant(table, start, end, most):
        if len(start) > 1:
            start = torch.cat([start[:-1], end[-1:]])
        update(table, start, end, most)

    return mutant


def keeps_what_the_last_owner_of_a_page_left(side, update):
    def mutant(*arguments):
        planes = side.pool.planes
        before = {name: plane.clone() for name, plane in planes.tensors().items()}
        update(*arguments)
        for name, plane in planes.tensors().items():
            if name in ("page_min", "page_mean_low"):
                plane.copy_(torch.minimum(computable(plane), computable(before[name])))
            elif name in ("page_max", "page_mean_high"):
                plane.copy_(torch.maximum(computable(plane), computable(before[name])))
            elif name == "key_sketch":
                plane[:, :, :, 0] = before[name][:, :, :, 0]

    return mutant


def flips_one_entry(side, update):
    def mutant(*arguments):
        update(*arguments)
        page = int(arguments[0][0, 0])
        for name, plane in side.pool.planes.tensors().items():
            logical = name.startswith("page_")
            entry = page * (side.page_size // side.pool.planes.logical_page) if logical else page
            if name == "key_sketch":
                pages = by_page(plane[-1], side.page_size)
                first = pages[page // pages.shape[1], page % pages.shape[1], 0, 0, :1]
            else:
                first = plane[-1, entry].view(-1)[:1]
            first = first.view(torch.uint8)
            first[-1] ^= 0x40

    return mutant


@pytest.mark.parametrize(
    "mutation",
    [
        forgets_one_pass,
        stops_one_token_short,
        starts_at_the_next_page,
        updates_all_but_the_last_row,
        keeps_what_the_last_owner_of_a_page_left,
        flips_one_entry,
    ],
)
def test_random_schedules_catch_a_wrong_plane_update(model_config, mutation):
    members = {"model_config": model_config, "mutate": staticmethod(mutation)}
    broken = type("Broken", (Schedules,), members)
    with pytest.raises(AssertionError, match="planes differ from recomputation"):
        run_schedules(broken, examples=20, shrink=False)


def puts_all_kv_into_the_trunk(sparse, client_key, **_):
    return [Section(client_key, NEVER)]


def forgets_what_the_prefix_saw(sparse, client_key, *, matched, prefilled, page_size):
    path = sections(sparse, client_key, matched={}, prefilled=prefilled, page_size=page_size)
    return [Section(part.extra_key, max(part.end, matched.get(client_key, 0))) for part in path]


def takes_decoded_tokens_for_prompt(sparse, client_key, *, matched, prefilled, page_size):
    longer = prefilled + page_size
    return sections(sparse, client_key, matched=matched, prefilled=longer, page_size=page_size)


# The first turn decodes whole pages at a budget of 128; the second goes on from there.
TURNS = {"fresh": 35, "kept_eighths": 8, "steps": 34, "chunk": 400, "really": True}


def started(model_config) -> Schedules:
    """A memory side whose requests decode sparsely from position 40 on."""
    machine = type("Machine", (Schedules,), {"model_config": model_config, "seen": Counter()})()
    machine.start(
        page_size=16,
        num_pages=18,
        spec=SPECS[0],
        dtype=torch.float32,
        seed=1,
        sparse_prefill=None,
        sparse_decode=40,
    )
    return machine


@pytest.mark.parametrize(
    "wrong",
    [
        puts_all_kv_into_the_trunk,
        forgets_what_the_prefix_saw,
        takes_decoded_tokens_for_prompt,
    ],
)
def test_two_turns_catch_sparse_kv_in_reach_of_dense_requests(model_config, monkeypatch, wrong):
    monkeypatch.setattr(radix_cache, "sections", wrong)
    with pytest.raises(AssertionError, match=r"saw|out of reach|pages lost"):
        started(model_config).converse(**TURNS, modes=(1, 1))


@pytest.mark.parametrize(("second", "mode"), [(0, "dense"), (2, "other budget")])
def test_a_request_that_looks_on_every_branch_is_caught(model_config, monkeypatch, second, mode):
    def everywhere(sparse, client_key, page_size):
        found = allowed(sparse, client_key, page_size)
        if (sparse == DENSE) == (mode == "dense"):
            found += [Section(Branch(client_key, ("decode", 128)), NEVER)]
        return found

    machine, turns = started(model_config), TURNS | {"modes": (1, second)}
    machine.converse(**turns)
    monkeypatch.setattr(radix_cache, "allowed", everywhere)
    with pytest.raises(AssertionError, match="took over KV that saw"):
        machine.converse(**turns)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="CPU tensors need Triton's interpreter"
)
@pytest.mark.parametrize("spec", [SPECS[1], SPECS[2]])
def test_the_triton_update_keeps_the_same_invariant(model_config, spec):
    side = MemorySide(model_config, spec, page_size=16, num_pages=12, impl="triton")
    side.submit([i % 61 for i in range(40)])
    side.submit([i % 61 for i in range(16)] + [5] * 9)
    for chunk in (23, 30, 64):
        side.prefill(chunk)
        side.check()
    for finish in (None, 0, None):
        side.decode(finish=finish)
        side.check()
