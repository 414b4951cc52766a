# SPDX-License-Identifier: Apache-2.0
"""Every operator on K and V in fp8 e4m3 with scales, beside loops in float64.

fp8 numbers are exact in bf16 and fp16, so what a kernel may be off is what it may be off on K and V
of the queries' dtype. The loops take each scale once, as a factor of the key or the value.
"""

import math
from dataclasses import replace

import pytest
import test_attend
import test_exact
import test_score
import test_step
import test_tiles
import torch
import triton
import triton.language as tl
from error_budget import UNIT_ROUNDOFF, assert_within_budget, dot_rounding, mass_rounding
from kernel_cases import DEVICE, FAST, Batch
from progressive_cases import (
    Setting,
    check,
    in_double,
    naive_order,
    run,
    shape_keys,
    unit_products,
)
from progressive_cases import make_batch as progressive_batch
from test_planes import SKETCHES, as_bytes, fresh_planes, naive_cuboid, update

from sglang_sparse_kernels import KVScales, KVView, Scores, dequantize_sketch
from sglang_sparse_kernels.common import FP8, take
from sglang_sparse_kernels.progressive.reference import prologue_units
from sglang_sparse_kernels.triton_ops import halved, widened

SCALES = KVScales(0.37, 1.9)
KV = {"kv_dtype": FP8, "scales": SCALES}
LARGE = {"kv_dtype": FP8, "scales": KVScales(3.1, 0.04)}


def in_float64(batch: Batch) -> None:
    """Queries that the reference computes with in float64; K and V stay fp8."""
    batch.q = batch.q.double()


@pytest.mark.parametrize("case", test_attend.CASES)
@pytest.mark.parametrize(("options", "cap"), [(KV, 0.0), (LARGE, 5.0)])
def test_attention_takes_both_scales(case: tuple, options: dict, cap: float) -> None:
    batch = test_attend.make_batch(case, **options)
    lists = batch.random_lists()
    exact = test_attend.naive_attention(batch, lists, torch.float64, cap)
    eager = test_attend.naive_attention(batch, lists, batch.dtype, cap)
    slack = test_attend.rounding(batch.dtype)
    for impl in FAST:
        got = test_attend.attend(batch, lists, impl, cap)
        for row in range(len(batch.lengths)):
            assert_within_budget(got[row], exact[row], eager[row], slack)
    in_float64(batch)
    torch.testing.assert_close(test_attend.attend(batch, lists, "torch", cap), exact)


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_are_scaled_once(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_sparse_kernels.attend import kernel

    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    case = ([511, 1, 70], 64, 1, 4, 64, torch.bfloat16, 1, 1)
    batch = test_attend.make_batch(case, **KV)
    lists = batch.random_lists()
    monkeypatch.setattr(
        test_attend, "make_workspace", lambda *_: torch.empty(3 * 4 * splits * 65, device=DEVICE)
    )
    exact = test_attend.naive_attention(batch, lists, torch.float64)
    eager = test_attend.naive_attention(batch, lists, batch.dtype)
    got = test_attend.attend(batch, lists, "triton")
    assert_within_budget(got, exact, eager, test_attend.rounding(batch.dtype))


@pytest.mark.parametrize("case", test_exact.CASES)
@pytest.mark.parametrize(("options", "pool", "cap"), [(KV, "group", 0.0), (LARGE, "heads", 5.0)])
def test_exact_scores_take_the_scale_of_the_keys(
    case: tuple, options: dict, pool: str, cap: float
) -> None:
    batch = test_exact.make_batch(case, **options)
    want, size = test_exact.naive(batch, pool, cap)
    inside, width = want != test_exact.UNTOUCHED, want.shape[2]
    slack = test_exact.score_rounding(size, want, batch.dim)
    for impl in FAST:
        got, _ = test_exact.score(batch, pool, impl, cap)
        assert ((got[..., :width].double() - want).abs() <= slack)[inside].all()
    in_float64(batch)
    reference, _ = test_exact.score(batch, pool, "torch", cap)
    torch.testing.assert_close(reference[..., :width], want)


@pytest.mark.parametrize("case", test_tiles.CASES)
@pytest.mark.parametrize(("options", "pool", "cap"), [(KV, "group", 0.0), (LARGE, "heads", 4.0)])
def test_tiles_take_both_scales(case: tuple, options: dict, pool: str, cap: float) -> None:
    prompts = test_tiles.Prompts(case, options)
    batch, lists = prompts.batch, prompts.random_lists()
    want, size = test_tiles.naive_scores(prompts, pool, cap)
    got, _ = test_tiles.score(prompts, pool, "triton", cap)
    inside, width = want != test_tiles.UNTOUCHED, want.shape[2]
    few = 16 * UNIT_ROUNDOFF[torch.float32]
    slack = 2 * dot_rounding(size, batch.dim) + few * (size + want.abs().where(inside, 0) + 96)
    # Scores below -200 may be written as -inf.
    inside &= want > -200
    assert ((got[..., :width].double() - want).abs() <= slack)[inside].all()
    exact = test_tiles.naive_attention(prompts, lists, torch.float64, cap)
    eager = test_tiles.naive_attention(prompts, lists, batch.dtype, cap)
    out = test_tiles.attend(prompts, lists, "triton", logit_cap=cap)
    assert_within_budget(out, exact, eager, 3 * UNIT_ROUNDOFF[batch.dtype])
    prompts.q = prompts.q.double()
    reference, _ = test_tiles.score(prompts, pool, "torch", cap)
    torch.testing.assert_close(reference[..., :width], want)
    torch.testing.assert_close(test_tiles.attend(prompts, lists, "torch", logit_cap=cap), exact)


PROGRESSIVE = ([311, 200, 30], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("options", [KV, LARGE])
def test_progressive_attention_stops_by_the_scaled_mass(impl: str, options: dict) -> None:
    batch = progressive_batch(PROGRESSIVE, **options)
    batch.q *= 0.3
    if impl == "torch":
        in_double(batch)
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 32)
    check(batch, scores, run(batch, scores, ask, impl), ask)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("options", [KV, LARGE])
def test_bounds_of_the_residual_mass_are_those_of_the_scaled_keys(impl: str, options: dict) -> None:
    batch, plain = progressive_batch(PROGRESSIVE, **options), progressive_batch(PROGRESSIVE)
    if impl == "torch":
        in_double(batch)
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 32, "min", upper=True)
    # The same keys and values without scales, in float64.
    in_double(plain)
    plain.q = batch.q.double()
    plain.k = [keys.double() * batch.scales.k for keys in batch.k]
    plain.v = [values.double() * batch.scales.v for values in batch.v]
    got, want = run(batch, scores, ask, impl), run(plain, scores, ask, "torch")
    check(batch, scores, got, ask)
    for row in range(2):
        # As for bounds of unscaled keys: what a sum of products rounds, in log 2.
        rounding = mass_rounding(unit_products(batch, row), 2 * batch.dim)
        slack = (rounding + batch.dim * UNIT_ROUNDOFF[torch.float32]) / math.log(2)
        order, forced = naive_order(batch, scores, row, 0)
        checks = -(-(len(order) - prologue_units(forced, 2)) // 2) + 1
        bounds = (each["bounds"][row, ..., :checks].double() for each in (got, want))
        torch.testing.assert_close(*bounds, rtol=slack, atol=slack)


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize(
    ("page_size", "dim", "start", "end"),
    [(64, 64, [0, 62, 100, 5], [1, 63, 111, 5]), (16, 128, [256, 15, 0, 1], [257, 31, 111, 30])],
)
def test_plane_kernels_equal_their_reference_bit_for_bit(
    sketch: str, page_size: int, dim: int, start: list, end: list
) -> None:
    batch = Batch([257, 63, 111, 30], page_size=page_size, dim=dim, layers=2, seed=dim, **KV)
    got, want = (fresh_planes(batch, sketch, mean=True) for _ in "ab")
    assert got.page_min.dtype == FP8
    assert got.page_mean_low.dtype == FP8
    update(batch, got, start, end, "triton")
    update(batch, want, start, end, "torch")
    for name, plane in as_bytes(got).items():
        if name.startswith("page_mean"):
            continue  # float32 sums in another order: below
        assert torch.equal(plane, as_bytes(want)[name]), name


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_bounds_and_an_fp8_sketch_hold_the_keys_as_they_are_stored(impl: str) -> None:
    batch = Batch([111, 1, 63], page_size=32, seed=5, **KV)
    # The largest and the smallest numbers of e4m3, and a negative zero.
    slot = int(batch.plan.page_table[0, 1]) * 32 + 3
    extreme = torch.tensor([448.0, -448, 2.0**-9, -(2.0**-9), -0.0], device=DEVICE).to(FP8)
    batch.k[0][slot, :, :5] = extreme
    planes = fresh_planes(batch, "fp8", mean=True)
    update(batch, planes, [0, 0, 0], [111, 1, 63], impl)
    keys = dequantize_sketch(planes.key_sketch[0], None, torch.float64, 32)
    for row, length in enumerate(batch.lengths):
        for first in range(0, length, 16):
            count, page = min(16, length - first), int(batch.plan.page_table[row, first // 32])
            at = page * 32 + first % 32 + torch.arange(count, device=DEVICE)
            stored = take(batch.k[0], at)
            within = slice(first % 32, first % 32 + count)
            assert torch.equal(keys[page][..., within].permute(2, 0, 1), stored.double())
            entry = page * 2 + first % 32 // 16
            assert torch.equal(planes.page_min[0, entry].double(), stored.double().amin(0))
            assert torch.equal(planes.page_max[0, entry].double(), stored.double().amax(0))
            size = stored.double().abs().max()
            ends = (planes.page_mean_low, planes.page_mean_high)
            for plane, want in zip(ends, naive_cuboid(stored.float()), strict=True):
                # Below the smallest normal number fp8 has multiples of 2**-9.
                slack = 2.0**-4 * want.abs().clamp(min=2.0**-6) + dot_rounding(size, 16)
                assert ((plane[0, entry].double() - want).abs() <= slack).all()


@pytest.mark.parametrize("shape", test_score.SHAPES)
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_page_scores_read_fp8_bounds(shape: tuple, reduce: str) -> None:
    batch = test_score.make_batch(shape, unit=16, **KV)
    planes = batch.make_planes(None, page_minmax=True)
    exact = test_score.float64_page_scores(batch, planes, reduce, absolute=False)
    magnitude = test_score.float64_page_scores(batch, planes, reduce, absolute=True)
    slack = dot_rounding(magnitude, 2 * batch.dim * (batch.group if reduce == "sum" else 1))
    for impl in FAST:
        scores = test_score.outputs(batch, 16)
        test_score.page_minmax_score(
            batch.q, batch.cuboids(planes), batch.plan, reduce=reduce, out=scores, impl=impl
        )
        test_score.check_scores(batch, 16, scores, exact, slack, impl)
    reference = Scores(torch.zeros_like(exact), torch.zeros_like(exact))
    in_float64(batch)
    test_score.page_minmax_score(
        batch.q, batch.cuboids(planes), batch.plan, reduce=reduce, out=reference, impl="torch"
    )
    assert torch.equal(reference.values, exact)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("unit", [1, 16])
def test_implementations_decode_alike(impl: str, unit: int) -> None:
    outputs, scores, decoder = test_step.run(impl, unit, **KV)
    torch_outputs, _, torch_decoder = test_step.run("torch", unit, scores, **KV)
    for got, want in zip(outputs, torch_outputs, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error <= 3 * UNIT_ROUNDOFF[torch.bfloat16]
    for name, plane in decoder.planes.tensors().items():
        same = torch_decoder.planes.tensors()[name]
        assert torch.equal(plane.view(torch.uint8), same.view(torch.uint8)), name


def test_other_dtypes_of_k_and_v_are_refused() -> None:
    batch = test_attend.make_batch(test_attend.CASES[0], **KV)
    view = batch.kv
    for rows, words in (
        ({"k": view.k.view(torch.float8_e5m2), "v": view.v}, "k is torch.float8_e5m2"),
        ({"k": view.k.view(torch.uint8), "v": view.v}, "k is torch.uint8"),
        ({"k": view.k, "v": view.v.to(batch.dtype)}, "v is torch.bfloat16, expected torch.float8"),
    ):
        mixed: KVView = replace(view, **rows)
        with pytest.raises(ValueError, match=words):
            mixed.check_triton(batch.q)


@triton.jit
def widen_kernel(x, y, z, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(y + o_n, widened(tl.load(x + o_n), y.dtype.element_ty))
    tl.store(z + o_n, halved(tl.load(x + o_n), y.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_fp8_is_widened_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    rows = torch.where(codes & 127 == 127, 0, codes).view(FP8)  # the interpreter knows no NaN
    wide = torch.full((256,), torch.nan, dtype=dtype, device=DEVICE)
    half = torch.full((256,), torch.nan, dtype=torch.float16, device=DEVICE)
    widen_kernel[(1,)](rows, wide, half, 256)
    for got in (wide, half):
        torch.testing.assert_close(got.float(), rows.float(), rtol=0, atol=0)
