# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def,assignment"
"""Triton implementation of scores from a sketch of the keys."""

import math

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..device import splits_of
from ..plan import DecodePlan
from ..planes import KeySketch
from ..records import BLOCK_UNITS, Scores
from ..triton_ops import (
    INTERPRETED,
    HeadShape,
    begin,
    constants,
    finite_scores,
    is_read,
    overlapping,
    pages_of,
)
from .channel_kernel import best_channels

# Every program loops over tiles of its row, so that short rows of a long context cost nothing.
# Sizes were measured on one H200.
SKETCH_TILE_TOKENS = 1024
SKETCH_CTAS_PER_SM = 4
SKETCH_WARPS = 4


@triton.jit
def _load_channels(p_c, D: tl.constexpr, KEPT: tl.constexpr):
    """Tuple of ``KEPT`` channels, each below D even if it was never written."""
    kept = ()
    for i_c in tl.static_range(KEPT):
        kept = kept + (tl.minimum(tl.maximum(tl.load(p_c + i_c), 0), D - 1),)
    return kept


@triton.jit
def _load_weights(p_q, kept, G: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr):
    """Tuple of float32: the query's values in the kept channels, one head after the other."""
    weights = ()
    for i_g in tl.static_range(G):
        for i_c in tl.static_range(KEPT):
            weights = weights + (tl.load(p_q + i_g * D + kept[i_c]).to(tl.float32),)
    return weights


@triton.jit
def _scale_weights(weights, factor, SIZE: tl.constexpr):
    scaled = ()
    for i_w in tl.static_range(SIZE):
        scaled = scaled + ((weights[i_w] * factor).to(tl.float16),)
    return scaled


@triton.jit
def _join(b_a, b_b, SUM: tl.constexpr):
    return b_a + b_b.to(tl.float32) if SUM else tl.maximum(b_a, b_b)


@triton.jit
def _int8_keys(b_k):
    """int8 as fp16. Bits of four numbers are moved at once: converting takes four times as long."""
    if INTERPRETED:
        b_f = b_k.to(tl.float16)
    else:
        # The fp16 number 1024 + n has the bits of n under its exponent's.
        b_f = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, lo, hi, c;
                mov.b32 c, 0x64806480;
                xor.b32 x, $2, 0x80808080;
                prmt.b32 lo, x, 0x64646464, 0x4140;
                prmt.b32 hi, x, 0x64646464, 0x4342;
                sub.f16x2 $0, lo, c;
                sub.f16x2 $1, hi, c;
            }
            """,
            "=r,=r,r",
            [b_k],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return b_f


@triton.jit
def _int4_keys(b_k):
    """Low and high halves of bytes as fp16, less the 8 that codes are stored with."""
    if INTERPRETED:
        b_low = (b_k & 15).to(tl.float16) - 8.0
        b_high = (b_k >> 4).to(tl.float16) - 8.0
    else:
        # A high half stays where it is: 1024 + 16 n, times 1/16, less 72.
        b_low, b_high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, y, a, b, c, d, e;
                mov.b32 c, 0x64086408;
                mov.b32 d, 0x2C002C00;
                mov.b32 e, 0xD480D480;
                prmt.b32 x, $4, 0, 0x4140;
                prmt.b32 y, $4, 0, 0x4342;
                lop3.b32 a, x, 0x000F000F, 0x64006400, 0xEA;
                lop3.b32 b, y, 0x000F000F, 0x64006400, 0xEA;
                sub.f16x2 $0, a, c;
                sub.f16x2 $1, b, c;
                lop3.b32 a, x, 0x00F000F0, 0x64006400, 0xEA;
                lop3.b32 b, y, 0x00F000F0, 0x64006400, 0xEA;
                fma.rn.f16x2 $2, a, d, e;
                fma.rn.f16x2 $3, b, d, e;
            }
            """,
            "=r,=r,=r,=r,r",
            [b_k],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return b_low, b_high


@triton.jit
def _sum_channels(
    p_s,
    kept,
    weights,
    m_j,
    first: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    BP: tl.constexpr,
    SUBPAGE: tl.constexpr,
    RUN: tl.constexpr,
    SUMS: tl.constexpr,
    PACK: tl.constexpr,
):
    """Scores [BP, SUBPAGE] of ``HEADS`` heads from ``first`` on, a tuple of heads and subpages."""
    sums = ()
    for _ in tl.static_range(HEADS * PACK):
        sums = sums + (tl.zeros((BP, SUBPAGE), SUMS),)
    for i_c in tl.static_range(KEPT):
        # [BP, SUBPAGE]
        b_k = tl.load(p_s + kept[i_c] * RUN, mask=m_j, other=0.0)
        if PACK == 2:
            keys = _int4_keys(b_k)
        elif b_k.dtype == tl.int8:
            keys = (_int8_keys(b_k),)
        else:
            keys = (b_k.to(SUMS),)
        added = ()
        for i in tl.static_range(HEADS * PACK):
            weight = weights[(first + i // PACK) * KEPT + i_c]
            added = added + (sums[i] + weight * keys[i % PACK],)
        sums = added
    return sums


@triton.jit
def _score_subpages(
    p_s,
    kept,
    weights,
    m_j,
    G: tl.constexpr,
    KEPT: tl.constexpr,
    BP: tl.constexpr,
    SUBPAGE: tl.constexpr,
    RUN: tl.constexpr,
    SUM: tl.constexpr,
    SUMS: tl.constexpr,
    PACK: tl.constexpr,
):
    """Scores [BP, SUBPAGE], reduced over the heads, before scales; ``p_s`` points at channel 0.

    A tuple of two where a byte holds two tokens, the low halves first.
    """
    joined = ()
    for _ in tl.static_range(PACK):
        joined = joined + (
            tl.full((BP, SUBPAGE), 0.0 if SUM else float("-inf"), tl.float32 if SUM else SUMS),
        )
    for i_g in tl.static_range(0, G, 4):
        # Four heads at a time: their sums and a channel's keys fit in registers.
        sums = _sum_channels(
            p_s, kept, weights, m_j, i_g, G - i_g if G - i_g < 4 else 4, KEPT, BP, SUBPAGE, RUN,
            SUMS, PACK,
        )  # fmt: skip
        for i_h in tl.static_range(G - i_g if G - i_g < 4 else 4):
            more = ()
            for i_p in tl.static_range(PACK):
                more = more + (_join(joined[i_p], sums[i_h * PACK + i_p], SUM),)
            joined = more
    return joined


@triton.jit
def sketch_score_kernel(
    q,
    channels,
    key_sketch,
    key_sketch_scale,
    page_table,
    tail_start,
    k_units,
    reselect,
    refresh,
    request_slots,
    unread,
    out,
    block_max,
    stride_q,
    stride_table,
    pages,
    width,
    blocks,
    S: tl.constexpr,
    KEPT: tl.constexpr,
    PAGE: tl.constexpr,
    BP: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    ALIGN: tl.constexpr,
    SUM: tl.constexpr,
    CHOOSE: tl.constexpr,
):
    begin()
    i_r, i_h = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    # What the row's plan says is read at once, not one answer after the other.
    scored = tl.load(reselect + i_r) != 0
    fresh = (tl.load(refresh + i_r) != 0) & CHOOSE
    sparse = tl.load(k_units + i_r) > 0
    n = tl.where(scored, tl.load(tail_start + i_r), 0)
    i_l = tl.load(request_slots + i_r).to(tl.int64)
    p_table = page_table + i_r.to(tl.int64) * stride_table
    o_j = tl.program_id(1) * BP + tl.arange(0, BP)
    # [BP]; entries past the row's pages are not used.
    b_page = pages_of(p_table, o_j, o_j < pages, 1)
    if (scored | fresh) & sparse & is_read(unread, i_h):
        p_c = channels + (i_l * S.H + i_h) * KEPT
        p_q = q + i_r.to(tl.int64) * stride_q + i_h * S.G * S.D
        if fresh:
            # Every program of a row chooses for itself, and writes the same, so that none waits
            # for another.
            m_kept, o_c = best_channels(p_q, S, KEPT)
            tl.store(p_c + o_c, tl.arange(0, S.BD), mask=m_kept)
            tl.debug_barrier()
        kept = _load_channels(p_c, S.D, KEPT)
        weights = _load_weights(p_q, kept, S.G, S.D, KEPT)
        q_scale = 1.0
        # fp16 sums halve the arithmetic, and 8-bit keys carry far less precision than they do.
        SUMS: tl.constexpr = (
            tl.float32 if key_sketch.dtype.element_ty == tl.bfloat16 else tl.float16
        )
        if tl.float16 == SUMS:
            # A power of two brings the query into fp16's range without rounding it.
            largest = tl.abs(weights[0])
            for i_w in tl.static_range(1, S.G * KEPT):
                largest = tl.maximum(tl.abs(weights[i_w]), largest)
            # Weights are below 2 and fp8 keys at most 448, so 73 products stay in fp16's range.
            FP8: tl.constexpr = key_sketch.dtype.element_ty == tl.float8e4nv
            HEADROOM: tl.constexpr = (KEPT - 1) // 73 if FP8 else 0
            exponent = (largest.to(tl.int32, bitcast=True) >> 23) + HEADROOM
            # Within what has a reciprocal that is no subnormal number.
            exponent = tl.minimum(tl.maximum(exponent, 1), 253)
            q_scale = (exponent << 23).to(tl.float32, bitcast=True)
            factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            weights = _scale_weights(weights, factor, S.G * KEPT)

        base = tl.program_id(0).to(tl.int64)
        o_out = tl.multiple_of(base * width, ALIGN)
        # Tokens that share a byte. Those of a page in the same half of their bytes are a subpage.
        PACK: tl.constexpr = 2 if key_sketch.dtype.element_ty == tl.uint8 else 1
        SUBPAGE: tl.constexpr = PAGE // PACK
        o_c = tl.arange(0, SUBPAGE)
        for i_t in tl.range(tl.program_id(1), tl.cdiv(n, BP * PAGE), tl.num_programs(1)):
            m_j = (o_j * PAGE < n)[:, None]
            b_at = tl.where(o_j * PAGE < n, b_page, 0).to(tl.int64)
            b_entry = (b_at * S.H + i_h)[:, None]
            # A page's part of its run; a channel further is a run further.
            b_run = (b_at // (RUN // SUBPAGE) * S.H + i_h) * (S.D * RUN)
            p_s = key_sketch + (b_run + b_at % (RUN // SUBPAGE) * SUBPAGE)[:, None] + o_c[None, :]
            # Where the next tile lies is looked up while this one is on its way.
            o_j += tl.num_programs(1) * BP
            b_page = pages_of(p_table, o_j, o_j < pages, 1)
            subpages = _score_subpages(
                p_s, kept, weights, m_j, S.G, KEPT, BP, SUBPAGE, RUN, SUM, SUMS, PACK
            )
            for i_sub in tl.static_range(PACK):
                b_score = subpages[i_sub].to(tl.float32) * q_scale
                o_p = i_sub * SUBPAGE + o_c
                if key_sketch_scale is not None:
                    # [BP, SUBPAGE]
                    b_scale = tl.load(
                        key_sketch_scale + b_entry * PAGE + o_p[None, :], mask=m_j, other=0.0
                    )
                    b_score *= b_scale.to(tl.float32)
                b_score = finite_scores(b_score)
                p_o = out + o_out + (i_t * BP * PAGE)
                o_t = tl.arange(0, BP)[:, None] * PAGE + o_p[None, :]
                left = n - i_t * BP * PAGE
                if left >= BP * PAGE:
                    tl.store(p_o + o_t, b_score)
                else:
                    tl.store(p_o + o_t, b_score, mask=o_t < left)
                if block_max is not None:
                    b_score = tl.where(o_t < left, b_score, float("-inf"))
                    # [BP, SUBPAGE / BLOCK]
                    b_max = tl.max(tl.reshape(b_score, (BP, SUBPAGE // BLOCK, BLOCK)), 2)
                    o_b = tl.arange(0, BP)[:, None] * (PAGE // BLOCK) + i_sub * (SUBPAGE // BLOCK)
                    o_b += tl.arange(0, SUBPAGE // BLOCK)[None, :]
                    p_b = block_max + base * blocks + i_t * (BP * PAGE // BLOCK)
                    tl.store(p_b + o_b, b_max, mask=o_b * BLOCK < left)


def sketch_score_triton(
    q: torch.Tensor, channels: torch.Tensor, sketch: KeySketch, plan: DecodePlan, *, reduce: str,
    out: Scores, choose_channels: bool,
) -> None:  # fmt: skip
    """Launch :func:`sketch_score_kernel`: programs of a row and head take its tiles in turn."""
    rows = q.shape[0]
    heads, kept, width = sketch.values.shape[1], channels.shape[2], out.values.shape[2]
    tile = min(SKETCH_TILE_TOKENS, max(sketch.page_size, next_power_of_2(width)))
    tiles = triton.cdiv(width, tile)
    splits = splits_of(rows * heads, tiles, SKETCH_CTAS_PER_SM, q.device)
    if sketch.values.dtype == torch.uint8 and tiles > splits:
        # Half of a tile is scored at a time, so programs that take several take longer ones.
        tile, tiles = 2 * tile, triton.cdiv(tiles, 2)
        splits = splits_of(rows * heads, tiles, SKETCH_CTAS_PER_SM, q.device)
    sketch_score_kernel[(rows * heads, splits)](
        q, channels, sketch.values, sketch.scale, plan.page_table, plan.tail_start, plan.k_units,
        plan.reselect, plan.refresh, plan.request_slots, out.unread, out.values, out.block_max,
        q.stride(0), plan.page_table.stride(0), plan.page_table.shape[1], width,
        out.block_max.shape[2],
        S=constants(HeadShape.of(q, heads)), KEPT=kept,
        PAGE=sketch.page_size, BP=tile // sketch.page_size, BLOCK=BLOCK_UNITS,
        RUN=sketch.values.shape[3], ALIGN=math.gcd(width, 16), SUM=reduce == "sum",
        CHOOSE=choose_channels, num_warps=SKETCH_WARPS, **overlapping(rows * heads),
    )  # fmt: skip
