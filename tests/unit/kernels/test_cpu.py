# SPDX-License-Identifier: Apache-2.0
"""What runs on a CPU against the references: rows of several pieces, every fp8 number, ties."""

from dataclasses import replace

import kernel_cases
import numpy as np
import pytest
import torch
from error_budget import attention_rounding, dot_rounding
from kernel_cases import NAN, Batch

from sglang_sparse_kernels import (
    Always,
    KVView,
    Lists,
    Scores,
    exact_score,
    gathered_decode_attention,
    make_scores,
    page_bounds,
    page_minmax_score,
    paged,
    select_topk,
    sketch_score,
)
from sglang_sparse_kernels.score import cpu as score_cpu
from sglang_sparse_kernels.select.cpu import best

CPU = torch.device("cpu")
UNTOUCHED = 12345.0
# One page, some whole pieces and a part, exactly two pieces; the last row is dense.
LENGTHS = [63, 701, 257, 129, 450]
PIECE = 128


@pytest.fixture(autouse=True)
def on_the_cpu_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of hundreds of tokens take several pieces, wherever these tests run."""
    monkeypatch.setattr(kernel_cases, "DEVICE", CPU)
    monkeypatch.setattr(paged, "PIECE_TOKENS", PIECE)
    monkeypatch.setattr(score_cpu, "PIECE_TOKENS", PIECE)


def make_batch(seed: int, **options: object) -> Batch:
    """Rows longer than a piece, in float32, so that no output is rounded to 16 bits."""
    settings = {"heads": 3, "group": 2, "dense_rows": (4,), "shared_pages": 1}
    settings |= {"dtype": torch.float32, "seed": seed, "page_size": (64, 32, 16)[seed % 3]}
    return Batch(LENGTHS, **settings | options)


def doubled(batch: Batch, *, absolute: bool = False) -> tuple[torch.Tensor, KVView]:
    """Queries and keys in float64, or their absolute values, and |values|."""
    q, k, v = (t.double() for t in (batch.q, batch.k[0], batch.v[0]))
    if absolute:
        q, k, v = q.abs(), k.abs(), v.abs()
    return q, KVView(k, v, batch.plan.page_table, batch.page_size)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("unit", [1, 16])
def test_attention_is_within_float32_rounding_of_the_reference(seed: int, unit: int) -> None:
    batch = make_batch(seed, unit=unit, reselect_every=3)
    lists = batch.lists(*batch.random_lists())
    got = torch.full_like(batch.q, NAN)
    options = {"softmax": batch.softmax(), "impl": "cpu"}
    gathered_decode_attention(batch.q, batch.kv, batch.plan, lists, out=got, **options)
    q, kv = doubled(batch)
    want, weighted = torch.zeros_like(q), torch.zeros_like(q)
    options["impl"] = "torch"
    gathered_decode_attention(q, kv, batch.plan, lists, out=want, **options)
    absolute = replace(kv, v=kv.v.abs())
    gathered_decode_attention(q, absolute, batch.plan, lists, out=weighted, **options)
    for row, length in enumerate(LENGTHS):
        slots = kv.slots(row, torch.arange(length))
        sizes = torch.einsum(
            "hgd,nhd->hgn", q[row].abs().unflatten(0, (3, 2)), kv.k[slots].abs()
        ) * (batch.dim**-0.5)
        slack = attention_rounding(sizes, batch.dim, weighted[row].unflatten(0, (3, 2)))
        error = (got[row].double() - want[row]).abs()
        assert (error <= slack.flatten(0, 1)).all(), f"row {row}: {error.max()}"


def test_a_plan_made_dense_attends_to_everything() -> None:
    batch = make_batch(7, dtype=torch.float64)
    dense = batch.plan.dense()
    none = torch.zeros((1, 3, 1), dtype=torch.int32)
    out, want = torch.full_like(batch.q, NAN), torch.full_like(batch.q, NAN)
    gathered_decode_attention(
        batch.q, batch.kv, dense, Lists(none, none[..., 0], dense.k_units),
        softmax=batch.softmax(), out=out, impl="cpu",
    )  # fmt: skip
    for row, length in enumerate(LENGTHS):
        slots = batch.kv.slots(row, torch.arange(length))
        keys, values = batch.k[0][slots], batch.v[0][slots]
        logits = torch.einsum("hgd,nhd->hgn", batch.q[row].unflatten(0, (3, 2)), keys)
        weights = (logits * batch.dim**-0.5).softmax(-1)
        want[row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
    torch.testing.assert_close(out, want)
    assert (batch.plan.k_units > 0).any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pool", ["group", "heads"])
def test_exact_scores_rank_as_the_reference_does(seed: int, pool: str) -> None:
    """In float64, where both round alike but for the last bits."""
    batch = make_batch(seed, reselect_every=3)
    q, kv = doubled(batch)
    shape = (len(LENGTHS), 1 if pool == "heads" else 3, 720)
    found = {}
    for impl in ("torch", "cpu"):
        values = torch.full(shape, UNTOUCHED, dtype=torch.float64)
        out = Scores(values, make_scores(*shape, CPU).block_max)
        exact_score(q, kv, batch.plan, softmax=batch.softmax(5.0), pool=pool, out=out, impl=impl)
        found[impl] = values
    assert (found["torch"] != UNTOUCHED).any()
    torch.testing.assert_close(found["cpu"], found["torch"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4", "bf16"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_scores_of_any_bits_are_the_references(dtype: str, reduce: str) -> None:
    """Every number that a sketch can hold, the NaN of fp8 among them."""
    batch = make_batch(1, heads=2)
    planes = batch.make_planes(dtype, page_minmax=False)
    values = planes.key_sketch[0]
    if dtype == "bf16":
        values.copy_(batch.randn(*values.shape).clamp(-4, 4))
    else:
        codes = torch.randint(0, 256, values.shape, generator=batch.rng, dtype=torch.uint8)
        # Pages without NaN, as all are on a sound server.
        half = codes[: len(codes) // 2]
        half.masked_fill_(half & 0x7F == 0x7F, 0)
        values.view(torch.uint8).copy_(codes)
    scale = planes.key_sketch_scale
    if scale is not None:
        scale.copy_(torch.rand(scale.shape, generator=batch.rng))
    sketch = batch.sketch(planes)
    draws = [torch.randperm(batch.dim, generator=batch.rng)[:16] for _ in range(batch.list_rows)]
    channels = torch.stack((torch.stack(draws), torch.stack(draws[::-1])), 1).int()
    found = {}
    for impl in ("torch", "cpu"):
        out = make_scores(len(LENGTHS), 2, 720, CPU)
        out.values.fill_(UNTOUCHED)
        sketch_score(batch.q, channels, sketch, batch.plan, reduce=reduce, out=out, impl=impl)
        found[impl] = out.values.double()
    want, got = found["torch"], found["cpu"]
    assert torch.equal(got == UNTOUCHED, want == UNTOUCHED)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    assert (want == -torch.inf).any() == (dtype == "fp8")
    # No product is larger than a query times the largest number; both round a sum of so many.
    largest = {"fp8": 448.0, "int8": 128.0, "int4": 8.0, "bf16": 4.0}[dtype]
    size = 16 * 2 * batch.q.abs().amax() * largest
    finite = want.isfinite()
    assert ((got - want).abs()[finite] <= 2 * dot_rounding(size, 32)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unit", [16, 32])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_page_scores_and_bounds_are_the_references(seed: int, unit: int, reduce: str) -> None:
    batch = make_batch(seed, unit=unit, page_size=(64, 32)[seed % 2], capacity=8)
    planes = batch.make_planes(None, page_minmax=True)
    pages = batch.cuboids(planes)
    found, bounds = {}, {}
    for impl in ("torch", "cpu"):
        out = make_scores(len(LENGTHS), 3, 48, CPU)
        out.values.fill_(UNTOUCHED)
        page_minmax_score(batch.q, pages, batch.plan, reduce=reduce, out=out, impl=impl)
        found[impl] = out.values.double()
        bounds[impl] = torch.full((len(LENGTHS), 3, 2, 48), UNTOUCHED)
        page_bounds(batch.q, pages, batch.plan, out=bounds[impl], impl=impl)
    largest = torch.maximum(pages.low.abs().nan_to_num(), pages.high.abs().nan_to_num()).amax()
    size = 2 * batch.dim * batch.q.abs().amax().double() * largest
    for got, want, terms in (
        (found["cpu"], found["torch"], 2 * batch.dim * 2),
        (bounds["cpu"].double(), bounds["torch"].double(), 2 * batch.dim),
    ):
        assert torch.equal(got == UNTOUCHED, want == UNTOUCHED)
        assert (want != UNTOUCHED).any()
        assert ((got - want).abs() <= 2 * dot_rounding(2 * size, terms)).all()


@pytest.mark.parametrize("seed", range(20))
def test_lists_are_the_references_to_the_bit(seed: int) -> None:
    source = np.random.default_rng(seed)
    lengths = [int(n) for n in source.integers(60, 900, size=3)]
    unit, heads = int(source.choice([1, 16])), int(source.integers(1, 6))
    budget = int(source.integers(3, 60)) * unit
    batch = Batch(lengths, heads=heads, unit=unit, budget=budget, capacity=70, seed=seed)
    width = -(-max(lengths) // unit) + 2
    scores = make_scores(3, heads, width, CPU)
    # From all different to all alike; the largest and the least number that scores may have.
    steps = float(source.choice([1e6, 8, 2, 0.1]))
    scores.values.copy_((batch.randn(3, heads, width) * steps).round() / steps)
    scores.values[scores.values > 2.5] = torch.finfo(torch.float32).max
    scores.values[scores.values < -1.0] = -torch.inf
    scores.values[scores.values == 0] *= torch.tensor(source.choice([-1.0, 1.0]))
    always = Always(int(source.integers(0, 40)), int(source.integers(0, 40)))
    found = []
    for impl in ("torch", "cpu"):
        indices = torch.full((batch.list_rows, heads, 70), -7, dtype=torch.int32)
        counts = torch.full((batch.list_rows, heads), -7, dtype=torch.int32)
        select_topk(scores, batch.plan, batch.lists(indices, counts), always=always, impl=impl)
        found.append((indices, counts))
    (want, want_counts), (got, counts) = found
    assert torch.equal(counts, want_counts)
    assert (counts > 0).any()
    assert torch.equal(got, want)


def test_of_equal_scores_the_lower_index_is_among_the_best() -> None:
    scores = np.array([[1, 3, 3, 3, 2], [3, 3, 3, 3, 3], [5, 4, 3, 2, 1]], dtype=np.float32)
    assert best(scores, 2).tolist() == [[1, 2], [0, 1], [0, 1]]
    assert best(scores, 5).tolist() == [[0, 1, 2, 3, 4]] * 3
