# SPDX-License-Identifier: Apache-2.0
"""Units of several logical pages: each has the largest score of its pages (LServe, 3.5.2)."""

import pytest
import torch
from kernel_cases import DEVICE, FAR, IMPLS, NAN, Batch
from test_attend import naive_attention, rounding

from sglang_sparse_kernels import (
    BLOCK_UNITS,
    Always,
    Attend,
    PageScore,
    Scores,
    Select,
    StepContext,
    decode_step,
    make_topk_workspace,
    make_workspace,
    padded_blocks,
    page_bounds,
    page_minmax_score,
)

UNTOUCHED = -12345.0
# lengths (last units of one to four pages, whole and cut), page size, heads, group, dim, dtype
SHAPES = [
    ([257, 1, 111, 30, 63], 64, 2, 1, 64, torch.bfloat16),
    ([300, 1090, 130], 64, 1, 8, 64, torch.float16),
    ([65, 2049], 64, 1, 4, 128, torch.bfloat16),
    ([129, 97, 900], 32, 3, 2, 64, torch.bfloat16),
]


def make_batch(shape: tuple, unit: int = 16, **options: object) -> Batch:
    lengths, page_size, heads, group, dim, dtype = shape
    return Batch(
        lengths, page_size=page_size, heads=heads, group=group, dim=dim, dtype=dtype, unit=unit,
        shared_pages=1, seed=sum(lengths) + group, **options,
    )  # fmt: skip


def outputs(batch: Batch, unit: int) -> Scores:
    width = -(-batch.max_pages * batch.page_size // unit)
    shape = (len(batch.lengths), batch.heads)
    return Scores(
        torch.full((*shape, width), UNTOUCHED, device=DEVICE),
        torch.full((*shape, padded_blocks(width)), UNTOUCHED, device=DEVICE),
    )


def joined(scores: torch.Tensor, pages: int) -> torch.Tensor:
    """The largest of so many neighbours, one unit after the other."""
    starts = range(0, scores.shape[-1], pages)
    return torch.stack([scores[..., i : i + pages].amax(-1) for i in starts], -1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("unit", "reduce"), [(64, "max"), (32, "sum")])
def test_a_unit_has_the_largest_score_of_its_pages(
    impl: str, shape: tuple, unit: int, reduce: str
) -> None:
    batch = make_batch(shape, reselect_every=3 if unit == 32 else 1)
    cuboids = batch.cuboids(batch.make_planes(None, True))
    # A page whose keys are no numbers hides none of the other pages of its unit.
    cuboids.high[batch.plan.page_table[0, 0] * (batch.page_size // 16) + 1] = NAN
    pages, got = outputs(batch, 16), outputs(batch, unit)
    options = {"reduce": reduce, "impl": impl}
    page_minmax_score(batch.q, cuboids, batch.plan, out=pages, **options)
    page_minmax_score(batch.q, cuboids, batch.plan, unit=unit, out=got, **options)
    scored = 0
    for row in range(len(batch.lengths)):
        tokens = int(batch.plan.tail_start[row])
        if not (batch.plan.reselect[row] and batch.plan.k_units[row]):
            tokens = 0
        scored += tokens > 0
        units = -(-tokens // unit)
        if units:
            want = joined(pages.values[row, :, : -(-tokens // 16)], unit // 16)
            assert torch.equal(got.values[row, :, :units], want)
            assert want.isfinite().any()
            blocks = joined(want, BLOCK_UNITS)
            if impl == "triton":
                assert torch.equal(got.block_max[row, :, : blocks.shape[-1]], blocks)
        assert (got.values[row, :, units:] == UNTOUCHED).all()
    assert scored


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_unit_is_bounded_by_the_largest_bound_of_its_pages(impl: str, shape: tuple) -> None:
    batch = make_batch(shape)
    cuboids = batch.cuboids(batch.make_planes(None, True))
    whole = (len(batch.lengths), batch.heads, batch.group)
    width = batch.max_pages * batch.page_size
    pages, got = (
        torch.full((*whole, width // unit), UNTOUCHED, device=DEVICE) for unit in (16, 64)
    )
    page_bounds(batch.q, cuboids, batch.plan, out=pages, impl=impl)
    page_bounds(batch.q, cuboids, batch.plan, unit=64, out=got, impl=impl)
    for row in range(len(batch.lengths)):
        tokens = int(batch.plan.tail_start[row])
        units = -(-tokens // 64)
        if units:
            want = joined(pages[row, ..., : -(-tokens // 16)], 4)
            assert torch.equal(got[row, ..., :units], want)
        assert (got[row, ..., units:] == UNTOUCHED).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_step_selects_and_attends_to_whole_units(impl: str) -> None:
    """Lists of units of 64 tokens, whose scores are of pages of 16."""
    shape = ([700, 1, 1300, 333], 64, 2, 4, 64, torch.bfloat16)
    pages = make_batch(shape)
    batch = make_batch(shape, unit=64, budget=320, capacity=5)
    cuboids = pages.cuboids(pages.make_planes(None, True))
    assert torch.equal(pages.k[0].nan_to_num(), batch.k[0].nan_to_num())
    rows, heads = len(batch.lengths), batch.heads
    scores = outputs(batch, 64)
    indices = torch.full((batch.list_rows, heads, 5), FAR, dtype=torch.int32, device=DEVICE)
    counts = torch.full((batch.list_rows, heads), FAR, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(batch.q, NAN)
    stages = [
        PageScore(cuboids, "max", scores),
        Select(
            scores, Always(64, 64),
            make_topk_workspace(rows, heads, scores.values.shape[2], 5, DEVICE),
        ),
        Attend(make_workspace(rows, heads * batch.group, heads, batch.dim, DEVICE)),
    ]  # fmt: skip
    lists = batch.lists(indices, counts)
    decode_step(
        stages, StepContext(batch.q, batch.kv, batch.plan, lists, batch.softmax(), out, impl)
    )
    single = outputs(pages, 16)
    page_minmax_score(pages.q, cuboids, pages.plan, reduce="max", out=single, impl=impl)
    for row in (0, 2, 3):
        tokens, target = int(batch.plan.tail_start[row]), int(batch.plan.request_slots[row])
        units = -(-tokens // 64)
        for head in range(heads):
            best = joined(single.values[row, head, : -(-tokens // 16)], 4).tolist()
            forced = {0, *range((tokens - 64) // 64, units)}
            rest = sorted(set(range(units)) - forced, key=lambda u, best=best: (-best[u], u))
            want = sorted([*forced, *rest][:5])
            assert indices[target, head, : int(counts[target, head])].tolist() == want
    exact = naive_attention(batch, (indices, counts), torch.float64)
    eager = naive_attention(batch, (indices, counts), batch.dtype)
    error, norm = (out.double() - exact).norm(), exact.norm()
    assert error / norm <= (eager.double() - exact).norm() / norm + rounding(batch.dtype)


@pytest.mark.parametrize("unit", [8, 24, 128])
def test_units_that_are_no_whole_pages_are_refused(unit: int) -> None:
    batch = make_batch(SHAPES[0])
    cuboids = batch.cuboids(batch.make_planes(None, True))
    with pytest.raises(ValueError, match=f"unit={unit} must be 1 to 4 logical pages of 16"):
        page_minmax_score(
            batch.q, cuboids, batch.plan, unit=unit, reduce="max", out=outputs(batch, 16),
            impl="torch",
        )  # fmt: skip
