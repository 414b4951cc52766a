# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of the plane update: one launch per kind of plane, all layers."""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..triton_ops import cast, pages_of, slots_of
from .types import FP8_MAX, INT4_MAX, INT4_ZERO, INT8_MAX, SCALE_MAX, PlaneBuffers


def _sketch_tile(max_new_tokens: int, page_size: int) -> tuple[int, int]:
    """(tokens a tile, warps). Decode writes one token, so a page-wide tile would idle."""
    return (1, 1) if max_new_tokens == 1 else (page_size, 4)


def _tiles(max_new_tokens: int, tile: int) -> int:
    """Aligned tiles that a range of ``max_new_tokens`` can touch, wherever it starts."""
    return triton.cdiv(max_new_tokens - 1, tile) + 1


@triton.jit
def _layer_keys(k_ptrs, keys, i_l):
    # The cast forgets that PyTorch allocations are aligned; without it loads are not vectorised.
    return tl.multiple_of(tl.load(k_ptrs + i_l).to(keys.dtype), 16)


@triton.jit
def _round_half_even(b_x, b_step):
    """Nearest multiple of a power of two; |x / step| < 2**22."""
    b_magic = b_step * 12582912.0
    return (b_x + b_magic) - b_magic


@triton.jit
def _round_to_e4m3(b_x):
    """Values of [-448, 448] on fp8's grid: 3 mantissa bits, multiples of 2**-9 near zero.

    The hardware's cast rounds the same way, but Triton's interpreter does not; a cast of values
    that are on the grid is exact in both.
    """
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_exponent = (b_bits & 0x7F800000).to(tl.float32, bitcast=True)
    b_x = _round_half_even(b_x, tl.maximum(b_exponent * 0.125, 0.001953125))
    # The sum lost the sign of a zero.
    b_sign = b_bits & -2147483648
    return (b_x.to(tl.int32, bitcast=True) | b_sign).to(tl.float32, bitcast=True)


@triton.jit
def _store_nibble(p_s, b_code, o_d, m_d, o_p, HALF: tl.constexpr, RUN: tl.constexpr):
    """Write one token's codes [1, BD] into the halves of bytes that it shares with another."""
    # [BD, 1]
    p_s += o_d[:, None] * RUN + (o_p % HALF)[None, :]
    b_shift = (o_p // HALF * 4)[None, :]
    b_old = tl.load(p_s, mask=m_d[:, None], other=0).to(tl.int32)
    b_new = (b_old & (240 >> b_shift)) | (tl.trans(b_code) << b_shift)
    tl.store(p_s, b_new.to(tl.uint8), mask=m_d[:, None])


@triton.jit
def _store_nibbles(
    p_s,
    b_code,
    o_d,
    m_d,
    tile,
    first,
    last,
    BD: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write a page's codes [2 * HALF, BD]; tokens outside of [first, last) keep theirs."""
    # [BD, HALF] each
    b_low, b_high = tl.split(tl.permute(tl.reshape(b_code, (2, HALF, BD)), (2, 1, 0)))
    o_h = tl.arange(0, HALF)
    m_low = ((tile + o_h >= first) & (tile + o_h < last))[None, :]
    m_high = ((tile + HALF + o_h >= first) & (tile + HALF + o_h < last))[None, :]
    p_s += o_d[:, None] * RUN + o_h[None, :]
    if (tile < first) | (tile + 2 * HALF > last):
        b_old = tl.load(p_s, mask=m_d[:, None], other=0).to(tl.int32)
        b_low = tl.where(m_low, b_low, b_old & 15)
        b_high = tl.where(m_high, b_high, b_old >> 4)
    tl.store(p_s, (b_low | (b_high << 4)).to(tl.uint8), mask=m_d[:, None])


@triton.jit
def update_sketch_kernel(
    keys,
    k_ptrs,
    key_sketch,
    key_sketch_scale,
    page_table,
    start,
    end,
    stride_table,
    num_runs,
    num_pages,
    fp8_max,
    int_max,
    scale_max,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    ZERO: tl.constexpr,
):
    i_t, i_r = tl.program_id(0), tl.program_id(1)
    i_l, i_h = tl.program_id(2) // H, tl.program_id(2) % H
    first, last = tl.load(start + i_r), tl.load(end + i_r)
    tile = (first // BT + i_t) * BT
    if tile < last and first < last:
        p_table = page_table + i_r.to(tl.int64) * stride_table
        page = pages_of(p_table, tile, None, PAGE).to(tl.int64)
        o_t = tile + tl.arange(0, BT)
        o_d = tl.arange(0, BD)
        m_t = (o_t >= first) & (o_t < last)
        m_d = o_d < D
        # A tile is one token or a whole page. Told so, the compiler sees that a page's row is
        # aligned.
        o_p = tl.arange(0, BT) if BT == PAGE else tile % PAGE + tl.arange(0, BT)
        p_k = _layer_keys(k_ptrs, keys, i_l)
        p_k += (page * PAGE + o_p)[:, None] * (H * D) + i_h * D + o_d[None, :]
        # [BT, BD]
        b_k = tl.load(p_k, mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        entry = (i_l.to(tl.int64) * num_pages + page) * H + i_h
        if FORMAT == "fp8":
            b_k = _round_to_e4m3(tl.minimum(tl.maximum(b_k, -fp8_max), fp8_max))
        elif FORMAT == "int8" or FORMAT == "int4":
            b_scale = tl.minimum(tl.div_rn(tl.max(tl.abs(b_k), 1), int_max), scale_max)
            b_scale = b_scale.to(tl.float16)
            b_safe = tl.where(b_scale > 0, b_scale.to(tl.float32), 1.0)
            b_k = tl.div_rn(b_k, b_safe[:, None] + tl.zeros_like(b_k))
            # The scale was rounded, so the largest may lie a little over.
            b_k = tl.minimum(tl.maximum(b_k, -int_max), int_max)
            b_k = _round_half_even(b_k, tl.full((), 1.0, tl.float32))
            tl.store(key_sketch_scale + entry * PAGE + o_p, b_scale, mask=m_t)
        # The page's part of its run. The next channel lies a whole run further.
        PART: tl.constexpr = PAGE // 2 if FORMAT == "int4" else PAGE
        run = i_l.to(tl.int64) * num_runs + page // (RUN // PART)
        p_s = key_sketch + (run * H + i_h) * (D * RUN) + page % (RUN // PART) * PART
        if FORMAT == "int4":
            b_code = b_k.to(tl.int32) + ZERO
            if BT == 1:
                _store_nibble(p_s, b_code, o_d, m_d, o_p, PART, RUN)
            else:
                _store_nibbles(p_s, b_code, o_d, m_d, tile, first, last, BD, PART, RUN)
        else:
            # [BD, BT], tokens innermost
            p_s += o_d[:, None] * RUN + o_p[None, :]
            b_s = cast(tl.trans(b_k), key_sketch.dtype.element_ty)
            if (tile >= first) & (tile + BT <= last):
                # No mask over tokens: whole rows of a page are written in wide stores.
                tl.store(p_s, b_s, mask=m_d[:, None])
            else:
                tl.store(p_s, b_s, mask=m_d[:, None] & m_t[None, :])


@triton.jit
def update_logical_pages_kernel(
    keys,
    k_ptrs,
    page_min,
    page_max,
    page_mean_low,
    page_mean_high,
    page_table,
    start,
    end,
    stride_table,
    num_entries,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
):
    i_u, i_r = tl.program_id(0), tl.program_id(1)
    i_l, i_h = tl.program_id(2) // H, tl.program_id(2) % H
    first, last = tl.load(start + i_r), tl.load(end + i_r)
    unit_start = (first // UNIT + i_u) * UNIT
    if unit_start < last and first < last:
        p_table = page_table + i_r.to(tl.int64) * stride_table
        slot = slots_of(p_table, unit_start, None, PAGE).to(tl.int64)
        o_t = tl.arange(0, UNIT)
        o_d = tl.arange(0, BD)
        m_d = o_d < D
        m_k = (unit_start + o_t < last)[:, None] & m_d[None, :]
        p_k = _layer_keys(k_ptrs, keys, i_l)
        p_k += (slot + o_t)[:, None] * (H * D) + i_h * D + o_d[None, :]
        # [UNIT, BD]
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_min = tl.min(tl.where(m_k, b_k, float("inf")), 0)
        b_max = tl.max(tl.where(m_k, b_k, float("-inf")), 0)
        entry = i_l.to(tl.int64) * num_entries + slot // UNIT
        o_e = (entry * H + i_h) * D + o_d
        if page_min is not None:
            tl.store(page_min + o_e, cast(b_min, page_min.dtype.element_ty), mask=m_d)
            tl.store(page_max + o_e, cast(b_max, page_max.dtype.element_ty), mask=m_d)
        if page_mean_low is not None:
            count = tl.minimum(last - unit_start, UNIT).to(tl.float32)
            b_centre = (b_max + b_min) * 0.5
            b_far = tl.where(m_k, tl.abs(b_k - b_centre[None, :]), 0.0)
            b_mean = tl.sum(b_far, 0) / count
            b_low, b_high = b_centre - b_mean, b_centre + b_mean
            if page_mean_low.dtype.element_ty == tl.float8e4nv:
                b_low, b_high = _round_to_e4m3(b_low), _round_to_e4m3(b_high)
            tl.store(page_mean_low + o_e, cast(b_low, page_mean_low.dtype.element_ty), mask=m_d)
            tl.store(page_mean_high + o_e, cast(b_high, page_mean_high.dtype.element_ty), mask=m_d)


_FORMATS = {
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    torch.uint8: "int4",
    torch.bfloat16: "bf16",
}


def update_planes_triton(
    keys: torch.Tensor,
    k_ptrs: torch.Tensor,
    planes: PlaneBuffers,
    page_table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    page_size: int,
    max_new_tokens: int,
) -> None:
    """Launch one kernel per kind of plane: one program a tile, row, layer and KV head."""
    _, heads, dim = keys.shape
    rows, layers = start.shape[0], k_ptrs.shape[0]
    if planes.key_sketch is not None:
        tile, warps = _sketch_tile(max_new_tokens, page_size)
        update_sketch_kernel[(_tiles(max_new_tokens, tile), rows, layers * heads)](
            keys,
            k_ptrs,
            planes.key_sketch,
            planes.key_sketch_scale,
            page_table,
            start,
            end,
            page_table.stride(0),
            planes.key_sketch.shape[1],
            0 if planes.key_sketch_scale is None else planes.key_sketch_scale.shape[1],
            FP8_MAX,
            INT8_MAX if planes.key_sketch.dtype == torch.int8 else INT4_MAX,
            SCALE_MAX,
            H=heads,
            D=dim,
            BD=next_power_of_2(dim),
            PAGE=page_size,
            BT=tile,
            RUN=planes.key_sketch.shape[4],
            FORMAT=_FORMATS[planes.key_sketch.dtype],
            ZERO=INT4_ZERO,
            num_warps=warps,
        )
    bounds = planes.page_mean_low if planes.page_min is None else planes.page_min
    if bounds is not None:
        unit = planes.logical_page
        update_logical_pages_kernel[(_tiles(max_new_tokens, unit), rows, layers * heads)](
            keys,
            k_ptrs,
            planes.page_min,
            planes.page_max,
            planes.page_mean_low,
            planes.page_mean_high,
            page_table,
            start,
            end,
            page_table.stride(0),
            bounds.shape[1],
            H=heads,
            D=dim,
            BD=next_power_of_2(dim),
            PAGE=page_size,
            UNIT=unit,
            num_warps=2,
        )
