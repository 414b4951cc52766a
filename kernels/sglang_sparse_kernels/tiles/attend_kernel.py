# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention over a tile's list and over the tile itself."""

import torch
import triton
import triton.language as tl

from ..records import KVView, Lists, Softmax
from ..triton_ops import (
    cast,
    constants,
    dot,
    online_softmax,
    row_table,
    scaled_logits,
    slots_of,
    widened,
)
from .score_kernel import TileShape, load_queries
from .types import TilePlan

# (keys at a time, stages, warps), as measured on one H200.
ATTEND_TILE = (32, 3, 4)


@triton.jit
def tile_attend_kernel(
    q,
    kv,
    plan,
    first,
    q_rows,
    list_rows,
    indices,
    counts,
    head_map,
    windows,
    out,
    stride_q,
    capacity,
    scale_log2,
    logit_cap,
    LISTS: tl.constexpr,
    UNIT: tl.constexpr,
    S: tl.constexpr,
):
    i_t, i_h = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    i_list = i_h
    if head_map is not None:
        i_list = tl.load(head_map + i_h)
    i_l = tl.load(list_rows + i_t).to(tl.int64) * LISTS + i_list
    seq_len = tl.load(plan.seq_lens + i_t)
    start = tl.load(first + i_t)
    q_row = tl.load(q_rows + i_t)
    tail = tl.load(plan.tail_start + i_t)
    list_units = tl.minimum(tl.load(plan.k_units + i_t), capacity)
    list_tokens = tl.minimum(list_units, tl.load(counts + i_l)) * UNIT
    WINDOWS: tl.constexpr = windows is not None
    if WINDOWS:
        # The tail of a head that streams is what any query's window holds, and its list the sinks.
        streams = (tl.load(windows.streams + i_h) != 0) & (tail > 0)
        o_w = tl.maximum(start + 1 - windows.local, tl.minimum(windows.sink, start + 1))
        tail = tl.where(streams, o_w, tail)
        list_tokens = tl.where(streams, tl.minimum(windows.sink, tail), list_tokens)
    o_m, o_d = tl.arange(0, S.BM), tl.arange(0, S.D)
    b_q = load_queries(q, q_row, seq_len - start, i_h, stride_q, S)
    o_p = start + o_m // S.G
    b_acc = tl.zeros((S.BM, S.D), tl.float32)
    b_max = tl.full((S.BM,), float("-inf"), tl.float32)
    b_sum = tl.zeros((S.BM,), tl.float32)
    p_table = row_table(kv, i_t)
    p_list = indices + i_l * capacity
    # One sequence of tokens: the tail, then the list.
    tail_tokens = seq_len - tail
    total = tail_tokens + list_tokens
    for i_n in tl.range(0, total, S.BN, num_stages=S.STAGES):
        o_n = i_n + tl.arange(0, S.BN)
        m_tail, m_n = o_n < tail_tokens, o_n < total
        o_l = o_n - tail_tokens
        # [BN]
        m_list = m_n & ~m_tail
        if WINDOWS:
            m_list &= ~streams
        b_token = tl.load(p_list + o_l // UNIT, mask=m_list, other=0) * UNIT + o_l % UNIT
        if WINDOWS:
            b_token = tl.where(streams, o_l, b_token)
        b_pos = tl.where(m_tail, tail + o_n, b_token)
        m_n &= m_tail | ((b_pos >= 0) & (b_pos < tail))
        # [BN]
        o_kv = (slots_of(p_table, b_pos, m_n, S.PAGE).to(tl.int64) * S.H + i_h) * S.D
        # [BN, D]
        b_k = tl.load(kv.k + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_k = widened(b_k, b_q.dtype)
        # [BM, BN]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros((S.BM, S.BN), tl.float32))
        b_s = scaled_logits(b_s, scale_log2, logit_cap, S.HAS_CAP)
        m_s = m_n[None, :] & (b_pos[None, :] <= o_p[:, None])
        if WINDOWS:
            m_w = b_pos[None, :] > o_p[:, None] - windows.local
            m_s &= m_w | (b_pos < windows.sink)[None, :] | ~streams
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_p, b_alpha, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        # [BN, D]
        b_v = tl.load(kv.v + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_v = widened(b_v, b_q.dtype)
        b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])
    b_out = b_acc * kv.v_scale / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_o = ((q_row + o_m // S.G).to(tl.int64) * S.H + i_h) * S.G + o_m % S.G
    m_m = o_m < (seq_len - start) * S.G
    p_out = out + o_o[:, None] * S.D + o_d[None, :]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_m[:, None])


def tile_attention_triton(
    q: torch.Tensor, kv: KVView, plan: TilePlan, lists: Lists, *, softmax: Softmax,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Launch :func:`tile_attend_kernel`, one program a tile and KV head."""
    rows, heads, softmax = plan.rows, kv.num_heads, kv.logits(softmax)
    shape = TileShape.of(q, kv, plan, softmax, ATTEND_TILE)
    tile_attend_kernel[(rows.num_rows * heads,)](
        q, kv.args, rows.args, rows.update_start, plan.q_rows, lists.rows, lists.indices,
        lists.counts, lists.head_map, lists.window_args, out, q.stride(0), lists.capacity,
        softmax.scale_log2, softmax.logit_cap,
        LISTS=lists.indices.shape[1], UNIT=lists.unit, S=constants(shape), num_warps=ATTEND_TILE[2],
    )  # fmt: skip
