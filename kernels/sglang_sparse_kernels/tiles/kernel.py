# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of sparse prefill: softmax sums, pooled scores, attention over lists.

Logits of a prompt are too many to keep, so scoring computes them twice (Kascade section 3.6): once
for the softmax sums of every query, once to pool.
"""

import torch
import triton
import triton.language as tl

from ..common import group_size, next_power_of_2
from ..device import programs_to_fill
from ..score.kernel import store_scores
from ..select import BLOCK_UNITS
from ..triton_ops import cast, dot
from .types import TilePlan

# (keys at a time, stages, warps) of each kernel.
SUM_TILE = (128, 2, 4)
POOL_TILE = (128, 2, 8)
ATTEND_TILE = (32, 3, 4)
# Probabilities are pooled times 2 ** 96, so that fp32 holds them down to 2 ** -222.
LIFT = tl.constexpr(96.0)


@triton.jit
def _logits(
    b_a, b_b, b_zero, scale_log2, logit_cap, HAS_CAP: tl.constexpr
):  # fmt: skip
    b_s = dot(b_a, tl.trans(b_b), b_zero)
    if HAS_CAP:
        # tanh through exp, in units of log2 as everything below.
        b_s = scale_log2 * b_s / logit_cap
        b_s = logit_cap * (1.0 - 2.0 / (tl.exp2(2.0 * b_s) + 1.0)) * 1.4426950408889634
    else:
        b_s *= scale_log2
    return b_s


@triton.jit
def _load_queries(
    q, q_row, count, i_h, stride_q, G: tl.constexpr, BM: tl.constexpr, D: tl.constexpr
):
    """[BM, D]: query m of a tile is token m // G, head m % G of the group."""
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D)
    p_q = q + (q_row + o_m // G).to(tl.int64)[:, None] * stride_q
    p_q += (i_h * G + o_m % G)[:, None] * D + o_d[None, :]
    return tl.load(p_q, mask=(o_m < count * G)[:, None], other=0.0)


@triton.jit
def _load_keys(
    k_buffer,
    p_table,
    o_n,
    m_n,
    i_h,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """[BN, D] keys at positions ``o_n``; ``WHOLE`` says that all are there."""
    o_d = tl.arange(0, D)
    if WHOLE:
        b_page = tl.load(p_table + o_n // PAGE).to(tl.int64)
        o_k = ((b_page * PAGE + o_n % PAGE) * H + i_h) * D
        return tl.load(k_buffer + o_k[:, None] + o_d[None, :])
    b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0).to(tl.int64)
    o_k = ((b_page * PAGE + o_n % PAGE) * H + i_h) * D
    return tl.load(k_buffer + o_k[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)


@triton.jit
def _add_sums(
    b_q,
    b_max,
    b_sum,
    k_buffer,
    p_table,
    o_p,
    begin,
    end,
    i_h,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(largest logit, sum) of each query with the keys of [begin, end) that it may see."""
    for i_n in tl.range(begin, end, BN, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BN)
        # [BN, D]
        b_k = _load_keys(k_buffer, p_table, o_n, o_n < end, i_h, H, D, PAGE, False)
        # [BM, BN]
        b_s = _logits(b_q, b_k, tl.zeros((BM, BN), tl.float32), scale_log2, logit_cap, HAS_CAP)
        m_s = (o_n[None, :] <= o_p[:, None]) & (o_n < end)[None, :]
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_s - b_shift[:, None]), 1)
        b_max = b_new
    return b_max, b_sum


@triton.jit
def tile_lse_kernel(
    q,
    k_buffer,
    page_table,
    seq_lens,
    first,
    q_rows,
    k_units,
    reselect,
    lse,
    stride_q,
    stride_table,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_t, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    if (tl.load(reselect + i_t) != 0) & (tl.load(k_units + i_t) > 0):
        seq_len = tl.load(seq_lens + i_t)
        start = tl.load(first + i_t)
        o_m = tl.arange(0, BM)
        b_q = _load_queries(q, tl.load(q_rows + i_t), seq_len - start, i_h, stride_q, G, BM, D)
        o_p = start + o_m // G
        p_table = page_table + i_t.to(tl.int64) * stride_table
        b_max = tl.full((BM,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BM,), tl.float32)
        # Every query sees all of [0, seen), so that no mask is needed there.
        seen = start // BN * BN
        b_max, b_sum = _add_sums(
            b_q, b_max, b_sum, k_buffer, p_table, o_p, seen, seq_len, i_h, scale_log2, logit_cap,
            H, BM, D, PAGE, BN, HAS_CAP, 1,
        )  # fmt: skip
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
        # The largest logit so far serves as the shift of all: fp32 holds sums of up to 2 ** 127
        # times its term, and where that is not enough the shift follows the largest after all.
        b_all = b_sum
        for i_n in tl.range(0, seen, BN, num_stages=STAGES):
            o_n = i_n + tl.arange(0, BN)
            b_k = _load_keys(k_buffer, p_table, o_n, o_n < seen, i_h, H, D, PAGE, True)
            b_s = _logits(b_q, b_k, tl.zeros((BM, BN), tl.float32), scale_log2, logit_cap, HAS_CAP)
            b_all += tl.sum(tl.exp2(b_s - b_max[:, None]), 1)
        if tl.max(b_all) == float("inf"):
            b_max, b_all = _add_sums(
                b_q, b_max, b_sum, k_buffer, p_table, o_p, 0, seen, i_h, scale_log2, logit_cap,
                H, BM, D, PAGE, BN, HAS_CAP, 1,
            )  # fmt: skip
        tl.store(lse + tl.program_id(0).to(tl.int64) * BM + o_m, b_max + tl.log2(b_all))


@triton.jit
def tile_pool_kernel(
    q,
    k_buffer,
    page_table,
    seq_lens,
    first,
    q_rows,
    tail_start,
    k_units,
    reselect,
    lse,
    out,
    block_max,
    stride_q,
    stride_table,
    width,
    blocks,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    LISTS: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    # HEADS: KV heads that share a list.
    i_tl, i_t = tl.program_id(0).to(tl.int64), tl.program_id(0) // LISTS
    if (tl.load(reselect + i_t) != 0) & (tl.load(k_units + i_t) > 0):
        seq_len = tl.load(seq_lens + i_t)
        start = tl.load(first + i_t)
        n = tl.load(tail_start + i_t)
        q_row = tl.load(q_rows + i_t)
        o_m = tl.arange(0, BM)
        m_m = o_m < (seq_len - start) * G
        i_h = (tl.program_id(0) % LISTS) * HEADS
        b_q = _load_queries(q, q_row, seq_len - start, i_h, stride_q, G, BM, D)
        # A row without a query adds nothing: exp2(-inf) is 0.
        p_lse = lse + (i_t.to(tl.int64) * H + i_h) * BM + o_m
        b_lse = tl.load(p_lse, mask=m_m, other=float("inf")) - LIFT
        p_table = page_table + i_t.to(tl.int64) * stride_table
        for i_b in tl.range(
            tl.program_id(1), tl.cdiv(n, BN), tl.num_programs(1), num_stages=STAGES
        ):
            o_n = i_b * BN + tl.arange(0, BN)
            m_n = o_n < n
            b_pooled = tl.zeros((BN,), tl.float32)
            for i_g in range(HEADS):
                if HEADS > 1:
                    b_q = _load_queries(q, q_row, seq_len - start, i_h + i_g, stride_q, G, BM, D)
                    b_lse = tl.load(p_lse + i_g * BM, mask=m_m, other=float("inf")) - LIFT
                # [BN, D]
                b_k = _load_keys(k_buffer, p_table, o_n, m_n, i_h + i_g, H, D, PAGE, False)
                # [BN, BM]: queries along the threads' registers, where they are added up.
                b_s = _logits(
                    b_k, b_q, tl.zeros((BN, BM), tl.float32), scale_log2, logit_cap, HAS_CAP
                )
                b_pooled += tl.sum(tl.exp2(b_s - b_lse[None, :]), 1)
            b_score = tl.log2(b_pooled) - LIFT
            store_scores(out, block_max, b_score, o_n, n, i_tl * width, i_tl * blocks, BN, BLOCK)


@triton.jit
def tile_attend_kernel(
    q,
    k_buffer,
    v_buffer,
    page_table,
    seq_lens,
    first,
    q_rows,
    tail_start,
    k_units,
    list_rows,
    indices,
    counts,
    head_map,
    out,
    stride_q,
    stride_table,
    capacity,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    LISTS: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_t, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_list = i_h
    if head_map is not None:
        i_list = tl.load(head_map + i_h)
    i_l = tl.load(list_rows + i_t).to(tl.int64) * LISTS + i_list
    seq_len = tl.load(seq_lens + i_t)
    start = tl.load(first + i_t)
    q_row = tl.load(q_rows + i_t)
    tail = tl.load(tail_start + i_t)
    listed = tl.minimum(tl.load(k_units + i_t), capacity)
    counted = tl.load(counts + i_l)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D)
    b_q = _load_queries(q, q_row, seq_len - start, i_h, stride_q, G, BM, D)
    o_p = start + o_m // G
    b_acc = tl.zeros((BM, D), tl.float32)
    b_max = tl.full((BM,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BM,), tl.float32)
    p_table = page_table + i_t.to(tl.int64) * stride_table
    p_list = indices + i_l * capacity
    # One sequence of tokens: the tail, then the list.
    tail_tokens = seq_len - tail
    total = tail_tokens + listed
    for i_n in tl.range(0, total, BN, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BN)
        m_tail, m_n = o_n < tail_tokens, o_n < total
        o_l = o_n - tail_tokens
        # [BN]
        b_token = tl.load(p_list + o_l, mask=m_n & ~m_tail, other=0)
        b_pos = tl.where(m_tail, tail + o_n, b_token)
        m_n &= m_tail | ((o_l < counted) & (b_pos >= 0) & (b_pos < tail))
        # [BN]
        b_page = tl.load(p_table + b_pos // PAGE, mask=m_n, other=0).to(tl.int64)
        o_kv = ((b_page * PAGE + b_pos % PAGE) * H + i_h) * D
        # [BN, D]
        b_k = tl.load(k_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        # [BM, BN]
        b_s = _logits(b_q, b_k, tl.zeros((BM, BN), tl.float32), scale_log2, logit_cap, HAS_CAP)
        b_s = tl.where(m_n[None, :] & (b_pos[None, :] <= o_p[:, None]), b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # A tile whose rows are all masked must not turn -inf - -inf into NaN.
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_max = b_new
        # [BN, D]
        b_v = tl.load(v_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_o = ((q_row + o_m // G).to(tl.int64) * H + i_h) * G + o_m % G
    m_m = o_m < (seq_len - start) * G
    p_out = out + o_o[:, None] * D + o_d[None, :]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_m[:, None])


def _block_queries(plan: TilePlan, group: int) -> int:
    return max(16, next_power_of_2(plan.tile_tokens * group))


def tile_score_triton(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    plan: TilePlan,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float,
    out: torch.Tensor,
    block_max: torch.Tensor | None,
) -> None:
    """Launch :func:`tile_lse_kernel`, then :func:`tile_pool_kernel`."""
    rows, heads, lists, width = plan.rows, k_buffer.shape[1], out.shape[1], out.shape[2]
    tiles, group = rows.num_rows, group_size(q.shape[1], heads)
    queries = _block_queries(plan, group)
    # Prefill runs outside of graphs, so this may be allocated.
    lse = torch.empty((tiles, heads, queries), dtype=torch.float32, device=q.device)
    shapes = {
        "H": heads,
        "G": group,
        "BM": queries,
        "D": q.shape[2],
        "PAGE": page_size,
        "HAS_CAP": logit_cap > 0,
    }
    tokens, stages, warps = SUM_TILE
    scale_log2 = sm_scale * 1.4426950408889634
    tile_lse_kernel[(tiles * heads,)](
        q,
        k_buffer,
        rows.page_table,
        rows.seq_lens,
        rows.update_start,
        plan.q_rows,
        rows.k_units,
        rows.reselect,
        lse,
        q.stride(0),
        rows.page_table.stride(0),
        scale_log2,
        logit_cap,
        BN=tokens,
        STAGES=stages,
        num_warps=warps,
        **shapes,
    )
    tokens, stages, warps = POOL_TILE
    fill = programs_to_fill(q.device, 2) // (tiles * lists)
    splits = max(1, min(fill, triton.cdiv(width, tokens)))
    tile_pool_kernel[(tiles * lists, splits)](
        q,
        k_buffer,
        rows.page_table,
        rows.seq_lens,
        rows.update_start,
        plan.q_rows,
        rows.tail_start,
        rows.k_units,
        rows.reselect,
        lse,
        out,
        block_max,
        q.stride(0),
        rows.page_table.stride(0),
        width,
        0 if block_max is None else block_max.shape[2],
        scale_log2,
        logit_cap,
        LISTS=lists,
        HEADS=heads // lists,
        BLOCK=BLOCK_UNITS,
        BN=tokens,
        STAGES=stages,
        num_warps=warps,
        **shapes,
    )


def tile_attention_triton(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: TilePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float,
    head_map: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch :func:`tile_attend_kernel`, one program a tile and KV head."""
    rows, heads = plan.rows, k_buffer.shape[1]
    group = group_size(q.shape[1], heads)
    tokens, stages, warps = ATTEND_TILE
    tile_attend_kernel[(rows.num_rows * heads,)](
        q,
        k_buffer,
        v_buffer,
        rows.page_table,
        rows.seq_lens,
        rows.update_start,
        plan.q_rows,
        rows.tail_start,
        rows.k_units,
        rows.list_rows,
        indices,
        counts,
        head_map,
        out,
        q.stride(0),
        rows.page_table.stride(0),
        indices.shape[2],
        sm_scale * 1.4426950408889634,
        logit_cap,
        H=heads,
        LISTS=indices.shape[1],
        G=group,
        BM=_block_queries(plan, group),
        D=q.shape[2],
        PAGE=page_size,
        BN=tokens,
        HAS_CAP=logit_cap > 0,
        STAGES=stages,
        num_warps=warps,
    )
