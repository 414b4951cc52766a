# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def,assignment"
"""Triton implementation of channel selection and of the two scores."""

import math

import torch
import triton
import triton.language as tl

from ..common import group_size, next_power_of_2
from ..device import programs_to_fill
from ..plan import DecodePlan
from ..select import BLOCK_UNITS
from ..triton_ops import begin, dot, overlapping

# Every program loops over tiles of its row, so that short rows of a long context cost nothing.
SKETCH_TILE_TOKENS = 2048
SKETCH_CTAS_PER_SM = 2
SKETCH_WARPS = 8
MINMAX_TILE_UNITS = 64
MINMAX_CTAS_PER_SM = 3
MINMAX_WARPS = 4


def _splits(rows: int, heads: int, tiles: int, ctas_per_sm: int, device: torch.device) -> int:
    # Rounding down keeps all programs resident at once; one more would run alone at the end.
    fill = programs_to_fill(device, ctas_per_sm) // (rows * heads)
    return max(1, min(fill, tiles))


@triton.jit
def _best_channels(
    p_q, G: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, KEPT: tl.constexpr
):
    """(kept or not, position among the kept) [BD] of the channels by the group's sum of |q|."""
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_d = o_d < D
    m_q = (o_g < G)[:, None] & m_d[None, :]
    # [BG, BD]
    b_q = tl.load(p_q + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(tl.float32)
    b_i = tl.sum(tl.abs(b_q), 0)
    # NaN ranks last: all comparisons with it are false, and too many channels would be kept.
    b_i = tl.where(m_d & (b_i == b_i), b_i, -1.0)
    # [BD, BD]: entry (i, j) says that channel i ranks before channel j.
    row = tl.expand_dims(b_i, 1)
    col = tl.expand_dims(b_i, 0)
    before = (row > col) | ((row == col) & (o_d[:, None] < o_d[None, :]))
    m_kept = tl.sum(before.to(tl.int32), 0) < KEPT
    return m_kept, tl.cumsum(m_kept.to(tl.int32), 0) - 1


@triton.jit
def select_channels_kernel(
    q,
    channels,
    list_rows,
    refresh,
    k_units,
    stride_q,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    KEPT: tl.constexpr,
):
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    if (tl.load(refresh + i_r) != 0) & (tl.load(k_units + i_r) > 0):
        p_q = q + i_r.to(tl.int64) * stride_q + i_h * G * D
        o_d = tl.arange(0, BD)
        m_kept, o_c = _best_channels(p_q, G, BG, D, BD, KEPT)
        i_l = tl.load(list_rows + i_r).to(tl.int64)
        tl.store(channels + (i_l * H + i_h) * KEPT + o_c, o_d, mask=m_kept)


@triton.jit
def _load_channels(p_c, D: tl.constexpr, KEPT: tl.constexpr):
    """Tuple of ``KEPT`` channels; one that was never chosen must not lead out of bounds."""
    kept = ()
    for i_c in tl.static_range(KEPT):
        kept = kept + (tl.minimum(tl.maximum(tl.load(p_c + i_c), 0), D - 1),)  # noqa: RUF005
    return kept


@triton.jit
def _load_weights(p_q, kept, G: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr):
    """Tuple of the query's values, float32, head by head over the kept channels."""
    weights = ()
    for i_g in tl.static_range(G):
        for i_c in tl.static_range(KEPT):
            weights = weights + (tl.load(p_q + i_g * D + kept[i_c]).to(tl.float32),)  # noqa: RUF005
    return weights


@triton.jit
def _scale_weights(weights, scale, SIZE: tl.constexpr):
    scaled = ()
    for i_w in tl.static_range(SIZE):
        scaled = scaled + ((weights[i_w] / scale).to(tl.float16),)  # noqa: RUF005
    return scaled


@triton.jit
def _join(b_a, b_b, SUM: tl.constexpr):
    return b_a + b_b.to(tl.float32) if SUM else tl.maximum(b_a, b_b)


@triton.jit
def _score_piece(
    p_s,
    kept,
    weights,
    m_j,
    i_piece: tl.constexpr,
    G: tl.constexpr,
    KEPT: tl.constexpr,
    BP: tl.constexpr,
    PIECE: tl.constexpr,
    RUN: tl.constexpr,
    SUM: tl.constexpr,
    SUMS: tl.constexpr,
    NIBBLES: tl.constexpr,
):
    """Joined scores [BP, PIECE] of the heads, before scales; ``p_s`` is their channel 0."""
    b_score = tl.full((BP, PIECE), 0.0 if SUM else float("-inf"), tl.float32 if SUM else SUMS)
    for i_g in tl.static_range(0, G, 4):
        # Four heads at a time: their sums and a channel's keys fit in registers.
        b_0 = tl.zeros((BP, PIECE), SUMS)
        b_1, b_2, b_3 = b_0, b_0, b_0
        for i_c in tl.static_range(KEPT):
            # [BP, PIECE]
            b_k = tl.load(p_s + kept[i_c] * RUN, mask=m_j, other=0.0)
            if NIBBLES:
                # The fp16 number 1024 + n has the bits of n under its exponent's.
                b_n = ((b_k.to(tl.int16) >> (4 * i_piece)) & 15) | 0x6400
                b_k = b_n.to(tl.float16, bitcast=True) - 1032.0
            b_k = b_k.to(SUMS)
            b_0 += weights[i_g * KEPT + i_c] * b_k
            if i_g + 1 < G:
                b_1 += weights[(i_g + 1) * KEPT + i_c] * b_k
            if i_g + 2 < G:
                b_2 += weights[(i_g + 2) * KEPT + i_c] * b_k
            if i_g + 3 < G:
                b_3 += weights[(i_g + 3) * KEPT + i_c] * b_k
        b_score = _join(b_score, b_0, SUM)
        if i_g + 1 < G:
            b_score = _join(b_score, b_1, SUM)
        if i_g + 2 < G:
            b_score = _join(b_score, b_2, SUM)
        if i_g + 3 < G:
            b_score = _join(b_score, b_3, SUM)
    return b_score


@triton.jit
def store_scores(
    out, block_max, b_score, o_t, n, base, base_block, BT: tl.constexpr, BLOCK: tl.constexpr
):
    m_t = o_t < n
    # NaN would rank first; as -inf it ranks last.
    b_score = tl.where(b_score == b_score, b_score, float("-inf"))
    tl.store(out + base + o_t, b_score, mask=m_t)
    if block_max is not None:
        # [BT / BLOCK, BLOCK]
        b_block = tl.reshape(tl.where(m_t, b_score, float("-inf")), (BT // BLOCK, BLOCK))
        o_b = tl.min(o_t, 0) // BLOCK + tl.arange(0, BT // BLOCK)
        tl.store(block_max + base_block + o_b, tl.max(b_block, 1), mask=o_b * BLOCK < n)


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
    list_rows,
    out,
    block_max,
    stride_q,
    stride_table,
    width,
    blocks,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
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
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    # What the row's plan says is read at once, not one answer after the other.
    scored = tl.load(reselect + i_r) != 0
    fresh = (tl.load(refresh + i_r) != 0) & CHOOSE
    sparse = tl.load(k_units + i_r) > 0
    n = tl.where(scored, tl.load(tail_start + i_r), 0)
    i_l = tl.load(list_rows + i_r).to(tl.int64)
    if (scored | fresh) & sparse:
        p_c = channels + (i_l * H + i_h) * KEPT
        p_q = q + i_r.to(tl.int64) * stride_q + i_h * G * D
        if fresh:
            # Every program of a row chooses for itself, and writes the same, so that none waits
            # for another.
            m_kept, o_c = _best_channels(p_q, G, BG, D, BD, KEPT)
            tl.store(p_c + o_c, tl.arange(0, BD), mask=m_kept)
            tl.debug_barrier()
        kept = _load_channels(p_c, D, KEPT)
        weights = _load_weights(p_q, kept, G, D, KEPT)
        q_scale = 1.0
        # fp16 sums halve the arithmetic, and 8-bit keys carry far less precision than they do.
        SUMS: tl.constexpr = (
            tl.float32 if key_sketch.dtype.element_ty == tl.bfloat16 else tl.float16
        )
        if tl.float16 == SUMS:
            # A power of two brings the query into fp16's range without rounding it.
            largest = tl.abs(weights[0])
            for i_w in tl.static_range(1, G * KEPT):
                largest = tl.maximum(tl.abs(weights[i_w]), largest)
            exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
            q_scale = tl.maximum(exponent, 0x00800000).to(tl.float32, bitcast=True)
            weights = _scale_weights(weights, q_scale, G * KEPT)

        base = tl.program_id(0).to(tl.int64)
        o_out = tl.multiple_of(base * width, ALIGN)
        p_table = page_table + i_r.to(tl.int64) * stride_table
        NIBBLES: tl.constexpr = key_sketch.dtype.element_ty == tl.uint8
        # Tokens of a page that are scored at a time: those in the same half of a byte.
        PIECE: tl.constexpr = PAGE // 2 if NIBBLES else PAGE
        o_c = tl.arange(0, PIECE)
        for i_t in tl.range(tl.program_id(1), tl.cdiv(n, BP * PAGE), tl.num_programs(1)):
            o_j = i_t * BP + tl.arange(0, BP)
            m_j = (o_j * PAGE < n)[:, None]
            # [BP]
            b_page = tl.load(p_table + o_j, mask=o_j * PAGE < n, other=0).to(tl.int64)
            b_entry = (b_page * H + i_h)[:, None]
            # A page's part of its run; a channel further is a run further.
            b_run = (b_page // (RUN // PIECE) * H + i_h) * (D * RUN)
            p_s = key_sketch + (b_run + b_page % (RUN // PIECE) * PIECE)[:, None] + o_c[None, :]
            for i_piece in tl.static_range(PAGE // PIECE):
                b_score = _score_piece(
                    p_s, kept, weights, m_j, i_piece, G, KEPT, BP, PIECE, RUN, SUM, SUMS, NIBBLES
                )
                b_score = b_score.to(tl.float32) * q_scale
                o_p = i_piece * PIECE + o_c
                if key_sketch_scale is not None:
                    # [BP, PIECE]
                    b_score *= tl.load(
                        key_sketch_scale + b_entry * PAGE + o_p[None, :], mask=m_j, other=0.0
                    )
                # NaN would rank first; as -inf it ranks last.
                b_score = tl.where(b_score == b_score, b_score, float("-inf"))
                p_o = out + o_out + (i_t * BP * PAGE)
                o_t = tl.arange(0, BP)[:, None] * PAGE + o_p[None, :]
                left = n - i_t * BP * PAGE
                if left >= BP * PAGE:
                    tl.store(p_o + o_t, b_score)
                else:
                    tl.store(p_o + o_t, b_score, mask=o_t < left)
                if block_max is not None:
                    b_score = tl.where(o_t < left, b_score, float("-inf"))
                    # [BP, PIECE / BLOCK]
                    b_max = tl.max(tl.reshape(b_score, (BP, PIECE // BLOCK, BLOCK)), 2)
                    o_b = tl.arange(0, BP)[:, None] * (PAGE // BLOCK) + i_piece * (PIECE // BLOCK)
                    o_b += tl.arange(0, PIECE // BLOCK)[None, :]
                    p_b = block_max + base * blocks + i_t * (BP * PAGE // BLOCK)
                    tl.store(p_b + o_b, b_max, mask=o_b * BLOCK < left)


@triton.jit
def page_minmax_score_kernel(
    q,
    page_min,
    page_max,
    page_table,
    tail_start,
    k_units,
    reselect,
    out,
    block_max,
    stride_q,
    stride_table,
    width,
    blocks,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BU: tl.constexpr,
    BLOCK: tl.constexpr,
    REDUCE: tl.constexpr,
):
    begin()
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    scored, sparse = tl.load(reselect + i_r) != 0, tl.load(k_units + i_r) > 0
    n = tl.cdiv(tl.load(tail_start + i_r), UNIT)
    if scored & sparse:
        PER_PAGE: tl.constexpr = PAGE // UNIT
        o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
        m_d = o_d < D
        p_q = q + i_r.to(tl.int64) * stride_q + (i_h * G + o_g)[None, :] * D + o_d[:, None]
        # [BD, BG]
        b_q = tl.load(p_q, mask=m_d[:, None] & (o_g < G)[None, :], other=0.0)
        # Of q*min and q*max the larger is q*max for q > 0 and q*min for q < 0.
        b_up = tl.maximum(b_q.to(tl.float32), 0.0).to(b_q.dtype)
        b_down = tl.minimum(b_q.to(tl.float32), 0.0).to(b_q.dtype)
        base = tl.program_id(0).to(tl.int64)
        p_table = page_table + i_r.to(tl.int64) * stride_table
        for i_t in tl.range(tl.program_id(1), tl.cdiv(n, BU), tl.num_programs(1)):
            o_u = i_t * BU + tl.arange(0, BU)
            m_u = o_u < n
            # [BU]
            b_page = tl.load(p_table + o_u // PER_PAGE, mask=m_u, other=0).to(tl.int64)
            o_e = ((b_page * PER_PAGE + o_u % PER_PAGE) * H + i_h)[:, None] * D + o_d[None, :]
            m_e = m_u[:, None] & m_d[None, :]
            # [BU, BD]
            b_max = tl.load(page_max + o_e, mask=m_e, other=0.0)
            # [BU, BD]
            b_min = tl.load(page_min + o_e, mask=m_e, other=0.0)
            # [BU, BG]
            b_a = dot(b_max, b_up, tl.zeros((BU, BG), tl.float32))
            b_a = dot(b_min, b_down, b_a)
            if REDUCE == "none":
                p_out = out + (base * G + o_g)[None, :] * width + o_u[:, None]
                tl.store(p_out, b_a, mask=m_u[:, None] & (o_g < G)[None, :])
            else:
                if REDUCE == "sum":
                    b_score = tl.sum(b_a, 1)
                else:
                    b_score = tl.max(tl.where((o_g < G)[None, :], b_a, float("-inf")), 1)
                store_scores(
                    out, block_max, b_score, o_u, n, base * width, base * blocks, BU, BLOCK
                )


def select_channels_triton(
    q: torch.Tensor,
    channels: torch.Tensor,
    list_rows: torch.Tensor,
    refresh: torch.Tensor,
    k_units: torch.Tensor,
) -> None:
    """Launch :func:`select_channels_kernel`, one program a row and KV head."""
    rows, query_heads, dim = q.shape
    _, heads, kept = channels.shape
    group = group_size(query_heads, heads)
    select_channels_kernel[(rows, heads)](
        q,
        channels,
        list_rows,
        refresh,
        k_units,
        q.stride(0),
        H=heads,
        G=group,
        BG=next_power_of_2(group),
        D=dim,
        BD=next_power_of_2(dim),
        KEPT=kept,
        num_warps=4,
    )


def sketch_score_triton(
    q: torch.Tensor,
    channels: torch.Tensor,
    key_sketch: torch.Tensor,
    key_sketch_scale: torch.Tensor | None,
    plan: DecodePlan,
    *,
    page_size: int,
    reduce: str,
    out: torch.Tensor,
    block_max: torch.Tensor | None,
    choose_channels: bool,
) -> None:
    """Launch :func:`sketch_score_kernel`: programs of a row and head take its tiles in turn."""
    rows, query_heads, dim = q.shape
    heads = key_sketch.shape[1]
    kept = channels.shape[2]
    group = group_size(query_heads, heads)
    tile = min(SKETCH_TILE_TOKENS, max(page_size, next_power_of_2(out.shape[2])))
    tiles = triton.cdiv(out.shape[2], tile)
    if key_sketch.dtype == torch.uint8 and tiles > _splits(
        rows, heads, tiles, SKETCH_CTAS_PER_SM, q.device
    ):
        # Half of a tile is scored at a time, so programs that take several take longer ones.
        tile, tiles = 2 * tile, triton.cdiv(tiles, 2)
    splits = _splits(rows, heads, tiles, SKETCH_CTAS_PER_SM, q.device)
    sketch_score_kernel[(rows * heads, splits)](
        q,
        channels,
        key_sketch,
        key_sketch_scale,
        plan.page_table,
        plan.tail_start,
        plan.k_units,
        plan.reselect,
        plan.refresh,
        plan.list_rows,
        out,
        block_max,
        q.stride(0),
        plan.page_table.stride(0),
        out.shape[2],
        0 if block_max is None else block_max.shape[2],
        H=heads,
        G=group,
        BG=next_power_of_2(group),
        D=dim,
        BD=next_power_of_2(dim),
        KEPT=kept,
        PAGE=page_size,
        BP=tile // page_size,
        BLOCK=BLOCK_UNITS,
        RUN=key_sketch.shape[3],
        ALIGN=math.gcd(out.shape[2], 16),
        SUM=reduce == "sum",
        CHOOSE=choose_channels,
        num_warps=SKETCH_WARPS,
        **overlapping(rows * heads),
    )


def page_minmax_score_triton(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    page_size: int,
    reduce: str | None,
    out: torch.Tensor,
    block_max: torch.Tensor | None,
) -> None:
    """Launch :func:`page_minmax_score_kernel`: programs of a row and head take tiles in turn.

    Without ``reduce``, ``out`` has an axis more: the query heads of a group stay apart.
    """
    rows, query_heads, dim = q.shape
    heads = page_min.shape[1]
    group = group_size(query_heads, heads)
    tiles = triton.cdiv(out.shape[-1], MINMAX_TILE_UNITS)
    splits = _splits(rows, heads, tiles, MINMAX_CTAS_PER_SM, q.device)
    page_minmax_score_kernel[(rows * heads, splits)](
        q,
        page_min,
        page_max,
        plan.page_table,
        plan.tail_start,
        plan.k_units,
        plan.reselect,
        out,
        block_max,
        q.stride(0),
        plan.page_table.stride(0),
        out.shape[-1],
        0 if block_max is None else block_max.shape[2],
        H=heads,
        G=group,
        BG=max(16, next_power_of_2(group)),
        D=dim,
        BD=next_power_of_2(dim),
        PAGE=page_size,
        UNIT=unit,
        BU=MINMAX_TILE_UNITS,
        BLOCK=BLOCK_UNITS,
        REDUCE=reduce or "none",
        num_warps=MINMAX_WARPS,
        **overlapping(rows * heads),
    )
