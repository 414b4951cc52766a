# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of the scores of tiles: softmax sums, then pooled probabilities.

Logits of a prompt are too many to keep, so they are computed twice (Kascade section 3.6): once for
the softmax sums of every query, once to pool.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..device import programs_to_fill
from ..records import BLOCK_UNITS, KVView, Scores, Softmax
from ..triton_ops import (
    constants,
    dot,
    online_softmax,
    row_table,
    scaled_logits,
    selects_anew,
    slots_of,
    store_scores,
    widened,
)
from .types import TilePlan

# (keys at a time, stages, warps) of each kernel, as measured on one H200.
SUM_TILE = (128, 2, 4)
POOL_TILE = (128, 2, 8)
# Probabilities are pooled times 2 ** 96, so that fp32 holds them down to 2 ** -222.
LIFT = tl.constexpr(96.0)


class TileShape(NamedTuple):
    """Constants of a kernel: what a tile is, and how many keys are read at a time.

    BM rows hold all queries of a tile, those of a group of G heads counted in. BN keys are read at
    a time, in STAGES stages. D is the head dimension.
    """

    H: int
    G: int
    BM: int
    D: int
    PAGE: int
    HAS_CAP: bool
    BN: int
    STAGES: int

    @staticmethod
    def of(
        q: torch.Tensor, kv: KVView, plan: TilePlan, softmax: Softmax, tile: tuple[int, int, int]
    ) -> "TileShape":
        """The shape of a launch; ``tile`` is keys at a time, stages and warps."""
        group = kv.group_of(q)
        return TileShape(
            H=kv.num_heads, G=group, BM=max(16, next_power_of_2(plan.tile_tokens * group)),
            D=q.shape[2], PAGE=kv.page_size, HAS_CAP=softmax.logit_cap > 0, BN=tile[0],
            STAGES=tile[1],
        )  # fmt: skip


@triton.jit
def load_queries(q, q_row, count, i_h, stride_q, S: tl.constexpr):
    """[BM, D]: query m of a tile is token m // G, head m % G of the group."""
    o_m, o_d = tl.arange(0, S.BM), tl.arange(0, S.D)
    p_q = q + (q_row + o_m // S.G).to(tl.int64)[:, None] * stride_q
    p_q += (i_h * S.G + o_m % S.G)[:, None] * S.D + o_d[None, :]
    return tl.load(p_q, mask=(o_m < count * S.G)[:, None], other=0.0)


@triton.jit
def _logits(b_a, b_b, b_zero, scale_log2, logit_cap, S: tl.constexpr):
    return scaled_logits(dot(b_a, tl.trans(b_b), b_zero), scale_log2, logit_cap, S.HAS_CAP)


@triton.jit
def _load_keys(
    k_buffer, p_table, o_n, m_n, i_h, dtype: tl.constexpr, S: tl.constexpr, WHOLE: tl.constexpr
):
    """[BN, D] keys at positions ``o_n`` in ``dtype``; with ``WHOLE`` all of them exist."""
    o_d = tl.arange(0, S.D)
    if WHOLE:
        o_k = (slots_of(p_table, o_n, None, S.PAGE).to(tl.int64) * S.H + i_h) * S.D
        return widened(tl.load(k_buffer + o_k[:, None] + o_d[None, :]), dtype)
    o_k = (slots_of(p_table, o_n, m_n, S.PAGE).to(tl.int64) * S.H + i_h) * S.D
    b_k = tl.load(k_buffer + o_k[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
    return widened(b_k, dtype)


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
    S: tl.constexpr,
):
    """(largest logit, sum) of each query with the keys of [begin, end) that it may see."""
    for i_n in tl.range(begin, end, S.BN, num_stages=1):
        o_n = i_n + tl.arange(0, S.BN)
        # [BN, D]
        b_k = _load_keys(k_buffer, p_table, o_n, o_n < end, i_h, b_q.dtype, S, False)
        # [BM, BN]
        b_s = _logits(b_q, b_k, tl.zeros((S.BM, S.BN), tl.float32), scale_log2, logit_cap, S)
        m_s = (o_n[None, :] <= o_p[:, None]) & (o_n < end)[None, :]
        b_s = tl.where(m_s, b_s, float("-inf"))
        _, _, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
    return b_max, b_sum


@triton.jit
def tile_lse_kernel(
    q, kv, plan, first, q_rows, lse, stride_q, scale_log2, logit_cap, S: tl.constexpr
):
    i_t, i_h = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    if selects_anew(plan, i_t):
        seq_len = tl.load(plan.seq_lens + i_t)
        start = tl.load(first + i_t)
        o_m = tl.arange(0, S.BM)
        b_q = load_queries(q, tl.load(q_rows + i_t), seq_len - start, i_h, stride_q, S)
        o_p = start + o_m // S.G
        p_table = row_table(kv, i_t)
        b_max = tl.full((S.BM,), float("-inf"), tl.float32)
        b_sum = tl.zeros((S.BM,), tl.float32)
        # Every query sees all of [0, seen), so that no mask is needed there.
        seen = start // S.BN * S.BN
        b_max, b_sum = _add_sums(
            b_q, b_max, b_sum, kv.k, p_table, o_p, seen, seq_len, i_h, scale_log2, logit_cap, S,
        )  # fmt: skip
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
        # The largest logit so far serves as the shift of all: fp32 holds sums of up to 2 ** 127
        # times its term, and where that is not enough the shift follows the largest after all.
        b_all = b_sum
        for i_n in tl.range(0, seen, S.BN, num_stages=S.STAGES):
            o_n = i_n + tl.arange(0, S.BN)
            b_k = _load_keys(kv.k, p_table, o_n, o_n < seen, i_h, b_q.dtype, S, True)
            b_s = _logits(b_q, b_k, tl.zeros((S.BM, S.BN), tl.float32), scale_log2, logit_cap, S)
            b_all += tl.sum(tl.exp2(b_s - b_max[:, None]), 1)
        if tl.max(b_all) == float("inf"):
            b_max, b_all = _add_sums(
                b_q, b_max, b_sum, kv.k, p_table, o_p, 0, seen, i_h, scale_log2, logit_cap, S,
            )  # fmt: skip
        tl.store(lse + tl.program_id(0).to(tl.int64) * S.BM + o_m, b_max + tl.log2(b_all))


@triton.jit
def tile_pool_kernel(
    q,
    kv,
    plan,
    first,
    q_rows,
    lse,
    out,
    block_max,
    stride_q,
    width,
    blocks,
    scale_log2,
    logit_cap,
    LISTS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
):
    # HEADS: KV heads that share a list.
    i_tl, i_t = tl.program_id(0).to(tl.int64), tl.program_id(0) // LISTS
    if selects_anew(plan, i_t):
        seq_len = tl.load(plan.seq_lens + i_t)
        start = tl.load(first + i_t)
        n = tl.load(plan.tail_start + i_t)
        q_row = tl.load(q_rows + i_t)
        o_m = tl.arange(0, S.BM)
        m_m = o_m < (seq_len - start) * S.G
        i_h = (tl.program_id(0) % LISTS) * HEADS
        b_q = load_queries(q, q_row, seq_len - start, i_h, stride_q, S)
        # A row without a query adds nothing: exp2(-inf) is 0.
        p_lse = lse + (i_t.to(tl.int64) * S.H + i_h) * S.BM + o_m
        b_lse = tl.load(p_lse, mask=m_m, other=float("inf")) - LIFT
        p_table = row_table(kv, i_t)
        for i_b in tl.range(
            tl.program_id(1), tl.cdiv(n, S.BN), tl.num_programs(1), num_stages=S.STAGES
        ):
            o_n = i_b * S.BN + tl.arange(0, S.BN)
            m_n = o_n < n
            b_pooled = tl.zeros((S.BN,), tl.float32)
            for i_g in range(HEADS):
                if HEADS > 1:
                    b_q = load_queries(q, q_row, seq_len - start, i_h + i_g, stride_q, S)
                    b_lse = tl.load(p_lse + i_g * S.BM, mask=m_m, other=float("inf")) - LIFT
                # [BN, D]
                b_k = _load_keys(kv.k, p_table, o_n, m_n, i_h + i_g, b_q.dtype, S, False)
                # [BN, BM]: queries along the threads' registers, where they are added up.
                b_s = _logits(
                    b_k, b_q, tl.zeros((S.BN, S.BM), tl.float32), scale_log2, logit_cap, S
                )
                b_pooled += tl.sum(tl.exp2(b_s - b_lse[None, :]), 1)
            b_score = tl.log2(b_pooled) - LIFT
            store_scores(out, block_max, b_score, o_n, n, i_tl * width, i_tl * blocks, S.BN, BLOCK)


def tile_score_triton(
    q: torch.Tensor, kv: KVView, plan: TilePlan, *, softmax: Softmax, out: Scores
) -> None:
    """Launch :func:`tile_lse_kernel`, then :func:`tile_pool_kernel`."""
    rows, heads, softmax = plan.rows, kv.num_heads, kv.logits(softmax)
    tiles, lists, width = out.values.shape
    shape = TileShape.of(q, kv, plan, softmax, SUM_TILE)
    # Prefill runs outside of graphs, so this may be allocated.
    lse = torch.empty((tiles, heads, shape.BM), dtype=torch.float32, device=q.device)
    keys = (q, kv.args, rows.args, rows.update_start, plan.q_rows)
    tile_lse_kernel[(tiles * heads,)](
        *keys, lse, q.stride(0), softmax.scale_log2, softmax.logit_cap,
        S=constants(shape), num_warps=SUM_TILE[2],
    )  # fmt: skip
    shape = TileShape.of(q, kv, plan, softmax, POOL_TILE)
    fill = programs_to_fill(q.device, 2) // (tiles * lists)
    splits = max(1, min(fill, triton.cdiv(width, shape.BN)))
    tile_pool_kernel[(tiles * lists, splits)](
        *keys, lse, out.values, out.block_max,
        q.stride(0), width, out.block_max.shape[2], softmax.scale_log2, softmax.logit_cap,
        LISTS=lists, HEADS=heads // lists, BLOCK=BLOCK_UNITS, S=constants(shape),
        num_warps=POOL_TILE[2],
    )  # fmt: skip
