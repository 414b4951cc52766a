# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of many new tokens a row: attention, then the mass that each key received.

A row of a tile of queries is a token and a query head of the KV head's group. The second pass
computes the logits again, with a program for each tile of keys: no key is added to twice.
"""

import math

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..records import Softmax
from ..triton_ops import cast, constants, dot, online_softmax, scaled_logits
from .device_ops import BatchArgs, Shape, StateArgs, batch_row, rotated
from .types import AttentionAverage, CascadeBatch, CascadeState, check_queries

QUERY_ROWS, KEYS, WARPS, STAGES = 64, 64, 4, 2


@triton.jit
def _queries(q, cos_sin, i_t, i_h, stride_q, begin, new, before, H: tl.constexpr, G: tl.constexpr,
             BG: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """(halves of rotated queries, cache positions, whether there, offsets [BM]) of tile ``i_t``."""
    o_m = tl.arange(0, BM)
    o_t, o_g = i_t * (BM // BG) + o_m // BG, o_m % BG
    m_m = (o_t < new) & (o_g < G)
    b_pos = before + o_t
    o_head = i_h * G + o_g
    p_q = q + ((begin + o_t).to(tl.int64) * stride_q + o_head * D)[:, None]
    b_q1, b_q2 = rotated(p_q, cos_sin, b_pos, m_m, D)
    return b_q1, b_q2, b_pos, m_m, (begin + o_t).to(tl.int64) * H * G + o_head


@triton.jit
def cascade_stride_kernel(
    q,
    state,
    batch,
    cos_sin,
    out,
    lse,
    stride_q,
    scale_log2,
    logit_cap,
    C: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_r, i_h, i_t = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    slot, begin, new, held = batch_row(batch, i_r, C)
    if i_t * (BM // BG) < new:
        before = tl.maximum(held - new, 0)
        b_q1, b_q2, b_pos, m_m, o_o = _queries(
            q, cos_sin, i_t, i_h, stride_q, begin, new, before, H, G, BG, D, BM
        )
        m_seen = m_m & (held > 0)
        o_d = tl.arange(0, D)
        b_acc = tl.zeros((BM, D), tl.float32)
        b_max = tl.full((BM,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BM,), tl.float32)
        row = (slot * H + i_h) * C.ROWS
        last = tl.minimum(held, before + (i_t + 1) * (BM // BG))
        for i_n in tl.range(0, last, BN, num_stages=STAGES):
            o_n = i_n + tl.arange(0, BN)
            m_n = o_n < last
            o_kv = (row + o_n)[:, None] * D
            b_k1, b_k2 = rotated(state.k + o_kv, cos_sin, o_n, m_n, D)
            # [BM, BN]
            b_s = dot(b_q1, tl.trans(b_k1), tl.zeros((BM, BN), tl.float32))
            b_s = dot(b_q2, tl.trans(b_k2), b_s)
            b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
            m_s = m_seen[:, None] & (o_n[None, :] <= b_pos[:, None])
            b_s = tl.where(m_s & m_n[None, :], b_s, float("-inf"))
            b_p, b_alpha, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
            b_v = tl.load(state.v + o_kv + o_d[None, :], mask=m_n[:, None], other=0.0)
            b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])
        b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        o_out = o_o[:, None] * D + o_d[None, :]
        tl.store(out + o_out, cast(b_out, out.dtype.element_ty), mask=m_m[:, None])
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), 0.0)
        tl.store(lse + o_o, b_lse, mask=m_m)


@triton.jit
def cascade_mass_kernel(
    q,
    state,
    batch,
    cos_sin,
    lse,
    stride_q,
    scale_log2,
    logit_cap,
    gain,
    log2_beta,
    C: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MEAN: tl.constexpr,
):
    i_r, i_h, i_n = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * BN
    slot, begin, new, held = batch_row(batch, i_r, C)
    if (i_n < held) & (new > 0):
        before = held - new
        TOKENS: tl.constexpr = BM // BG
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < held
        row = (slot * H + i_h) * C.ROWS
        b_k1, b_k2 = rotated(state.k + (row + o_n)[:, None] * D, cos_sin, o_n, m_n, D)
        b_mass = tl.zeros((BN,), tl.float32)
        # Queries before the tile's first key see none of it.
        for i_t in range(tl.maximum(i_n - before, 0) // TOKENS, tl.cdiv(new, TOKENS)):
            b_q1, b_q2, b_pos, m_m, o_o = _queries(
                q, cos_sin, i_t, i_h, stride_q, begin, new, before, H, G, BG, D, BM
            )
            b_s = dot(b_q1, tl.trans(b_k1), tl.zeros((BM, BN), tl.float32))
            b_s = dot(b_q2, tl.trans(b_k2), b_s)
            b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
            b_lse = tl.load(lse + o_o, mask=m_m, other=0.0)
            m_s = m_m[:, None] & (o_n[None, :] <= b_pos[:, None])
            b_p = tl.exp2(tl.where(m_s, b_s - b_lse[:, None], float("-inf")))
            # A query's share after those that follow it. Rows that are not there have none.
            b_age = tl.maximum(held - 1 - b_pos, 0).to(tl.float32)
            b_w = tl.where(m_m, gain * tl.exp2(b_age * log2_beta), 0.0)
            if MEAN:
                b_mass += tl.sum(b_p * (b_w / G)[:, None], 0)
            else:
                # [TOKENS, BG, BN]
                b_p = tl.reshape(b_p * b_w[:, None], (TOKENS, BG, BN))
                b_mass += tl.sum(tl.max(b_p, 1), 0)
        p_score = state.scores + row + o_n
        b_old = tl.load(p_score, mask=m_n, other=0.0)
        b_old *= tl.exp2(new.to(tl.float32) * log2_beta)
        tl.store(p_score, b_old + b_mass, mask=m_n)


def cascade_stride_triton(
    q: torch.Tensor, state: CascadeState, batch: CascadeBatch, cos_sin: torch.Tensor, *,
    softmax: Softmax, average: AttentionAverage, out: torch.Tensor,
) -> None:  # fmt: skip
    """Launch :func:`cascade_stride_kernel`, then :func:`cascade_mass_kernel`."""
    tokens, query_heads, dim = q.shape
    heads, group = state.num_heads, check_queries(q, state)
    lse = torch.empty((tokens, query_heads), device=q.device)
    padded = next_power_of_2(group)
    options = {
        "C": constants(Shape.of(state.shape)), "H": heads, "G": group, "BG": padded, "D": dim,
        "BM": QUERY_ROWS, "BN": KEYS, "HAS_CAP": softmax.logit_cap > 0, "num_warps": WARPS,
    }  # fmt: skip
    held, args = StateArgs.of(state), BatchArgs.of(batch)
    rows = batch.num_rows * heads
    tiles = triton.cdiv(batch.most_new, QUERY_ROWS // padded)
    cascade_stride_kernel[(rows, tiles)](
        q, held, args, cos_sin, out, lse, q.stride(0), softmax.scale_log2, softmax.logit_cap,
        STAGES=STAGES, **options,
    )  # fmt: skip
    cascade_mass_kernel[(rows, triton.cdiv(state.shape.rows, KEYS))](
        q, held, args, cos_sin, lse, q.stride(0), softmax.scale_log2, softmax.logit_cap,
        average.gain, math.log2(average.beta), MEAN=average.reduce == "mean", **options,
    )  # fmt: skip
