# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of exact scores in two passes (Kascade section 3.6).

The first reads K once and writes the logits of every query head, with their largest and their sum
a split; the second normalises and pools. Logits are 4 * G bytes a token and KV head, written and
read, against 2 * D bytes of K.
"""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..plan import DecodePlan
from ..records import BLOCK_UNITS, KVView, Scores, Softmax
from ..triton_ops import (
    dot,
    is_read,
    online_softmax,
    row_table,
    scaled_logits,
    selects_anew,
    slots_of,
    store_scores,
    widened,
)
from .types import TILE_TOKENS, ExactWorkspace, num_splits

# Measured on one H200.
STAGES = 3
WARPS = 4
POOL_TILE_TOKENS = 1024
POOL_TILES_A_PROGRAM = 4


@triton.jit
def exact_logits_kernel(
    q,
    kv,
    plan,
    unread,
    logits,
    partials,
    stride_q,
    width,
    scale_log2,
    logit_cap,
    LISTS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_s, splits = tl.program_id(1), tl.num_programs(1)
    if selects_anew(plan, i_r) & is_read(unread, i_h * LISTS // H):
        seq_len = tl.load(plan.seq_lens + i_r)
        n = tl.load(plan.tail_start + i_r)
        o_g, o_d = tl.arange(0, BG), tl.arange(0, D)
        m_g = o_g < G
        o_q = (i_r.to(tl.int64) * H + i_h) * G + o_g
        p_q = q + i_r.to(tl.int64) * stride_q + (i_h * G + o_g)[:, None] * D + o_d[None, :]
        # [BG, D]
        b_q = tl.load(p_q, mask=m_g[:, None], other=0.0)
        b_max = tl.full((BG,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BG,), tl.float32)
        p_table = row_table(kv, i_r)
        share = tl.cdiv(tl.cdiv(seq_len, splits), BN) * BN
        first = i_s * share
        for i_n in tl.range(first, tl.minimum(first + share, seq_len), BN, num_stages=STAGES):
            o_n = i_n + tl.arange(0, BN)
            m_n = o_n < seq_len
            # [BN]
            o_k = (slots_of(p_table, o_n, m_n, PAGE).to(tl.int64) * H + i_h) * D
            # [BN, D]
            b_k = tl.load(kv.k + o_k[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
            b_k = widened(b_k, b_q.dtype)
            # [BG, BN]
            b_s = dot(b_q, tl.trans(b_k), tl.zeros((BG, BN), tl.float32))
            b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
            m_s = m_g[:, None] & (o_n < n)[None, :]
            tl.store(logits + o_q[:, None] * width + o_n[None, :], b_s, mask=m_s)
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
            _, _, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        p_part = partials + (o_q * splits + i_s) * 2
        tl.store(p_part, b_max, mask=m_g)
        tl.store(p_part + 1, b_sum, mask=m_g)


@triton.jit
def exact_pool_kernel(
    logits,
    partials,
    plan,
    unread,
    out,
    block_max,
    width,
    blocks,
    LISTS: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # HEADS: KV heads that share a list.
    i_rl, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // LISTS
    if selects_anew(plan, i_r) & is_read(unread, tl.program_id(0) % LISTS):
        n = tl.load(plan.tail_start + i_r)
        o_g, o_s = tl.arange(0, BG), tl.arange(0, BS)
        m_g = o_g < G
        for i_t in tl.range(tl.program_id(1), tl.cdiv(n, BT), tl.num_programs(1)):
            o_t = i_t * BT + tl.arange(0, BT)
            m_t = o_t < n
            b_max = tl.full((BT,), float("-inf"), tl.float32)
            b_sum = tl.zeros((BT,), tl.float32)
            for i_h in range(HEADS):
                o_q = (i_rl * HEADS + i_h) * G + o_g
                p_part = partials + (o_q[:, None] * SPLITS + o_s[None, :]) * 2
                m_part = m_g[:, None] & (o_s < SPLITS)[None, :]
                # [BG, BS]
                b_part = tl.load(p_part, mask=m_part, other=float("-inf"))
                b_share = tl.load(p_part + 1, mask=m_part, other=0.0)
                b_top = tl.max(b_part, 1)
                b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
                b_lse = b_top + tl.log2(tl.sum(b_share * tl.exp2(b_part - b_top[:, None]), 1))
                m_s = m_g[:, None] & m_t[None, :]
                # [BG, BT]
                b_s = tl.load(
                    logits + o_q[:, None] * width + o_t[None, :], mask=m_s, other=float("-inf")
                )
                b_s = tl.where(m_s, b_s - b_lse[:, None], float("-inf"))
                b_new = tl.maximum(b_max, tl.max(b_s, 0))
                b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
                b_sum = b_sum * tl.exp2(b_max - b_shift)
                b_sum += tl.sum(tl.exp2(b_s - b_shift[None, :]), 0)
                b_max = b_new
            b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_score = b_shift + tl.log2(b_sum)
            store_scores(out, block_max, b_score, o_t, n, i_rl * width, i_rl * blocks, BT, BLOCK)


def exact_score_triton(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    *,
    softmax: Softmax,
    out: Scores,
    workspace: ExactWorkspace,
) -> None:
    """Launch :func:`exact_logits_kernel`, then :func:`exact_pool_kernel`.

    Raises:
        ValueError: if ``workspace`` is too small for this batch.
    """
    rows, query_heads, dim = q.shape
    heads, group, softmax = kv.num_heads, kv.group_of(q), kv.logits(softmax)
    _, lists, width = out.values.shape
    splits = num_splits(rows, heads, width, q.device)
    needed = 2 * rows * query_heads * splits
    if workspace.partials.numel() < needed:
        raise ValueError(
            f"workspace holds {workspace.partials.numel()} partials, this batch needs {needed}"
        )
    exact_logits_kernel[(rows * heads, splits)](
        q, kv.args, plan.args, out.unread, workspace.logits, workspace.partials, q.stride(0), width,
        softmax.scale_log2, softmax.logit_cap,
        LISTS=lists, H=heads, G=group, BG=max(16, next_power_of_2(group)), D=dim, PAGE=kv.page_size,
        BN=TILE_TOKENS, HAS_CAP=softmax.logit_cap > 0, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    tiles = triton.cdiv(width, POOL_TILE_TOKENS * POOL_TILES_A_PROGRAM)
    exact_pool_kernel[(rows * lists, tiles)](
        workspace.logits, workspace.partials, plan.args, out.unread,
        out.values, out.block_max, width, out.block_max.shape[2],
        LISTS=lists, HEADS=heads // lists, G=group, BG=next_power_of_2(group), SPLITS=splits,
        BS=next_power_of_2(splits), BT=POOL_TILE_TOKENS, BLOCK=BLOCK_UNITS, num_warps=4,
    )  # fmt: skip
