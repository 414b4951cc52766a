# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of split-KV decode attention over gathered rows."""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from ..triton_ops import (
    begin,
    begin_beside,
    cast,
    dot,
    end_after,
    halved,
    head_tail,
    online_softmax,
    overlapping,
    row_table,
    scaled_logits,
    slots_of,
    tail_positions,
    wait_for_pages,
    widened,
)
from .types import num_splits

ONE_TILE = tl.constexpr(64)


def _tile(split_tokens: int) -> tuple[int, int, int]:
    """Tokens a tile, stages and warps for splits of ``split_tokens``, measured on one H200."""
    # Three stages of loads run ahead: units of tokens, then their pages, then K and V.
    return (ONE_TILE.value, 4, 2) if split_tokens <= ONE_TILE.value else (128, 3, 4)


@triton.jit
def _rows(
    p_list,
    p_table,
    first,
    last,
    tail,
    tail_tokens,
    counted,
    end,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """Slots of the tokens [first, first + BN), and whether each is attended to; both [BN].

    Tokens are counted through the tail and then through the list. Those from ``last`` on do not
    exist.
    """
    o_n = first + tl.arange(0, BN)
    m_tail, m_n = o_n < tail_tokens, o_n < last
    o_l = o_n - tail_tokens
    b_unit = tl.load(p_list + o_l // UNIT, mask=m_n & ~m_tail, other=0)
    b_tail = tail_positions(tail, o_n, end, WINDOWS)
    b_pos = tl.where(m_tail, b_tail, b_unit * UNIT + o_l % UNIT)
    m_n &= m_tail | ((o_l < counted) & (b_pos >= 0) & (b_pos < tail))
    return slots_of(p_table, b_pos, m_n, PAGE), m_n


@triton.jit
def attend_split_kernel(
    q,
    kv,
    plan,
    list_rows,
    indices,
    counts,
    head_map,
    windows,
    out,
    partial,
    lse,
    stride_q,
    capacity,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    LISTS: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    if kv.arriving is None:
        begin()
    else:
        begin_beside()
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_s = tl.program_id(1)
    # Queries of a request are joined with the query heads of its group, head by head.
    o_g, o_d = tl.arange(0, BG), tl.arange(0, D)
    m_g, o_j, o_h = o_g < Q * G, o_g // G, i_h * G + o_g % G
    i_list = i_h
    if head_map is not None:
        i_list = tl.load(head_map + i_h)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * LISTS + i_list
    tail, seq_len = tl.load(plan.tail_start + i_r), tl.load(plan.seq_lens + i_r)
    list_tokens = tl.minimum(tl.load(plan.k_units + i_r), capacity) * UNIT
    sinks = 0
    WINDOWS: tl.constexpr = windows is not None
    if WINDOWS:
        streams = (tl.load(windows.streams + i_h) != 0) & (tail > 0)
        tail, sinks = head_tail(windows, streams, seq_len, tail)
        list_tokens = tl.where(streams, 0, list_tokens)
    # Tokens of the tail up to the first query and to the last one, and the sinks behind them.
    first_tail = seq_len - tail
    last_tail = first_tail + Q - 1
    tail_tokens, end = last_tail + sinks, tail + last_tail
    counted = tl.load(counts + i_l) * UNIT
    # One sequence of tokens: the tail, then the list. Its split follows from the plan alone, so
    # that indices load while the count, which may be lower, is on its way.
    total = tail_tokens + list_tokens
    share = tl.cdiv(tl.cdiv(total, SPLITS), 16) * 16
    first = i_s * share
    last = tl.minimum(first + share, total)

    o_r = i_r.to(tl.int64) * Q + o_j
    o_q = o_r * H * G + o_h
    # [BG, D]
    p_q = q + (o_r * stride_q + o_h * D)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_g[:, None], other=0.0)
    b_acc = tl.zeros((BG, D), tl.float32)
    b_max = tl.full((BG,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BG,), tl.float32)
    p_table = row_table(kv, i_r)
    p_list = indices + i_l * capacity
    if kv.arriving is not None:
        for i_n in range(first, last, BN):
            b_row, m_n = _rows(
                p_list, p_table, i_n, last, tail, tail_tokens, counted, end, BN, UNIT, PAGE,
                WINDOWS,
            )  # fmt: skip
            wait_for_pages(kv.arriving, b_row // PAGE)
    # A split of a list has one tile of these: where its tokens lie is known sooner without copies
    # that run ahead. In longer rows beside it the next tile is looked up while one is on its way.
    if BN == ONE_TILE:
        b_row, m_n = _rows(
            p_list, p_table, first, last, tail, tail_tokens, counted, end, BN, UNIT, PAGE,
            WINDOWS,
        )  # fmt: skip
    for i_n in tl.range(first, last, BN, num_stages=STAGES):
        if BN == ONE_TILE:
            o_kv = (b_row.to(tl.int64) * H + i_h) * D
            m_kv = m_n
            b_row, m_n = _rows(
                p_list, p_table, i_n + BN, last, tail, tail_tokens, counted, end, BN, UNIT,
                PAGE, WINDOWS,
            )  # fmt: skip
        else:
            b_row, m_kv = _rows(
                p_list, p_table, i_n, last, tail, tail_tokens, counted, end, BN, UNIT, PAGE,
                WINDOWS,
            )  # fmt: skip
            o_kv = (b_row.to(tl.int64) * H + i_h) * D
        # [BN, D]
        b_k = tl.load(kv.k + o_kv[:, None] + o_d[None, :], mask=m_kv[:, None], other=0.0)
        b_k = widened(b_k, b_q.dtype)
        # [BG, BN]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros((BG, BN), tl.float32))
        b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
        m_s = m_kv[None, :]
        if Q > 1:
            # Query j sees j tokens of the tail more than the first one does.
            o_n = i_n + tl.arange(0, BN)
            m_s &= (o_n >= last_tail)[None, :] | (o_n[None, :] < (first_tail + o_j)[:, None])
            if WINDOWS:
                # And its window begins j tokens later.
                o_w = seq_len - windows.local - tail + o_j
                m_w = (o_n >= last_tail)[None, :] | (o_n[None, :] >= o_w[:, None])
                m_s &= m_w | (streams == 0)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_p, b_alpha, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        # [BN, D]
        b_v = tl.load(kv.v + o_kv[:, None] + o_d[None, :], mask=m_kv[:, None], other=0.0)
        b_v = halved(b_v, b_q.dtype)
        b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])

    b_acc *= kv.v_scale
    if SPLITS == 1:
        o_o = o_q[:, None] * D + o_d[None, :]
        tl.store(out + o_o, cast(b_acc / b_sum[:, None], out.dtype.element_ty), mask=m_g[:, None])
    else:
        o_s = o_q * SPLITS + i_s
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(lse + o_s, b_lse, mask=m_g)
        if first < last:
            b_o = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
            tl.store(partial + o_s[:, None] * D + o_d[None, :], b_o, mask=m_g[:, None])
    if kv.arriving is not None:
        end_after()


@triton.jit
def merge_splits_kernel(
    partial,
    lse,
    out,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
):
    begin()
    i_q = tl.program_id(0).to(tl.int64)
    o_s, o_d = tl.arange(0, BS), tl.arange(0, D)
    # [BS]
    b_lse = tl.load(lse + i_q * SPLITS + o_s, mask=o_s < SPLITS, other=float("-inf"))
    b_w = tl.exp2(b_lse - tl.max(b_lse, 0))
    # [BS, D]; a split that had no tokens wrote nothing.
    b_o = tl.load(
        partial + (i_q * SPLITS + o_s)[:, None] * D + o_d[None, :],
        mask=(b_lse > float("-inf"))[:, None],
        other=0.0,
    )
    b_out = tl.sum(b_o * b_w[:, None], 0) / tl.sum(b_w, 0)
    tl.store(out + i_q * D + o_d, cast(b_out, out.dtype.element_ty))


def gathered_decode_attention_triton(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, lists: Lists, *, softmax: Softmax,
    out: torch.Tensor, workspace: torch.Tensor, queries: int,
) -> None:  # fmt: skip
    """Launch :func:`attend_split_kernel` and, with several splits, :func:`merge_splits_kernel`.

    Raises:
        ValueError: if ``workspace`` is too small for this batch.
    """
    rows, (tokens, query_heads, dim) = plan.num_rows, q.shape
    heads, group, softmax = kv.num_heads, kv.group_of(q), kv.logits(softmax)
    capacity_tokens = lists.capacity * lists.unit
    splits = num_splits(rows, heads, capacity_tokens, q.device)
    tile, stages, warps = _tile(triton.cdiv(capacity_tokens, splits))
    partials = tokens * query_heads * splits
    if workspace.numel() < partials * (dim + 1):
        raise ValueError(
            f"workspace holds {workspace.numel()} floats, this batch needs {partials * (dim + 1)}"
        )
    partial, lse = workspace[: partials * dim], workspace[partials * dim :]
    attend_split_kernel[(rows * heads, splits)](
        q, kv.args, plan.args, lists.rows, lists.indices, lists.counts, lists.head_map,
        lists.window_args, out, partial, lse, q.stride(0), lists.capacity,
        softmax.scale_log2, softmax.logit_cap,
        H=heads, LISTS=lists.indices.shape[1], G=group, Q=queries,
        BG=max(16, next_power_of_2(queries * group)), D=dim,
        PAGE=kv.page_size, UNIT=lists.unit, BN=tile, SPLITS=splits, HAS_CAP=softmax.logit_cap > 0,
        STAGES=stages, num_warps=warps,
        **overlapping(rows * heads if kv.arriving is None else 0),
    )  # fmt: skip
    if splits > 1:
        merge_splits_kernel[(tokens * query_heads,)](
            partial, lse, out, D=dim, SPLITS=splits, BS=next_power_of_2(splits), num_warps=4,
            **overlapping(0),
        )  # fmt: skip
