# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: how tiles are cut, scored and attended, beside loops in float64."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, assert_within_budget, dot_rounding
from kernel_cases import DEVICE, FAR, NAN, Batch

from sglang_sparse_kernels import (
    BLOCK_UNITS,
    KVView,
    Lists,
    Scores,
    TilePlan,
    padded_blocks,
    plan_tiles,
    tile_attention,
    tile_score,
    tile_tokens_of,
)
from sglang_sparse_kernels.common import take

UNTOUCHED = 12345.0
# (prefix, new tokens) of each request, page size, heads, group, dim, dtype
CASES = [
    ([(0, 130), (64, 77)], 64, 2, 2, 64, torch.bfloat16),
    ([(96, 40), (0, 20), (32, 1)], 32, 1, 4, 128, torch.float16),
    ([(0, 90), (37, 50)], 16, 2, 3, 64, torch.bfloat16),
    ([(128, 150)], 64, 1, 1, 64, torch.bfloat16),
    ([(0, 70)], 32, 1, 16, 64, torch.float16),
]


class Prompts:
    """New tokens of several requests over a paged pool, with their tiles."""

    def __init__(self, case: tuple, rows: dict | None = None, **options: object) -> None:
        """``rows`` are options of the batch, ``options`` those of the tiles."""
        spans, page_size, heads, group, dim, dtype = case
        self.prefixes, self.extends = [p for p, _ in spans], [n for _, n in spans]
        lengths = [p + n for p, n in spans]
        self.batch = Batch(
            lengths, page_size=page_size, heads=heads, group=group, dim=dim, dtype=dtype,
            seed=sum(lengths) + group, **(rows or {}),
        )  # fmt: skip
        tokens = sum(self.extends)
        fused = torch.full((tokens, heads * group + 3, dim), NAN)
        fused[:, : heads * group] = 2 * self.batch.randn(tokens, heads * group, dim)
        self.q = fused.to(DEVICE, dtype)[:, : heads * group]
        settings = {"min_tokens": 32, "floor": 12, "fraction": 0.2} | options
        self.plan: TilePlan = plan_tiles(
            self.batch.plan.page_table, self.prefixes, self.extends,
            tile_tokens=tile_tokens_of(128, group, page_size), **settings,
        )  # fmt: skip

    def queries(self) -> list[tuple[int, int, int]]:
        """(tile, row of q, position) of every new token."""
        rows, found = self.plan.rows, []
        for tile in range(rows.num_rows):
            first, row = int(rows.update_start[tile]), int(self.plan.q_rows[tile])
            found += [(tile, row + i, first + i) for i in range(int(rows.seq_lens[tile]) - first)]
        return found

    @property
    def kv(self) -> KVView:
        """KV rows, a row of the page table a tile."""
        return replace(self.batch.kv, page_table=self.plan.rows.page_table)

    def slots(self, tile: int, positions: torch.Tensor) -> torch.Tensor:
        size = self.batch.page_size
        return self.plan.rows.page_table[tile].long()[positions // size] * size + positions % size

    def random_lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads = self.plan.rows, self.batch.heads
        capacity = max(1, int(rows.k_units.max())) + 3
        indices = torch.full((rows.num_rows, heads, capacity), FAR, dtype=torch.int32)
        counts = torch.full((rows.num_rows, heads), 2**20, dtype=torch.int32)
        for tile in range(rows.num_rows):
            kept = int(rows.k_units[tile])
            for head in range(heads if kept else 0):
                chosen = torch.randperm(int(rows.tail_start[tile]), generator=self.batch.rng)[:kept]
                indices[tile, head, :kept] = chosen.sort().values.int()
                counts[tile, head] = kept
        return indices.to(DEVICE), counts.to(DEVICE)


def test_tiles_start_at_multiples_and_never_cross_a_page_or_a_request() -> None:
    assert [tile_tokens_of(128, group, 64) for group in (1, 2, 3, 4, 8, 16)] == [
        64, 64, 32, 32, 16, 8,
    ]  # fmt: skip
    assert tile_tokens_of(128, 1, 16) == 16
    prompts = Prompts(([(0, 70), (48, 41)], 32, 1, 4, 64, torch.bfloat16))
    rows = prompts.plan.rows
    assert rows.update_start.tolist() == [0, 32, 64, 48, 64]
    assert rows.seq_lens.tolist() == [32, 64, 70, 64, 89]
    assert prompts.plan.q_rows.tolist() == [0, 32, 64, 70, 86]
    assert rows.tail_start.tolist() == [0, 32, 64, 32, 64]
    assert rows.k_units.tolist() == [0, 12, 13, 12, 13]
    assert (prompts.plan.max_units, prompts.plan.max_tail) == (13, 64)


def test_a_request_that_asked_to_be_dense_selects_nothing() -> None:
    case = ([(0, 70), (48, 41)], 32, 1, 4, 64, torch.bfloat16)
    rows = Prompts(case, dense=[True]).plan.rows
    assert rows.k_units.tolist() == [0, 0, 0, 12, 13]
    assert rows.tail_start.tolist() == [0, 0, 0, 32, 64]
    assert Prompts(case, dense=[True, True]).plan.max_units == 0


def test_what_a_token_may_see_does_not_depend_on_how_its_prompt_was_cut() -> None:
    def seen(ends: list[int]) -> dict[int, tuple[int, int]]:
        found = {}
        for start, stop in pairwise(ends):
            prompts = Prompts(([(start, stop - start)], 16, 1, 2, 64, torch.bfloat16))
            rows = prompts.plan.rows
            for tile, _, position in prompts.queries():
                found[position] = (int(rows.tail_start[tile]), int(rows.k_units[tile]))
        return found

    whole = seen([0, 203])
    assert seen([0, 1, 17, 64, 65, 203]) == whole
    assert sorted(whole) == list(range(203))


def naive_scores(prompts: Prompts, pool: str, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(score, bound of the products' absolute sums in log 2), one query and head at a time."""
    batch, rows = prompts.batch, prompts.plan.rows
    lists = 1 if pool == "heads" else batch.heads
    shape = (rows.num_rows, lists, int(rows.seq_lens.max()))
    pooled = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    size = torch.zeros_like(pooled)
    for tile, row, position in prompts.queries():
        seen = prompts.slots(tile, torch.arange(position + 1, device=DEVICE))
        keys = take(batch.k[0], seen).double()
        for j in range(batch.heads * batch.group):
            products = keys[:, j // batch.group] * prompts.q[row, j].double() * batch.logit_scale
            logits = products.sum(-1)
            if cap:
                logits = cap * torch.tanh(logits / cap)
            at = 0 if pool == "heads" else j // batch.group
            pooled[tile, at, : position + 1] += logits.softmax(-1)
            largest = products.abs().sum(-1).max() / math.log(2)
            size[tile] = torch.maximum(size[tile], largest)
    score = torch.full_like(pooled, UNTOUCHED)
    for tile in range(rows.num_rows):
        tail = int(rows.tail_start[tile])
        score[tile, :, :tail] = pooled[tile, :, :tail].log2()
    return score, size


def score(prompts: Prompts, pool: str, impl: str, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows = prompts.batch, prompts.plan.rows
    lists, width = 1 if pool == "heads" else batch.heads, int(rows.seq_lens.max()) + 3
    dtype = torch.float64 if prompts.q.dtype == torch.float64 else torch.float32
    out = torch.full((rows.num_rows, lists, width), UNTOUCHED, dtype=dtype, device=DEVICE)
    blocks = torch.full((rows.num_rows, lists, padded_blocks(width)), UNTOUCHED, device=DEVICE)
    tile_score(
        prompts.q, prompts.kv, prompts.plan, softmax=batch.softmax(cap), pool=pool,
        out=Scores(out, blocks), impl=impl,
    )  # fmt: skip
    return out, blocks


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("pool", "cap"), [("group", 0.0), ("heads", 4.0)])
def test_scores_are_the_softmax_pooled_over_the_tile(case: tuple, pool: str, cap: float) -> None:
    prompts = Prompts(case)
    want, size = naive_scores(prompts, pool, cap)
    inside = want != UNTOUCHED
    got, block_max = score(prompts, pool, "triton", cap)
    few = 16 * UNIT_ROUNDOFF[torch.float32]
    slack = 2 * dot_rounding(size, prompts.batch.dim)
    slack += few * (size + want.abs().where(inside, 0) + 96)  # scores are lifted by 96 meanwhile
    width = want.shape[2]
    error = (got[..., :width].double() - want).abs()
    assert (error <= slack)[inside].all(), error[inside].max()
    assert (got[..., :width] == UNTOUCHED)[~inside].all()
    assert (got[..., width:] == UNTOUCHED).all()
    for tile in range(len(got)):
        units = int(inside[tile, 0].sum())
        for j in range(-(-units // BLOCK_UNITS)):
            best = got[tile, :, j * BLOCK_UNITS : min((j + 1) * BLOCK_UNITS, units)].amax(-1)
            assert torch.equal(block_max[tile, :, j], best)
    batch = prompts.batch
    prompts.q, batch.k = prompts.q.double(), [k.double() for k in batch.k]
    batch.v = batch.k
    reference, _ = score(prompts, pool, "torch", cap)
    torch.testing.assert_close(reference[..., :width], want)


@pytest.mark.parametrize("far", [2.0, 60.0])
def test_sums_hold_though_the_largest_logit_is_far_from_the_tile(
    far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_sparse_kernels.tiles import score_kernel as kernel

    monkeypatch.setattr(kernel, "SUM_TILE", (16, 2, 4))
    prompts = Prompts(([(0, 70)], 32, 1, 2, 64, torch.bfloat16))
    # Every query agrees with the fifth key: with 60 by more than fp32 holds powers of two.
    prompts.q[:] = (prompts.q.float().abs() + 1).to(torch.bfloat16)
    prompts.batch.k[0][prompts.slots(0, torch.tensor([4], device=DEVICE))] = far
    want, size = naive_scores(prompts, "group", 0.0)
    got, _ = score(prompts, "group", "triton", 0.0)
    assert (size.max() > 200) == (far > 2)
    seen = (want != UNTOUCHED) & (want > -200)
    slack = 2 * dot_rounding(size, 64) + 16 * UNIT_ROUNDOFF[torch.float32] * (size + 300)
    error = (got[..., : want.shape[2]].double() - want).abs()
    assert seen.any()
    assert (error <= slack)[seen].all(), error[seen].max()
    assert (got[..., : want.shape[2]][(want != UNTOUCHED) & ~seen] <= -190).all()


def naive_attention(prompts: Prompts, lists: tuple, dtype: torch.dtype, cap: float) -> torch.Tensor:
    batch, rows = prompts.batch, prompts.plan.rows
    indices, counts = lists
    out = torch.full(prompts.q.shape, NAN, dtype=dtype, device=DEVICE)
    for tile, row, position in prompts.queries():
        tail = int(rows.tail_start[tile])
        own = torch.arange(tail, position + 1, device=DEVICE)
        for head in range(batch.heads):
            seen = own
            if rows.k_units[tile] > 0:
                seen = torch.cat((indices[tile, head, : int(counts[tile, head])].long(), own))
            slots = prompts.slots(tile, seen)
            mine = slice(head * batch.group, (head + 1) * batch.group)
            logits = prompts.q[row, mine].to(dtype) @ take(batch.k[0], (slots, head)).to(dtype).T
            logits = logits * batch.logit_scale
            if cap:
                logits = cap * torch.tanh(logits / cap)
            values = take(batch.v[0], (slots, head)).to(dtype)
            out[row, mine] = logits.softmax(-1) @ values * batch.scales.v
    return out


def attend(
    prompts: Prompts,
    lists: tuple,
    impl: str,
    logit_cap: float = 0.0,
    head_map: torch.Tensor | None = None,
) -> torch.Tensor:
    batch = prompts.batch
    out = torch.full(prompts.q.shape, NAN, dtype=prompts.q.dtype, device=DEVICE)
    tile_attention(
        prompts.q, prompts.kv, prompts.plan,
        Lists(*lists, prompts.plan.rows.request_slots, head_map=head_map),
        softmax=batch.softmax(logit_cap), out=out, impl=impl,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_attention_is_over_the_list_and_the_tile_itself(case: tuple, cap: float) -> None:
    prompts = Prompts(case)
    batch, lists = prompts.batch, prompts.random_lists()
    exact = naive_attention(prompts, lists, torch.float64, cap)
    eager = naive_attention(prompts, lists, batch.dtype, cap)
    got = attend(prompts, lists, "triton", logit_cap=cap)
    assert_within_budget(got, exact, eager, 3 * UNIT_ROUNDOFF[batch.dtype])
    prompts.q = prompts.q.double()
    batch.k, batch.v = [k.double() for k in batch.k], [v.double() for v in batch.v]
    torch.testing.assert_close(attend(prompts, lists, "torch", logit_cap=cap), exact)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_tile_takes_the_list_of_the_head_that_it_is_mapped_to(impl: str) -> None:
    prompts = Prompts(([(40, 60)], 32, 3, 2, 64, torch.bfloat16))
    indices, counts = prompts.random_lists()
    taken = [1, 0, 1]
    lists = [t[:, :2].contiguous() for t in (indices, counts)]
    head_map = torch.tensor(taken, dtype=torch.int32, device=DEVICE)
    got = attend(prompts, lists, impl, head_map=head_map)
    mapped = indices[:, taken], counts[:, taken]
    exact = naive_attention(prompts, mapped, torch.float64, 0.0)
    eager = naive_attention(prompts, mapped, torch.bfloat16, 0.0)
    assert_within_budget(got, exact, eager, 3 * UNIT_ROUNDOFF[torch.bfloat16])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_budget_above_the_context_is_dense(impl: str) -> None:
    case = ([(0, 100), (30, 40)], 32, 2, 2, 64, torch.bfloat16)
    sparse, dense = Prompts(case, fraction=1.0), Prompts(case, min_tokens=10_000)
    assert (dense.plan.rows.tail_start == 0).all()
    assert sparse.plan.rows.k_units.tolist() == sparse.plan.rows.tail_start.tolist()
    empty = torch.zeros((dense.plan.rows.num_rows, 2, 1), dtype=torch.int32, device=DEVICE)
    exact = naive_attention(dense, (empty, empty[..., 0]), torch.float64, 0.0)
    eager = naive_attention(dense, (empty, empty[..., 0]), torch.bfloat16, 0.0)
    for prompts, lists in ((sparse, sparse.random_lists()), (dense, (empty, empty[..., 0]))):
        got = attend(prompts, lists, impl)
        assert_within_budget(got, exact, eager, 3 * UNIT_ROUNDOFF[torch.bfloat16])


def test_too_large_a_tile_is_refused() -> None:
    prompts = Prompts(([(0, 70)], 64, 1, 2, 64, torch.bfloat16))
    prompts.plan = replace(prompts.plan, tile_tokens=128)
    with pytest.raises(ValueError, match="256 queries a tile at most 128"):
        attend(prompts, prompts.random_lists(), "triton")
