# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of channel selection and of the two scores."""

import torch
import triton
import triton.language as tl

from ..common import group_size, next_power_of_2
from ..device import programs_to_fill
from ..plan import DecodePlan
from ..select import BLOCK_UNITS
from ..triton_ops import dot

# Every program loops over tiles of its row, so that short rows of a long context cost nothing.
SKETCH_TILE_TOKENS = 512
SKETCH_CTAS_PER_SM = 4
MINMAX_TILE_UNITS = 64
MINMAX_CTAS_PER_SM = 3


def _splits(rows: int, heads: int, tiles: int, ctas_per_sm: int, device: torch.device) -> int:
    # Rounding down keeps all programs resident at once; one more would run alone at the end.
    fill = programs_to_fill(device, ctas_per_sm) // (rows * heads)
    return max(1, min(fill, tiles))


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
        o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
        m_d = o_d < D
        p_q = q + i_r.to(tl.int64) * stride_q + (i_h * G + o_g)[:, None] * D + o_d[None, :]
        # [BG, BD]
        b_q = tl.load(p_q, mask=(o_g < G)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_i = tl.sum(tl.abs(b_q), 0)
        # NaN ranks last: all comparisons with it are false, and too many channels would be kept.
        b_i = tl.where(m_d & (b_i == b_i), b_i, -1.0)
        # [BD, BD]: entry (i, j) says that channel i ranks before channel j.
        row = tl.expand_dims(b_i, 1)
        col = tl.expand_dims(b_i, 0)
        before = (row > col) | ((row == col) & (o_d[:, None] < o_d[None, :]))
        kept = (tl.sum(before.to(tl.int32), 0) < KEPT).to(tl.int32)
        o_c = tl.cumsum(kept, 0) - 1
        i_l = tl.load(list_rows + i_r).to(tl.int64)
        tl.store(channels + (i_l * H + i_h) * KEPT + o_c, o_d, mask=kept != 0)


@triton.jit
def _store_scores(
    out, block_max, b_score, o_t, n, base, base_block, BT: tl.constexpr, BLOCK: tl.constexpr
):
    m_t = o_t < n
    tl.store(out + base + o_t, b_score, mask=m_t)
    if block_max is not None:
        # [BT / BLOCK, BLOCK]
        m_block = m_t & (b_score == b_score)
        b_block = tl.reshape(tl.where(m_block, b_score, float("-inf")), (BT // BLOCK, BLOCK))
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
    KEPT: tl.constexpr,
    BC: tl.constexpr,
    PAGE: tl.constexpr,
    BP: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if (tl.load(reselect + i_r) != 0) & (tl.load(k_units + i_r) > 0):
        BT: tl.constexpr = BP * PAGE
        n = tl.load(tail_start + i_r)
        o_g, o_c, o_p = tl.arange(0, BG), tl.arange(0, BC), tl.arange(0, PAGE)
        m_c = o_c < KEPT
        i_l = tl.load(list_rows + i_r).to(tl.int64)
        # [BC]
        b_c = tl.load(channels + (i_l * H + i_h) * KEPT + o_c, mask=m_c, other=0)
        # A row whose channels were never chosen must not read out of bounds.
        b_c = tl.minimum(tl.maximum(b_c, 0), D - 1)
        p_q = q + i_r.to(tl.int64) * stride_q + (i_h * G + o_g)[:, None] * D + b_c[None, :]
        # [BG, BC]
        b_q = tl.load(p_q, mask=(o_g < G)[:, None] & m_c[None, :], other=0.0)
        q_scale = 1.0
        if key_sketch.dtype.element_ty == tl.bfloat16:
            if b_q.dtype != tl.bfloat16:
                b_q = b_q.to(tl.float32)
        else:
            # 8-bit keys are exact in fp16, and turn into it in one instruction. Dividing the query
            # by a power of two keeps it in fp16's range without rounding.
            b_q = b_q.to(tl.float32)
            largest = tl.max(tl.abs(b_q)).to(tl.int32, bitcast=True) & 0x7F800000
            q_scale = tl.maximum(largest, 0x00800000).to(tl.float32, bitcast=True)
            b_q = (b_q / q_scale).to(tl.float16)

        base = tl.program_id(0).to(tl.int64)
        p_table = page_table + i_r.to(tl.int64) * stride_table
        num_pages = tl.cdiv(n, PAGE)
        for i_t in tl.range(tl.program_id(1), tl.cdiv(n, BT), tl.num_programs(1)):
            o_j = i_t * BP + tl.arange(0, BP)
            m_j = o_j < num_pages
            # [BP]
            b_page = tl.load(p_table + o_j, mask=m_j, other=0).to(tl.int64)
            o_e = (b_page * H + i_h)[None, :, None] * (D * PAGE)
            p_s = key_sketch + o_e + b_c[:, None, None] * PAGE + o_p[None, None, :]
            # [BC, BP, PAGE]
            b_s = tl.load(p_s, mask=m_c[:, None, None] & m_j[None, :, None], other=0.0)
            b_s = tl.reshape(b_s, (BC, BT)).to(b_q.dtype)
            # [BG, BT]
            b_a = dot(b_q, b_s, tl.zeros((BG, BT), tl.float32))
            if SUM:
                b_score = tl.sum(b_a, 0)
            else:
                b_score = tl.max(tl.where((o_g < G)[:, None], b_a, float("-inf")), 0)
            b_score *= q_scale
            if key_sketch_scale is not None:
                p_x = key_sketch_scale + (b_page * H + i_h)[:, None] * PAGE + o_p[None, :]
                # [BP, PAGE]
                b_x = tl.load(p_x, mask=m_j[:, None], other=0.0)
                b_score *= tl.reshape(b_x, (BT,))
            o_t = i_t * BT + tl.arange(0, BT)
            _store_scores(out, block_max, b_score, o_t, n, base * width, base * blocks, BT, BLOCK)


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
    SUM: tl.constexpr,
):
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if (tl.load(reselect + i_r) != 0) & (tl.load(k_units + i_r) > 0):
        PER_PAGE: tl.constexpr = PAGE // UNIT
        n = tl.cdiv(tl.load(tail_start + i_r), UNIT)
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
            if SUM:
                b_score = tl.sum(b_a, 1)
            else:
                b_score = tl.max(tl.where((o_g < G)[None, :], b_a, float("-inf")), 1)
            _store_scores(out, block_max, b_score, o_u, n, base * width, base * blocks, BU, BLOCK)


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
    reduce: str,
    out: torch.Tensor,
    block_max: torch.Tensor | None,
) -> None:
    """Launch :func:`sketch_score_kernel`: programs of a row and head take its tiles in turn."""
    rows, query_heads, dim = q.shape
    _, heads, _, page_size = key_sketch.shape
    kept = channels.shape[2]
    group = group_size(query_heads, heads)
    tile = min(SKETCH_TILE_TOKENS, max(page_size, next_power_of_2(out.shape[2])))
    tiles = triton.cdiv(out.shape[2], tile)
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
        plan.list_rows,
        out,
        block_max,
        q.stride(0),
        plan.page_table.stride(0),
        out.shape[2],
        0 if block_max is None else block_max.shape[2],
        H=heads,
        G=group,
        BG=max(16, next_power_of_2(group)),
        D=dim,
        KEPT=kept,
        BC=max(16, next_power_of_2(kept)),
        PAGE=page_size,
        BP=tile // page_size,
        BLOCK=BLOCK_UNITS,
        SUM=reduce == "sum",
        num_warps=4,
    )


def page_minmax_score_triton(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    page_size: int,
    reduce: str,
    out: torch.Tensor,
    block_max: torch.Tensor | None,
) -> None:
    """Launch :func:`page_minmax_score_kernel`: programs of a row and head take tiles in turn."""
    rows, query_heads, dim = q.shape
    heads = page_min.shape[1]
    group = group_size(query_heads, heads)
    tiles = triton.cdiv(out.shape[2], MINMAX_TILE_UNITS)
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
        out.shape[2],
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
        SUM=reduce == "sum",
        num_warps=4,
    )
