# SPDX-License-Identifier: Apache-2.0
"""Channel selection and both scores: definitions against loops, kernels against float64."""

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, assert_within_budget, dot_rounding
from kernel_cases import DEVICE, FAR, FAST, IMPLS, PYTORCH, Batch

from sglang_sparse_kernels import (
    BLOCK_UNITS,
    Always,
    KeySketch,
    PageCuboids,
    PlaneBuffers,
    Scores,
    dequantize_sketch,
    make_topk_workspace,
    padded_blocks,
    page_minmax_score,
    select_channels,
    select_topk,
    sketch_score,
)

UNTOUCHED = 12345.0
# lengths, page size, heads, group, dim, dtype
SHAPES = [
    ([257, 1, 111, 30, 63], 64, 2, 1, 64, torch.bfloat16),
    ([1, 130, 511], 32, 3, 2, 128, torch.float16),
    ([63, 300], 16, 1, 3, 64, torch.bfloat16),
    ([111, 49, 257], 64, 2, 4, 128, torch.bfloat16),
    ([1030, 20], 32, 1, 8, 64, torch.float16),
    ([257], 16, 2, 16, 64, torch.bfloat16),
]


def make_batch(shape: tuple, **options: object) -> Batch:
    lengths, page_size, heads, group, dim, dtype = shape
    batch = Batch(
        lengths,
        page_size=page_size,
        heads=heads,
        group=group,
        dim=dim,
        dtype=dtype,
        seed=sum(lengths) + group,
        shared_pages=1,
        **options,
    )
    # Queries with heavy tails, as SparCas section 3.3 finds them.
    batch.q *= batch.randn(*batch.q.shape).exp().to(batch.q)
    return batch


def random_channels(batch: Batch, kept: int) -> torch.Tensor:
    """Distinct ascending channels in the rows in use, far out of range elsewhere."""
    channels = torch.full((batch.list_rows, batch.heads, kept), FAR, dtype=torch.int32)
    for row in batch.plan.request_slots[batch.plan.k_units > 0].tolist():
        for head in range(batch.heads):
            chosen = torch.randperm(batch.dim, generator=batch.rng)[:kept]
            channels[row, head] = chosen.sort().values.int()
    return channels.to(DEVICE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", [16, 5])
def test_channels_carry_the_largest_query_magnitude(impl: str, shape: tuple, kept: int) -> None:
    batch = make_batch(shape, refresh_every=3)
    channels = torch.full((batch.list_rows, batch.heads, kept), -9, dtype=torch.int32)
    channels = channels.to(DEVICE)
    plan = batch.plan
    select_channels(batch.q, channels, plan, impl=impl)
    refreshed = set()
    for row in range(len(batch.lengths)):
        if plan.refresh[row] == 0:
            continue
        refreshed.add(int(plan.request_slots[row]))
        for head in range(batch.heads):
            mine = batch.q[row].view(batch.heads, batch.group, -1)[head].double().abs().sum(0)
            got = channels[plan.request_slots[row], head].long()
            assert (got[1:] > got[:-1]).all()
            rest = torch.ones(batch.dim, dtype=torch.bool, device=DEVICE)
            rest[got] = False
            slack = dot_rounding(mine.max(), batch.group)
            assert mine[got].min() >= mine[rest].max() - slack
    for row in set(range(batch.list_rows)) - refreshed:
        assert (channels[row] == -9).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_of_equal_channels_the_lower_index_wins(impl: str) -> None:
    batch = Batch([100], heads=1, group=2, dim=64)
    batch.q.fill_(0.5)
    batch.q[0, 1, 40] = -3.0
    channels = torch.zeros((batch.list_rows, 1, 4), dtype=torch.int32, device=DEVICE)
    plan = batch.plan
    select_channels(batch.q, channels, plan, impl=impl)
    assert channels[plan.request_slots[0], 0].tolist() == [0, 1, 2, 40]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("reselect_every", [1, 2])
def test_scoring_may_choose_the_channels_itself(impl: str, reselect_every: int) -> None:
    shape = ([257, 1, 111, 50, 63], 64, 2, 4, 64, torch.bfloat16)
    batch = make_batch(shape, refresh_every=3, reselect_every=reselect_every)
    plan, planes = batch.plan, batch.make_planes("fp8", page_minmax=False)
    before = random_channels(batch, 16)
    apart, together = before.clone(), before.clone()
    want, got = outputs(batch, 1), outputs(batch, 1)
    select_channels(batch.q, apart, plan, impl=impl)
    sketch = batch.sketch(planes)
    sketch_score(batch.q, apart, sketch, plan, reduce="max", out=want, impl=impl)
    sketch_score(
        batch.q, together, sketch, plan, reduce="max", out=got, choose_channels=True, impl=impl
    )
    assert torch.equal(together, apart)
    assert not torch.equal(apart, before)
    assert torch.equal(got.values, want.values)


def score_width(batch: Batch, unit: int) -> int:
    return -(-max(batch.lengths) // unit) + 3


def outputs(batch: Batch, unit: int) -> Scores:
    shape = (len(batch.lengths), batch.heads)
    width = score_width(batch, unit)
    scores = torch.full((*shape, width), UNTOUCHED, device=DEVICE)
    block_max = torch.full((*shape, padded_blocks(width)), UNTOUCHED, device=DEVICE)
    return Scores(scores, block_max)


def check_scores(
    batch: Batch,
    unit: int,
    got: Scores,
    exact: torch.Tensor,
    slack: torch.Tensor,
    impl: str,
) -> None:
    """Scores within ``slack`` of ``exact`` inside the domain, nothing written outside of it."""
    scores, block_max = got.values, got.block_max
    for row in range(len(batch.lengths)):
        scored = bool(batch.plan.reselect[row]) and bool(batch.plan.k_units[row] > 0)
        units = -(-int(batch.plan.tail_start[row]) // unit) if scored else 0
        error = (scores[row, :, :units].double() - exact[row, :, :units]).abs()
        assert (error <= slack[row, :, :units]).all(), f"row {row}: {error.max()}"
        assert (scores[row, :, units:] == UNTOUCHED).all()
        # Only kernels look at block maxima.
        blocks = -(-units // BLOCK_UNITS) if impl == "triton" else 0
        for j in range(blocks):
            want = scores[row, :, j * BLOCK_UNITS : min((j + 1) * BLOCK_UNITS, units)].amax(-1)
            assert torch.equal(block_max[row, :, j], want)
        assert (block_max[row, :, blocks:] == UNTOUCHED).all()


def naive_sketch_scores(
    batch: Batch, planes: PlaneBuffers, channels: torch.Tensor, reduce: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score, sum of |products|) in float64, one token at a time."""
    plan, size = batch.plan, batch.page_size
    shape = (len(batch.lengths), batch.heads, score_width(batch, 1))
    exact, magnitude = (torch.zeros(shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    scale = None if planes.key_sketch_scale is None else planes.key_sketch_scale[0]
    dense = dequantize_sketch(planes.key_sketch[0], scale, torch.float64, batch.page_size)
    for row in range(len(batch.lengths)):
        if plan.k_units[row] == 0:
            continue
        query = batch.q[row].view(batch.heads, batch.group, -1).double()
        kept = channels[plan.request_slots[row]].long()
        for position in range(int(plan.tail_start[row])):
            page = int(plan.page_table[row, position // size])
            for head in range(batch.heads):
                key = dense[page, head, kept[head], position % size]
                products = query[head][:, kept[head]] * key
                sums = products.sum(1)
                exact[row, head, position] = sums.max() if reduce == "max" else sums.sum()
                spread = products.abs().sum(1)
                magnitude[row, head, position] = spread.max() if reduce == "max" else spread.sum()
    return exact, magnitude


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("sketch", ["fp8", "int8", "int4", "bf16"])
@pytest.mark.parametrize(("shape", "reduce"), [(SHAPES[0], "max"), (SHAPES[2], "sum")])
def test_sketch_scores_equal_a_loop_over_tokens(
    sketch: str, shape: tuple, reduce: str, impl: str
) -> None:
    batch = make_batch(shape)
    planes = batch.make_planes(sketch, page_minmax=False)
    channels = random_channels(batch, 16)
    exact, magnitude = naive_sketch_scores(batch, planes, channels, reduce)
    out = outputs(batch, 1)
    sketch_score(
        batch.q, channels, batch.sketch(planes), batch.plan, reduce=reduce, out=out, impl=impl
    )
    scores = out.values
    slack = dot_rounding(magnitude, 16 * batch.group)
    for row in range(len(batch.lengths)):
        tokens = int(batch.plan.tail_start[row])
        error = (scores[row, :, :tokens].double() - exact[row, :, :tokens]).abs()
        assert (error <= slack[row, :, :tokens]).all()
        assert (scores[row, :, tokens:] == UNTOUCHED).all()


def float64_sketch_scores(
    batch: Batch, planes: PlaneBuffers, channels: torch.Tensor, reduce: str, absolute: bool
) -> torch.Tensor:
    scale = None if planes.key_sketch_scale is None else planes.key_sketch_scale[0]
    dense = dequantize_sketch(planes.key_sketch[0], scale, torch.float64, batch.page_size)
    query = batch.q.double()
    out = torch.zeros(
        (len(batch.lengths), batch.heads, score_width(batch, 1)),
        dtype=torch.float64,
        device=DEVICE,
    )
    if absolute:
        query, dense = query.abs(), dense.abs()
    sketch = KeySketch(dense, None, batch.page_size)
    sketch_score(
        query, channels, sketch, batch.plan, reduce=reduce, out=Scores(out, out), impl="torch"
    )
    return out


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("sketch", "reduce", "kept", "reselect_every"),
    [("fp8", "max", 16, 1), ("int8", "sum", 16, 3), ("bf16", "max", 20, 1), ("int4", "max", 7, 2)],
)
def test_sketch_kernel_is_within_its_rounding_of_float64(
    shape: tuple, sketch: str, reduce: str, kept: int, reselect_every: int, impl: str
) -> None:
    batch = make_batch(shape, reselect_every=reselect_every, dense_rows=(len(shape[0]) - 1,))
    planes = batch.make_planes(sketch, page_minmax=False)
    channels = random_channels(batch, kept)
    scores = outputs(batch, 1)
    sketch_score(
        batch.q, channels, batch.sketch(planes), batch.plan, reduce=reduce, out=scores, impl=impl
    )
    exact = float64_sketch_scores(batch, planes, channels, reduce, absolute=False)
    magnitude = float64_sketch_scores(batch, planes, channels, reduce, absolute=True)
    slack = dot_rounding(magnitude, kept * (batch.group if reduce == "sum" else 1))
    if sketch != "bf16" and impl == "triton":
        # Sums over channels are kept in fp16: a product and a sum round, each channel. A query far
        # below the largest of its head, or a small product, turns subnormal: at most 2**-25 of the
        # largest query is lost then.
        slack += 2 * (kept + 1) * UNIT_ROUNDOFF[torch.float16] * magnitude
        largest = batch.q.double().abs().amax((1, 2))[:, None, None]
        slack += (magnitude.amax(-1, keepdim=True) + 2 * kept * batch.group * largest) * 2.0**-24
    check_scores(batch, 1, scores, exact, slack, impl)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kept", [73, 74, 128])
@pytest.mark.parametrize("largest", [1.9921875, 1.9921875 * 2.0**90])
def test_sums_of_many_large_fp8_keys_are_finite(
    kept: int, sign: float, largest: float, impl: str
) -> None:
    """All of a key at fp8's largest number or next to it, queries just below a power of two."""
    batch = make_batch(([257, 100], 64, 2, 2, 128, torch.bfloat16))
    batch.k[0].copy_(torch.where(batch.k[0][..., :1] > 0, 448.0, 416.0).expand_as(batch.k[0]))
    batch.q.fill_(sign * largest)
    planes = batch.make_planes("fp8", page_minmax=False)
    channels = random_channels(batch, kept)
    scores = outputs(batch, 1)
    sketch_score(
        batch.q, channels, batch.sketch(planes), batch.plan, reduce="max", out=scores, impl=impl
    )
    exact = float64_sketch_scores(batch, planes, channels, "max", absolute=False)
    slack = 2 * kept * UNIT_ROUNDOFF[torch.float16] * exact.abs()
    check_scores(batch, 1, scores, exact, slack, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("score", ["sketch", "page"])
def test_scores_that_are_no_finite_numbers_rank_as_defined(
    score: str, reduce: str, impl: str
) -> None:
    """NaN as -inf, and +inf as the largest finite number: below the units that are forced."""
    unit = 1 if score == "sketch" else 16
    shape = ([700], 64, 2, 2, 64, torch.bfloat16)
    batch = make_batch(shape, unit=unit, budget=80, capacity=80 // unit)
    # Products of keys and queries from 1e30 on pass float32's range.
    batch.q.fill_(1e30)
    slots = batch.req_to_token[batch.req_slots[0]].long()
    keys = torch.ones(704, batch.heads, batch.dim)
    keys[32:48], keys[320:336], keys[640:656] = 1e30, 1e30, -1e30
    keys[64:80, :, 7] = float("nan")
    batch.k[0][slots[:700]] = keys[:700].to(batch.k[0])
    planes = batch.make_planes("bf16", page_minmax=True)
    found = outputs(batch, unit)
    options = {"reduce": reduce, "out": found, "impl": impl}
    if score == "sketch":
        channels = random_channels(batch, 64)
        sketch_score(batch.q, channels, batch.sketch(planes), batch.plan, **options)
    else:
        page_minmax_score(batch.q, batch.cuboids(planes), batch.plan, **options)
    scores = found.values
    largest = torch.finfo(torch.float32).max
    for first, want in ((32, largest), (320, largest), (640, -torch.inf), (64, -torch.inf)):
        assert (scores[0, :, first // unit : (first + 16) // unit] == want).all()
    tail = int(batch.plan.tail_start[0]) // unit
    assert scores[0, :, :tail].max() == largest

    workspace = make_topk_workspace(1, batch.heads, scores.shape[2], 80 // unit, DEVICE)
    shape = (batch.list_rows, batch.heads)
    indices = torch.zeros((*shape, 80 // unit), dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    select_topk(
        found, batch.plan, batch.lists(indices, counts), always=Always(16, 32),
        workspace=workspace, impl=impl,
    )  # fmt: skip
    tokens, row = int(batch.plan.tail_start[0]), int(batch.plan.request_slots[0])
    forced = {*range(16 // unit), *range((tokens - 32) // unit, -(-tokens // unit))}
    infinite = [*range(32 // unit, 48 // unit), *range(320 // unit, 336 // unit)]
    want = sorted([*forced, *infinite][: 80 // unit])
    for head in range(batch.heads):
        assert indices[row, head, : int(counts[row, head])].tolist() == want


@pytest.mark.parametrize("sketch", ["fp8", "int8"])
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[4]])
def test_sketch_scores_are_within_the_error_budget_of_an_eager_product(
    shape: tuple, sketch: str
) -> None:
    batch = make_batch(shape)
    planes = batch.make_planes(sketch, page_minmax=False)
    channels = random_channels(batch, 16)
    out = outputs(batch, 1)
    sketch_score(
        batch.q, channels, batch.sketch(planes), batch.plan, reduce="max", out=out, impl="triton"
    )
    scores = out.values
    exact = float64_sketch_scores(batch, planes, channels, "max", absolute=False)
    written = scores != UNTOUCHED
    eager = exact[written].to(batch.dtype)
    # Eager sums in float32 and rounds once; the kernel's sums of 16 round in fp16 at every channel.
    rounding = 16**0.5 * UNIT_ROUNDOFF[torch.float16]
    assert_within_budget(scores[written], exact[written], eager, rounding)


def float64_page_scores(
    batch: Batch, planes: PlaneBuffers, reduce: str, absolute: bool
) -> torch.Tensor:
    query, low, high = batch.q.double(), planes.page_min[0].double(), planes.page_max[0].double()
    if absolute:
        query, high = query.abs(), torch.maximum(low.abs(), high.abs())
    out = torch.zeros(
        (len(batch.lengths), batch.heads, score_width(batch, 16)),
        dtype=torch.float64,
        device=DEVICE,
    )
    pages = PageCuboids(low, high, 16, batch.page_size)
    page_minmax_score(query, pages, batch.plan, reduce=reduce, out=Scores(out, out), impl="torch")
    return out


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("reduce", "reselect_every"), [("max", 1), ("sum", 3)])
def test_page_kernel_is_within_float32_rounding_of_float64(
    shape: tuple, reduce: str, reselect_every: int, impl: str
) -> None:
    batch = make_batch(
        shape, unit=16, reselect_every=reselect_every, dense_rows=(len(shape[0]) - 1,)
    )
    planes = batch.make_planes(None, page_minmax=True)
    scores = outputs(batch, 16)
    page_minmax_score(
        batch.q, batch.cuboids(planes), batch.plan, reduce=reduce, out=scores, impl=impl
    )
    exact = float64_page_scores(batch, planes, reduce, absolute=False)
    magnitude = float64_page_scores(batch, planes, reduce, absolute=True)
    slack = dot_rounding(magnitude, 2 * batch.dim * (batch.group if reduce == "sum" else 1))
    check_scores(batch, 16, scores, exact, slack, impl)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
def test_page_score_bounds_every_key_of_the_page(shape: tuple) -> None:
    batch = make_batch(shape, unit=16)
    planes = batch.make_planes(None, page_minmax=True)
    exact = float64_page_scores(batch, planes, "max", absolute=False)
    plan, size = batch.plan, batch.page_size
    for row in range(len(batch.lengths)):
        query = batch.q[row].view(batch.heads, batch.group, -1).double()
        for position in range(int(plan.tail_start[row])):
            slot = int(plan.page_table[row, position // size]) * size + position % size
            logits = torch.einsum("hgd,hd->hg", query, batch.k[0][slot].double()).amax(1)
            assert (logits <= exact[row, :, position // 16] + 1e-9).all()
