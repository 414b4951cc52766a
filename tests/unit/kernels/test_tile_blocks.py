# SPDX-License-Identifier: Apache-2.0
"""Tiles that attend to blocks, or to windows in some heads, beside loops in float64."""

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, assert_within_budget
from kernel_cases import DEVICE, NAN, random_kinds
from test_tiles import CASES, Prompts

from sglang_sparse_kernels import Lists, tile_attention, tile_mean
from sglang_sparse_kernels.common import take
from sglang_sparse_kernels.records import HeadWindows

UNIT, SINK, LOCAL = 16, 5, 21


def blocks_of(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ascending units of each tile that selects; entries past a count are poison."""
    rows, heads = prompts.plan.rows, prompts.batch.heads
    capacity = max(1, int(rows.k_units.max())) + 2
    indices = torch.full((rows.num_rows, heads, capacity), 2**20, dtype=torch.int32)
    counts = torch.zeros((rows.num_rows, heads), dtype=torch.int32)
    for tile in range(rows.num_rows):
        kept, units = int(rows.k_units[tile]), -(-int(rows.tail_start[tile]) // UNIT)
        for head in range(heads if kept else 0):
            chosen = torch.randperm(units, generator=prompts.batch.rng)[:kept].sort().values
            indices[tile, head, :kept], counts[tile, head] = chosen.int(), kept
    return indices.to(DEVICE), counts.to(DEVICE)


def seen_by(
    prompts: Prompts, lists: tuple, streams: list[int], tile: int, head: int, position: int
) -> torch.Tensor:
    """int64, ascending: the positions that a query attends to."""
    indices, counts = lists
    tail = int(prompts.plan.rows.tail_start[tile])
    every = range(position + 1)
    if tail == 0:
        found = list(every)
    elif streams[head]:
        found = [p for p in every if p < SINK or p > position - LOCAL]
    else:
        chosen = set(indices[tile, head, : int(counts[tile, head])].tolist())
        found = [p for p in every if p >= tail or p // UNIT in chosen]
    return torch.tensor(found, device=DEVICE)


def naive(
    prompts: Prompts, lists: tuple, streams: list[int], dtype: torch.dtype, cap: float = 0.0
) -> torch.Tensor:
    """Attention of each query and head alone, in ``dtype``."""
    batch = prompts.batch
    out = torch.full(prompts.q.shape, NAN, dtype=dtype, device=DEVICE)
    for tile, row, position in prompts.queries():
        for head in range(batch.heads):
            slots = prompts.slots(tile, seen_by(prompts, lists, streams, tile, head, position))
            mine = slice(head * batch.group, (head + 1) * batch.group)
            logits = prompts.q[row, mine].to(dtype) @ take(batch.k[0], (slots, head)).to(dtype).T
            logits = logits * batch.logit_scale
            if cap:
                logits = cap * torch.tanh(logits / cap)
            out[row, mine] = logits.softmax(-1) @ take(batch.v[0], (slots, head)).to(dtype)
    return out


def attend(
    prompts: Prompts, lists: tuple, streams: list[int], impl: str, cap: float = 0.0
) -> torch.Tensor:
    words = torch.tensor(streams, dtype=torch.int32, device=DEVICE)
    windows = HeadWindows(words, SINK, LOCAL) if any(streams) else None
    out = torch.full(prompts.q.shape, NAN, dtype=prompts.q.dtype, device=DEVICE)
    tile_attention(
        prompts.q, prompts.kv, prompts.plan,
        Lists(*lists, prompts.plan.rows.request_slots, unit=UNIT, windows=windows),
        softmax=prompts.batch.softmax(cap), out=out, impl=impl,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kinds", "cap"), [("none", 0.0), ("random", 5.0), ("all", 0.0)])
def test_a_head_sees_its_blocks_or_its_windows(case: tuple, kinds: str, cap: float) -> None:
    prompts = Prompts(case, unit=UNIT, floor=20)
    heads = prompts.batch.heads
    drawn = random_kinds(prompts.batch).tolist()
    streams = {"none": [0] * heads, "random": drawn, "all": [1] * heads}[kinds]
    lists = blocks_of(prompts)
    exact = naive(prompts, lists, streams, torch.float64, cap)
    eager = naive(prompts, lists, streams, prompts.q.dtype, cap)
    got = attend(prompts, lists, streams, "triton", cap)
    assert_within_budget(got, exact, eager, 3 * UNIT_ROUNDOFF[prompts.q.dtype])
    batch = prompts.batch
    prompts.q = prompts.q.double()
    batch.k, batch.v = [k.double() for k in batch.k], [v.double() for v in batch.v]
    torch.testing.assert_close(attend(prompts, lists, streams, "torch", cap), exact)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_nothing_outside_of_blocks_and_windows_is_loaded(impl: str) -> None:
    prompts = Prompts(([(128, 40)], 64, 5, 2, 64, torch.bfloat16), unit=UNIT, floor=20)
    streams, lists = random_kinds(prompts.batch).tolist(), blocks_of(prompts)
    want = attend(prompts, lists, streams, impl)
    used = torch.zeros(prompts.batch.k[0].shape[:2], dtype=torch.bool, device=DEVICE)
    for tile, _, position in prompts.queries():
        for head in range(prompts.batch.heads):
            seen = seen_by(prompts, lists, streams, tile, head, position)
            used[prompts.slots(tile, seen), head] = True
    assert not used[prompts.slots(0, torch.arange(128, device=DEVICE))].all()
    for rows in (prompts.batch.k[0], prompts.batch.v[0]):
        rows[~used] = NAN
    assert torch.equal(attend(prompts, lists, streams, impl), want)


@pytest.mark.parametrize("case", CASES)
def test_the_mean_query_is_rounded_once(case: tuple) -> None:
    prompts = Prompts(case)
    rows, got = prompts.plan.rows, {}
    for impl in ("torch", "triton"):
        out = torch.full((rows.num_rows, *prompts.q.shape[1:]), NAN, dtype=prompts.q.dtype)
        got[impl] = out.to(DEVICE)
        tile_mean(prompts.q, prompts.plan, out=got[impl], impl=impl)
    for tile in range(rows.num_rows):
        first, count = int(prompts.plan.q_rows[tile]), int(rows.seq_lens[tile])
        count -= int(rows.update_start[tile])
        own = prompts.q[first : first + count].double()
        # fp32 sums of `count` terms, then one rounding.
        slack = own.abs().sum(0) * UNIT_ROUNDOFF[torch.float32]
        slack += own.mean(0).abs() * 2 * UNIT_ROUNDOFF[prompts.q.dtype]
        for impl in got:
            assert ((got[impl][tile].double() - own.mean(0)).abs() <= slack).all()
