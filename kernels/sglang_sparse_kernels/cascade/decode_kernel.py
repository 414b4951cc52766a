# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of decoding: split-KV attention with rotation, then merge and scores.

Keys are read once. Logits are written and read again, 8 * G bytes a token and KV head against the
4 * D bytes of K and V: probabilities need the sum over all splits.
"""

import torch
import triton
import triton.language as tl

from ..attend.types import num_splits
from ..common import next_power_of_2
from ..records import Softmax
from ..triton_ops import (
    HeadShape,
    cast,
    constants,
    dot,
    online_softmax,
    overlapping,
    scaled_logits,
)
from ..triton_ops import begin as overlap
from .device_ops import BatchArgs, Shape, StateArgs, batch_row, rotated
from .types import AttentionAverage, CascadeBatch, CascadeState, CascadeWorkspace, check_queries

TILE, WARPS, STAGES = 64, 4, 2
SCORED = 256  # tokens whose scores a program brings up to date


@triton.jit
def cascade_decode_kernel(
    q,
    state,
    batch,
    cos_sin,
    logits,
    partial,
    lse,
    stride_q,
    scale_log2,
    logit_cap,
    C: tl.constexpr,
    S: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    overlap()
    i_r, i_h, i_s = tl.program_id(0) // S.H, tl.program_id(0) % S.H, tl.program_id(1)
    slot, i_q, _, held = batch_row(batch, i_r, C)
    o_g, o_d = tl.arange(0, S.BG), tl.arange(0, S.D)
    m_g = o_g < S.G
    p_q = q + i_q.to(tl.int64) * stride_q + (i_h * S.G + o_g)[:, None] * S.D
    o_now = tl.zeros((S.BG,), tl.int32) + tl.maximum(held - 1, 0)
    b_q1, b_q2 = rotated(p_q, cos_sin, o_now, m_g, S.D)
    b_acc = tl.zeros((S.BG, S.D), tl.float32)
    b_max = tl.full((S.BG,), float("-inf"), tl.float32)
    b_sum = tl.zeros((S.BG,), tl.float32)
    row = (slot * S.H + i_h) * C.ROWS
    o_q = (i_r.to(tl.int64) * S.H + i_h) * S.G + o_g
    share = tl.cdiv(tl.cdiv(held, SPLITS), BN) * BN
    first = i_s * share
    last = tl.minimum(first + share, held)
    for i_n in tl.range(first, last, BN, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < last
        o_kv = (row + o_n)[:, None] * S.D
        b_k1, b_k2 = rotated(state.k + o_kv, cos_sin, o_n, m_n, S.D)
        # [BG, BN]
        b_s = dot(b_q1, tl.trans(b_k1), tl.zeros((S.BG, BN), tl.float32))
        b_s = dot(b_q2, tl.trans(b_k2), b_s)
        b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
        m_s = m_g[:, None] & m_n[None, :]
        tl.store(logits + o_q[:, None] * C.ROWS + o_n[None, :], b_s, mask=m_s)
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_p, b_alpha, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        b_v = tl.load(state.v + o_kv + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])
    o_s = o_q * SPLITS + i_s
    b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_sum), float("-inf"))
    tl.store(lse + o_s, b_lse, mask=m_g)
    if first < last:
        b_o = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        tl.store(partial + o_s[:, None] * S.D + o_d[None, :], b_o, mask=m_g[:, None])


@triton.jit
def _merge(p_part, b_lse, b_total, out, o_o, m_g, D: tl.constexpr, SPLITS: tl.constexpr):
    """Write the merged output of a KV head's query heads [BG, D]; 0 where nothing is held."""
    o_d = tl.arange(0, D)
    b_out = tl.zeros((b_lse.shape[0], D), tl.float32)
    o_s = tl.arange(0, b_lse.shape[1])
    for i_s in range(SPLITS):
        # Of a split without tokens nothing was written.
        b_one = tl.max(tl.where(o_s[None, :] == i_s, b_lse, float("-inf")), 1)
        m_one = m_g & (b_one > float("-inf"))
        b_o = tl.load(p_part[:, None] + i_s * D + o_d[None, :], mask=m_one[:, None], other=0.0)
        b_out += b_o * tl.where(m_one, tl.exp2(b_one - b_total), 0.0)[:, None]
    tl.store(
        out + o_o[:, None] + o_d[None, :], cast(b_out, out.dtype.element_ty), mask=m_g[:, None]
    )


@triton.jit
def cascade_finish_kernel(
    state,
    batch,
    logits,
    partial,
    lse,
    out,
    beta,
    gain,
    C: tl.constexpr,
    S: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    MEAN: tl.constexpr,
):
    overlap()
    i_r, i_h, i_t = tl.program_id(0) // S.H, tl.program_id(0) % S.H, tl.program_id(1)
    slot, i_q, _, held = batch_row(batch, i_r, C)
    o_g, o_s = tl.arange(0, S.BG), tl.arange(0, BS)
    m_g = o_g < S.G
    o_q = (i_r.to(tl.int64) * S.H + i_h) * S.G + o_g
    m_s = m_g[:, None] & (o_s < SPLITS)[None, :]
    # [BG, BS]
    b_lse = tl.load(lse + o_q[:, None] * SPLITS + o_s[None, :], mask=m_s, other=float("-inf"))
    b_max = tl.max(b_lse, 1)
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_total = tl.sum(tl.exp2(b_lse - b_shift[:, None]), 1)
    b_total = b_shift + tl.log2(tl.where(b_total > 0, b_total, 1.0))
    if i_t == 0:
        o_o = (i_q.to(tl.int64) * S.H * S.G + i_h * S.G + o_g) * S.D
        _merge(partial + o_q * SPLITS * S.D, b_lse, b_total, out, o_o, m_g, S.D, SPLITS)
    o_n = i_t * BN + tl.arange(0, BN)
    m_n = o_n < held
    m_p = m_g[:, None] & m_n[None, :]
    # [BG, BN]
    b_s = tl.load(logits + o_q[:, None] * C.ROWS + o_n[None, :], mask=m_p, other=float("-inf"))
    b_p = tl.exp2(b_s - b_total[:, None])
    b_given = tl.sum(b_p, 0) / S.G if MEAN else tl.max(b_p, 0)
    p_score = state.scores + (slot * S.H + i_h) * C.ROWS + o_n
    b_score = tl.load(p_score, mask=m_n, other=0.0)
    tl.store(p_score, beta * b_score + gain * b_given, mask=m_n)


def cascade_decode_triton(
    q: torch.Tensor, state: CascadeState, batch: CascadeBatch, cos_sin: torch.Tensor, *,
    softmax: Softmax, average: AttentionAverage, out: torch.Tensor, workspace: CascadeWorkspace,
) -> None:  # fmt: skip
    """Launch :func:`cascade_decode_kernel`, then :func:`cascade_finish_kernel`.

    Raises:
        ValueError: if ``workspace`` is too small for this batch.
    """
    rows, query_heads, dim = q.shape
    check_queries(q, state)
    heads, shape = state.num_heads, state.shape
    splits = num_splits(rows, heads, shape.rows, q.device)
    partials = rows * query_heads * splits
    scratch = workspace.attention
    if scratch.numel() < partials * (dim + 1) or workspace.logits.shape[0] < rows:
        raise ValueError(
            f"workspace holds {scratch.numel()} floats and logits of {workspace.logits.shape[0]} "
            f"rows, this batch needs {partials * (dim + 1)} and {rows}"
        )
    partial, lse = scratch[: partials * dim], scratch[partials * dim :]
    args, held, info = BatchArgs.of(batch), StateArgs.of(state), constants(Shape.of(shape))
    cascade_decode_kernel[(rows * heads, splits)](
        q, held, args, cos_sin, workspace.logits, partial, lse, q.stride(0),
        softmax.scale_log2, softmax.logit_cap,
        C=info, S=constants(HeadShape.of(q, heads, least=16)), BN=TILE,
        SPLITS=splits, HAS_CAP=softmax.logit_cap > 0, STAGES=STAGES, num_warps=WARPS,
        **overlapping(rows * heads),
    )  # fmt: skip
    cascade_finish_kernel[(rows * heads, triton.cdiv(shape.rows, SCORED))](
        held, args, workspace.logits, partial, lse, out, average.beta, average.gain,
        C=info, S=constants(HeadShape.of(q, heads)), BN=SCORED, SPLITS=splits,
        BS=next_power_of_2(splits), MEAN=average.reduce == "mean", num_warps=4,
        **overlapping(rows * heads),
    )  # fmt: skip
