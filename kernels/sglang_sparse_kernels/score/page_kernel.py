# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of scores from the bounds of pages."""

import torch
import triton
import triton.language as tl

from ..device import splits_of
from ..plan import DecodePlan
from ..planes import PageCuboids
from ..records import BLOCK_UNITS
from ..triton_ops import (
    HeadShape,
    begin,
    constants,
    dot,
    finite_scores,
    is_read,
    overlapping,
    slots_of,
    store_scores,
    widened,
)

# Measured on one H200.
MINMAX_TILE_UNITS = 64
MINMAX_CTAS_PER_SM = 3
MINMAX_WARPS = 4


@triton.jit
def page_minmax_score_kernel(
    q,
    page_min,
    page_max,
    page_table,
    tail_start,
    k_units,
    reselect,
    unread,
    out,
    block_max,
    stride_q,
    stride_table,
    width,
    blocks,
    S: tl.constexpr,
    PAGE: tl.constexpr,
    LOGICAL: tl.constexpr,
    JOINED: tl.constexpr,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    REDUCE: tl.constexpr,
):
    # LOGICAL tokens are a logical page, JOINED logical pages a unit of selection.
    begin()
    i_r, i_h = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    scored, sparse = tl.load(reselect + i_r) != 0, tl.load(k_units + i_r) > 0
    tokens = tl.load(tail_start + i_r)
    n = tl.cdiv(tokens, LOGICAL)
    if scored & sparse & is_read(unread, i_h):
        PER_PAGE: tl.constexpr = PAGE // LOGICAL
        BJ: tl.constexpr = BT // JOINED
        units = tl.cdiv(tokens, LOGICAL * JOINED)
        o_g, o_d = tl.arange(0, S.BG), tl.arange(0, S.BD)
        m_d = o_d < S.D
        p_q = q + i_r.to(tl.int64) * stride_q + (i_h * S.G + o_g)[None, :] * S.D + o_d[:, None]
        # [BD, BG]
        b_q = tl.load(p_q, mask=m_d[:, None] & (o_g < S.G)[None, :], other=0.0)
        # The larger of q*min and q*max is q*max for q > 0 and q*min for q < 0.
        b_up = tl.maximum(b_q.to(tl.float32), 0.0).to(b_q.dtype)
        b_down = tl.minimum(b_q.to(tl.float32), 0.0).to(b_q.dtype)
        base = tl.program_id(0).to(tl.int64)
        p_table = page_table + i_r.to(tl.int64) * stride_table
        for i_t in tl.range(tl.program_id(1), tl.cdiv(n, BT), tl.num_programs(1)):
            o_u = i_t * BT + tl.arange(0, BT)
            m_u = o_u < n
            # [BT]
            b_entry = slots_of(p_table, o_u, m_u, PER_PAGE).to(tl.int64)
            o_e = (b_entry * S.H + i_h)[:, None] * S.D + o_d[None, :]
            m_e = m_u[:, None] & m_d[None, :]
            # [BT, BD]
            b_max = widened(tl.load(page_max + o_e, mask=m_e, other=0.0), b_q.dtype)
            # [BT, BD]
            b_min = widened(tl.load(page_min + o_e, mask=m_e, other=0.0), b_q.dtype)
            # [BT, BG]
            b_a = dot(b_max, b_up, tl.zeros((BT, S.BG), tl.float32))
            b_a = dot(b_min, b_down, b_a)
            if REDUCE == "none":
                if JOINED > 1:
                    b_a = tl.where(m_u[:, None], b_a, float("-inf"))
                    b_a = tl.max(tl.reshape(b_a, (BJ, JOINED, S.BG)), 1)
                o_j = i_t * BJ + tl.arange(0, BJ)
                p_out = out + (base * S.G + o_g)[None, :] * width + o_j[:, None]
                tl.store(p_out, b_a, mask=(o_j < units)[:, None] & (o_g < S.G)[None, :])
            else:
                if REDUCE == "sum":
                    b_score = tl.sum(b_a, 1)
                else:
                    b_score = tl.max(tl.where((o_g < S.G)[None, :], b_a, float("-inf")), 1)
                if JOINED > 1:
                    # What is no number must not hide the other pages of its unit.
                    b_score = tl.where(m_u, finite_scores(b_score), float("-inf"))
                    b_score = tl.max(tl.reshape(b_score, (BJ, JOINED)), 1)
                o_j = i_t * BJ + tl.arange(0, BJ)
                store_scores(
                    out, block_max, b_score, o_j, units, base * width, base * blocks, BJ, BLOCK
                )


def page_minmax_score_triton(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int,
    reduce: str | None,
    out: torch.Tensor,
    block_max: torch.Tensor | None,
    unread: torch.Tensor | None,
) -> None:
    """Launch :func:`page_minmax_score_kernel`: programs of a row and head take tiles in turn.

    Without ``reduce``, each query head keeps its score, and ``out`` has an axis for them.
    """
    rows, heads = q.shape[0], pages.low.shape[1]
    joined = unit // pages.unit
    tiles = triton.cdiv(out.shape[-1] * joined, MINMAX_TILE_UNITS)
    splits = splits_of(rows * heads, tiles, MINMAX_CTAS_PER_SM, q.device)
    page_minmax_score_kernel[(rows * heads, splits)](
        q, pages.low, pages.high, plan.page_table, plan.tail_start, plan.k_units, plan.reselect,
        unread, out, block_max, q.stride(0), plan.page_table.stride(0), out.shape[-1],
        0 if block_max is None else block_max.shape[2],
        S=constants(HeadShape.of(q, heads, least=16)),
        PAGE=pages.page_size, LOGICAL=pages.unit, JOINED=joined, BT=MINMAX_TILE_UNITS,
        BLOCK=BLOCK_UNITS, REDUCE=reduce or "none", num_warps=MINMAX_WARPS,
        **overlapping(rows * heads),
    )  # fmt: skip
