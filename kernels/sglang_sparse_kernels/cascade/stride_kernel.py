# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of many new tokens a row: attention, then the mass that each key received.

Queries and keys are rotated once (:mod:`.rotate_kernel`). A row of a tile of queries is a token and
a query head of the KV head's group. The mass pass computes the logits again, with a program for
each tile of keys: no key is added to twice.
"""

import math

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..records import Softmax
from ..triton_ops import cast, constants, dot, online_softmax, scaled_logits
from .device_ops import BatchArgs, Shape, StateArgs, batch_row
from .rotate_kernel import rotate_triton
from .types import AttentionAverage, CascadeBatch, CascadeState, check_queries

# (rows of queries, keys, stages, warps) of each kernel.
ATTEND_TILE = (128, 128, 2, 8)
MASS_TILE = (128, 128, 2, 8)
# Rotated keys are scratch: so many bytes, or those of one row, and so many rows of a launch.
SCRATCH_BYTES, MOST_ROWS = 128 << 20, 256


@triton.jit
def _query_rows(i_t, i_h, begin, new, H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr,
                BM: tl.constexpr):  # fmt: skip
    """(token within the row's new ones, whether there, offset of token and head) of a tile [BM]."""
    o_m = tl.arange(0, BM)
    o_t, o_g = i_t * (BM // BG) + o_m // BG, o_m % BG
    return o_t, (o_t < new) & (o_g < G), (begin + o_t).to(tl.int64) * H * G + i_h * G + o_g


@triton.jit
def _attend(
    b_acc, b_max, b_sum, b_q, b_pos, p_k, p_v, begin, end, scale_log2, logit_cap,
    BN: tl.constexpr, D: tl.constexpr, HAS_CAP: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to keys [begin, end); with ``WHOLE`` these are whole tiles that all queries see."""
    o_d = tl.arange(0, D)
    for i_n in tl.range(begin, end, BN, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BN)
        o_kv = o_n[:, None] * D + o_d[None, :]
        if WHOLE:
            b_k = tl.load(p_k + o_kv)
            b_v = tl.load(p_v + o_kv)
        else:
            b_k = tl.load(p_k + o_kv, mask=(o_n < end)[:, None], other=0.0)
            b_v = tl.load(p_v + o_kv, mask=(o_n < end)[:, None], other=0.0)
        # [BM, BN]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros((b_q.shape[0], BN), tl.float32))
        b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
        if not WHOLE:
            m_s = (o_n[None, :] <= b_pos[:, None]) & (o_n < end)[None, :]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_p, b_alpha, b_max, b_sum = online_softmax(b_s, b_max, b_sum)
        b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])
    return b_acc, b_max, b_sum


@triton.jit
def cascade_stride_kernel(
    q,
    keys,
    state,
    batch,
    out,
    shift,
    scale_log2,
    logit_cap,
    log2_gain,
    log2_beta,
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
    i_t, i_r, i_h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    slot, begin, new, held = batch_row(batch, i_r, C)
    first = i_t * (BM // BG)
    if first < new:
        before = tl.maximum(held - new, 0)
        o_t, m_m, o_o = _query_rows(i_t, i_h, begin, new, H, G, BG, BM)
        o_x = o_o[:, None] * D + tl.arange(0, D)[None, :]
        # Nothing is held in padding, whose queries nobody rotated.
        b_q = tl.load(q + o_x, mask=(m_m & (held > 0))[:, None], other=0.0)
        b_pos = before + o_t
        p_k = keys + (i_r.to(tl.int64) * H + i_h) * C.ROWS * D
        p_v = state.v + (slot * H + i_h) * C.ROWS * D
        b_acc = tl.zeros((BM, D), tl.float32)
        b_max = tl.full((BM,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BM,), tl.float32)
        last = tl.minimum(held, before + first + BM // BG)
        whole = tl.minimum(before + first + 1, last) // BN * BN
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q, b_pos, p_k, p_v, 0, whole, scale_log2, logit_cap,
            BN, D, HAS_CAP, True, STAGES,
        )  # fmt: skip
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q, b_pos, p_k, p_v, whole, last, scale_log2, logit_cap,
            BN, D, HAS_CAP, False, STAGES,
        )  # fmt: skip
        b_sum = tl.where(b_sum > 0, b_sum, 1.0)
        tl.store(out + o_x, cast(b_acc / b_sum[:, None], out.dtype.element_ty), mask=m_m[:, None])
        # A probability times its query's share, after those that follow it, is exp2(logit - shift).
        b_age = tl.maximum(held - 1 - b_pos, 0).to(tl.float32)
        tl.store(shift + o_o, b_max + tl.log2(b_sum) - log2_gain - b_age * log2_beta, mask=m_m)


@triton.jit
def _mass(
    b_mass, b_k, o_n, q, shift, before, i_h, begin, new, first, end, scale_log2, logit_cap,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    HAS_CAP: tl.constexpr, MEAN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what tiles [first, end) of queries give; with ``WHOLE`` their queries see all keys."""
    o_d = tl.arange(0, D)
    for i_t in tl.range(first, end, num_stages=STAGES):
        o_t, m_m, o_o = _query_rows(i_t, i_h, begin, new, H, G, BG, BM)
        b_q = tl.load(q + o_o[:, None] * D + o_d[None, :], mask=m_m[:, None], other=0.0)
        # Queries that are not there give nothing.
        b_shift = tl.load(shift + o_o, mask=m_m, other=float("inf"))
        # [BN, BM]
        b_s = dot(b_k, tl.trans(b_q), tl.zeros((b_k.shape[0], BM), tl.float32))
        b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP) - b_shift[None, :]
        if not WHOLE:
            b_s = tl.where(o_n[:, None] <= (before + o_t)[None, :], b_s, float("-inf"))
        b_p = tl.exp2(b_s)
        if MEAN:
            b_mass += tl.sum(b_p, 1)
        else:
            # [BN, tokens, BG]
            b_p = tl.reshape(b_p, (b_k.shape[0], BM // BG, BG))
            b_mass += tl.sum(tl.max(b_p, 2), 1)
    return b_mass


@triton.jit
def cascade_mass_kernel(
    q,
    keys,
    state,
    batch,
    shift,
    scale_log2,
    logit_cap,
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
    STAGES: tl.constexpr,
):
    i_n, i_r, i_h = tl.program_id(0) * BN, tl.program_id(1) // H, tl.program_id(1) % H
    slot, begin, new, held = batch_row(batch, i_r, C)
    if (i_n < held) & (new > 0):
        before = held - new
        TOKENS: tl.constexpr = BM // BG
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < held
        p_k = keys + (i_r.to(tl.int64) * H + i_h) * C.ROWS * D
        b_k = tl.load(
            p_k + o_n[:, None] * D + tl.arange(0, D)[None, :], mask=m_n[:, None], other=0.0
        )
        # Queries before the tile's first key see none of it, those from its last key on all.
        tiles = tl.cdiv(new, TOKENS)
        some = tl.maximum(i_n - before, 0) // TOKENS
        whole = tl.minimum(tl.cdiv(tl.maximum(i_n + BN - 1 - before, 0), TOKENS), tiles)
        b_mass = tl.zeros((BN,), tl.float32)
        b_mass = _mass(
            b_mass, b_k, o_n, q, shift, before, i_h, begin, new, some, whole, scale_log2, logit_cap,
            H, G, BG, D, BM, HAS_CAP, MEAN, False, STAGES,
        )  # fmt: skip
        b_mass = _mass(
            b_mass, b_k, o_n, q, shift, before, i_h, begin, new, whole, tiles, scale_log2,
            logit_cap, H, G, BG, D, BM, HAS_CAP, MEAN, True, STAGES,
        )  # fmt: skip
        p_score = state.scores + (slot * H + i_h) * C.ROWS + o_n
        b_old = tl.load(p_score, mask=m_n, other=0.0)
        b_old *= tl.exp2(new.to(tl.float32) * log2_beta)
        tl.store(p_score, b_old + b_mass, mask=m_n)


def cascade_stride_triton(
    q: torch.Tensor, state: CascadeState, batch: CascadeBatch, cos_sin: torch.Tensor, *,
    softmax: Softmax, average: AttentionAverage, out: torch.Tensor,
) -> None:  # fmt: skip
    """Rotate, launch :func:`cascade_stride_kernel`, then :func:`cascade_mass_kernel`.

    Keys are rotated for as many rows as the scratch holds at a time.
    """
    tokens, query_heads, dim = q.shape
    heads, held = state.num_heads, state.shape.rows
    each = heads * held * dim * q.element_size()
    most = min(batch.num_rows, MOST_ROWS, max(1, SCRATCH_BYTES // each))
    queries = torch.empty((tokens, query_heads, dim), dtype=q.dtype, device=q.device)
    keys = torch.empty((most, heads, held, dim), dtype=q.dtype, device=q.device)
    shift = torch.empty((tokens, query_heads), device=q.device)
    for at in range(0, batch.num_rows, most):
        rows = batch.part(at, most)
        rotate_triton(q, state, rows, cos_sin, queries=queries, keys=keys)
        _launch(queries, keys, shift, state, rows, softmax=softmax, average=average, out=out)


def _launch(
    queries: torch.Tensor, keys: torch.Tensor, shift: torch.Tensor, state: CascadeState,
    batch: CascadeBatch, *, softmax: Softmax, average: AttentionAverage, out: torch.Tensor,
) -> None:  # fmt: skip
    """Both kernels, of rotated queries and keys."""
    heads, group = state.num_heads, check_queries(queries, state)
    padded, mean = next_power_of_2(group), average.reduce == "mean"
    options = {
        "C": constants(Shape.of(state.shape)), "H": heads, "G": group, "BG": padded,
        "D": queries.shape[2], "HAS_CAP": softmax.logit_cap > 0,
    }  # fmt: skip
    held, args = StateArgs.of(state), BatchArgs.of(batch)
    rows, log2_beta = batch.num_rows * heads, math.log2(average.beta)
    log2_gain = math.log2(average.gain / group if mean else average.gain)
    tile, tokens, stages, warps = ATTEND_TILE
    cascade_stride_kernel[(triton.cdiv(batch.most_new, tile // padded), rows)](
        queries, keys, held, args, out, shift, softmax.scale_log2, softmax.logit_cap,
        log2_gain, log2_beta, BM=tile, BN=tokens, STAGES=stages, num_warps=warps, **options,
    )  # fmt: skip
    tile, tokens, stages, warps = MASS_TILE
    cascade_mass_kernel[(triton.cdiv(state.shape.rows, tokens), rows)](
        queries, keys, held, args, shift, softmax.scale_log2, softmax.logit_cap, log2_beta,
        BM=tile, BN=tokens, MEAN=mean, STAGES=stages, num_warps=warps, **options,
    )  # fmt: skip
