# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention that stops when enough of the mass is reached.

What a row and KV head attends to in any case, its prologue, is cut into a part for each of the
programs that run at once. Then programs take microbatches in the order of the ranking, each the
next that nobody has taken, and leave behind what each came to. While a program works on one, it
reads what is there by then, without waiting: once the complete beginning of the ranking has reached
the share, it ends, and no more are taken. What others have not written yet only makes it go on, so
nothing depends on their order; programs that start late find nothing to take, or help a long row. A
second launch finds the exact stop from the complete numbers and merges what lies before it;
microbatches that were taken too many are left out. So the result does not depend on timing.
"""

import torch
import triton
import triton.language as tl

from ..common import group_size, next_power_of_2
from ..plan import DecodePlan
from ..triton_ops import cast, dot
from .merge_kernel import absent, missing, progressive_merge_kernel, slack_of, work
from .types import ProgressiveWorkspace, num_programs

WARPS = 4
STAGES = 2
MERGE_TILE = 32
# A program ends at a share a little above the one that is asked for, so that the exact stop, found
# with other roundings, never lies after it.
CAUTION = 1 - 2.0**-7


@triton.jit
def _advance(b_l, b_m, o_w, seen, items, parts, b_top, b_sum, b_low, BW: tl.constexpr):
    """Take words of the pieces from ``seen`` on into the state, as far as none is missing."""
    run = tl.min(tl.where((absent(b_l, b_m) != 0) | (seen + o_w >= items), o_w, BW))
    b_in = (o_w < run)[:, None]
    b_l = tl.where(b_in, b_l, float("-inf"))
    b_new = tl.maximum(b_top, tl.max(b_l, 0))
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_sum = b_sum * tl.exp2(b_top - b_shift) + tl.sum(tl.exp2(b_l - b_shift[None, :]), 0)
    b_m = tl.where(b_in & (seen + o_w >= parts)[:, None], b_m, float("inf"))
    return seen + run, b_new, b_sum, tl.minimum(b_low, tl.min(b_m, 0))


@triton.jit
def _slots(p_list, p_table, first, last, tail, tail_tokens,
           PAGE: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """(physical page, place in it, whether there is one) of a tile's tokens, [BN]."""
    o_t = first + tl.arange(0, BN)
    m_tail, m_n = o_t < tail_tokens, o_t < last
    o_l = o_t - tail_tokens
    b_unit = tl.load(p_list + o_l // UNIT, mask=m_n & ~m_tail, other=0)
    b_pos = tl.where(m_tail, tail + o_t, b_unit * UNIT + o_l % UNIT)
    m_n &= m_tail | ((b_pos >= 0) & (b_pos < tail))
    b_page = tl.load(p_table + b_pos // PAGE, mask=m_n, other=0)
    return b_page, b_pos % PAGE, m_n


@triton.jit
def _logits(b_q, b_k, m_n, scale_log2, logit_cap,
            BG: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr):  # fmt: skip
    """Logits of a tile, [BG, BN], for exp2; -inf where there is no token."""
    b_s = dot(b_q, tl.trans(b_k), tl.zeros((BG, BN), tl.float32))
    if HAS_CAP:
        b_s = scale_log2 * b_s / logit_cap
        b_s = logit_cap * (1.0 - 2.0 / (tl.exp2(2.0 * b_s) + 1.0))
        b_s *= 1.4426950408889634
    else:
        b_s *= scale_log2
    return tl.where(m_n[None, :], b_s, float("-inf"))


@triton.jit
def _leave(partial, lse, o_o, m_g, b_acc, b_max, b_sum, D: tl.constexpr):
    """Write what a piece came to; NaN stays NaN, so that nobody counts on it."""
    b_some = tl.where(b_sum > 0, b_sum, 1.0)
    b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_some), float("-inf"))
    b_lse = tl.where(b_sum == b_sum, b_lse, b_sum)
    o_d = tl.arange(0, D)
    b_o = b_acc / b_some[:, None]
    tl.store(partial + o_o[:, None] * D + o_d[None, :], b_o, mask=m_g[:, None])
    tl.store(lse + o_o, b_lse, mask=m_g)


@triton.jit
def progressive_attend_kernel(
    q,
    k_buffer,
    v_buffer,
    page_table,
    seq_lens,
    tail_start,
    k_units,
    list_rows,
    indices,
    ranked,
    epsilons,
    rest_bounds,
    partial,
    lse,
    least,
    tickets,
    stride_q,
    stride_table,
    capacity,
    pieces,
    steps,
    sink,
    recent,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    STAGES: tl.constexpr,
    CAUTION: tl.constexpr,
):
    i_rh, i_s = tl.program_id(0), tl.program_id(1)
    i_r, i_h = i_rh // H, i_rh % H
    STEP: tl.constexpr = BN // UNIT
    i_l, tail, tail_tokens, prologue, total, share, parts, items, units, listed, forced = work(
        seq_lens, tail_start, k_units, list_rows, ranked, i_r, i_h, capacity, sink, recent,
        H, UNIT, BN, SPLITS,
    )  # fmt: skip
    slack = slack_of(epsilons, i_r) * CAUTION
    o_g, o_d = tl.arange(0, BG), tl.arange(0, D)
    o_w, o_s = tl.arange(0, BW), tl.arange(0, BS)
    m_g = o_g < G
    # [BG, D]
    p_q = q + i_r.to(tl.int64) * stride_q + (i_h * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=m_g[:, None], other=0.0)
    p_table = page_table + i_r.to(tl.int64) * stride_table
    p_list = indices + i_l * capacity
    base = i_rh.to(tl.int64) * pieces
    p_rest = rest_bounds
    if UPPER:
        p_rest += i_rh.to(tl.int64) * (G * steps)

    if i_s < parts:
        part_last = tl.minimum((i_s + 1) * share, prologue)
        b_acc = tl.zeros((BG, D), tl.float32)
        b_max = tl.full((BG,), float("-inf"), tl.float32)
        b_sum = tl.zeros((BG,), tl.float32)
        for first in tl.range(i_s * share, part_last, BN, num_stages=STAGES):
            b_page, b_off, m_n = _slots(
                p_list, p_table, first, part_last, tail, tail_tokens, PAGE, UNIT, BN
            )
            o_kv = ((b_page.to(tl.int64) * PAGE + b_off) * H + i_h) * D
            # [BN, D]
            b_k = tl.load(k_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
            b_v = tl.load(v_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
            b_s = _logits(b_q, b_k, m_n, scale_log2, logit_cap, BG, BN, HAS_CAP)
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = tl.exp2(b_s - b_shift[:, None])
            b_alpha = tl.exp2(b_max - b_shift)
            b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
            b_max = b_new
            b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])
        o_o = (base + i_s) * G + o_g
        _leave(partial, lse, o_o, m_g, b_acc, b_max, b_sum, D)
        tl.store(least + o_o, tl.full((BG,), float("inf"), tl.float32), mask=m_g)

    # What the complete beginning of the ranking has come to, as far as this program has seen it.
    seen = tl.zeros((), tl.int32)
    b_top = tl.full((BS,), float("-inf"), tl.float32)
    b_mass = tl.zeros((BS,), tl.float32)
    b_low = tl.full((BS,), float("inf"), tl.float32)
    item = parts + tl.atomic_add(tickets + i_rh, 1, sem="relaxed")
    first = prologue + (item - parts) * BN
    b_page, b_off, m_n = _slots(
        p_list, p_table, first, tl.where(item < items, total, first), tail, tail_tokens, PAGE, UNIT,
        BN,
    )  # fmt: skip
    while item < items:
        o_kv = ((b_page.to(tl.int64) * PAGE + b_off) * H + i_h) * D
        # [BN, D]
        b_k = tl.load(k_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_v = tl.load(v_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        # Volatile, so that each look sees what others wrote since the last one.
        p_words = (base + seen + o_w)[:, None] * G + o_s[None, :]
        m_words = ((seen + o_w) < items)[:, None] & (o_s < G)[None, :]
        b_l = tl.load(lse + p_words, mask=m_words, other=0.0, volatile=True)
        b_m = tl.load(least + p_words, mask=m_words, other=0.0, volatile=True)
        # The next one's slots are on their way while this one is attended to.
        following = parts + tl.atomic_add(tickets + i_rh, 1, sem="relaxed")
        n_blocks = tl.cdiv(tl.minimum(total - first, BN), UNIT)
        m_this = m_n
        first = prologue + (following - parts) * BN
        b_page, b_off, m_n = _slots(
            p_list, p_table, first, tl.where(following < items, total, first), tail, tail_tokens,
            PAGE, UNIT, BN,
        )  # fmt: skip
        b_s = _logits(b_q, b_k, m_this, scale_log2, logit_cap, BG, BN, HAS_CAP)
        b_max = tl.max(b_s, 1)
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_sum = tl.sum(b_p, 1)
        # [BG, STEP]
        b_block = b_p
        if UNIT > 1:
            b_block = tl.sum(tl.reshape(b_p, (BG, STEP, UNIT)), 2)
        b_block = tl.where(b_block > 0, tl.log2(b_block), float("-inf")) + b_shift[:, None]
        o_b = tl.arange(0, STEP)
        b_least = tl.min(tl.where((o_b < n_blocks)[None, :], b_block, float("inf")), 1)
        b_acc = dot(cast(b_p, b_v.dtype), b_v, tl.zeros((BG, D), tl.float32))
        o_o = (base + item) * G + o_g
        _leave(partial, lse, o_o, m_g, b_acc, b_max, b_sum, D)
        tl.store(least + o_o, b_least, mask=m_g)
        seen, b_top, b_mass, b_low = _advance(
            b_l, b_m, o_w, seen, items, parts, b_top, b_mass, b_low, BW
        )
        part = missing(
            b_top, b_mass, b_low, seen - parts, units, listed, forced, p_rest, steps, o_s,
            G, STEP, UPPER, MEAN,
        )  # fmt: skip
        enough = (seen > parts) & (part <= slack)
        if enough:
            tl.atomic_add(tickets + i_rh, 1 << 20, sem="relaxed")
        item = tl.where(enough, items, following)


def progressive_decode_attention_triton(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    ranked: torch.Tensor,
    reached: torch.Tensor,
    *,
    unit: int,
    page_size: int,
    sink: int,
    recent: int,
    microbatch: int,
    epsilons: torch.Tensor,
    share: str,
    rest_bounds: torch.Tensor | None,
    sm_scale: float,
    logit_cap: float,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    workspace: ProgressiveWorkspace,
) -> None:
    """Launch :func:`progressive_attend_kernel`, then :func:`progressive_merge_kernel`."""
    rows, query_heads, dim = q.shape
    heads = k_buffer.shape[1]
    group = group_size(query_heads, heads)
    capacity, pieces = indices.shape[2], workspace.lse.shape[2]
    microbatches = -(-capacity * unit // microbatch)
    programs, resident = num_programs(rows, heads, q.device)
    steps = 0 if rest_bounds is None else rest_bounds.shape[3]
    common = {
        "H": heads,
        "G": group,
        "BS": next_power_of_2(group),
        "D": dim,
        "UNIT": unit,
        "BN": microbatch,
        "SPLITS": resident,
        "UPPER": rest_bounds is not None,
        "MEAN": share == "mean",
    }
    progressive_attend_kernel[(rows * heads, programs)](
        q,
        k_buffer,
        v_buffer,
        plan.page_table,
        plan.seq_lens,
        plan.tail_start,
        plan.k_units,
        plan.list_rows,
        indices,
        ranked,
        epsilons,
        rest_bounds,
        workspace.partial,
        workspace.lse,
        workspace.least,
        workspace.tickets,
        q.stride(0),
        plan.page_table.stride(0),
        capacity,
        pieces,
        steps,
        sink,
        recent,
        sm_scale * 1.4426950408889634,
        logit_cap,
        BG=max(16, next_power_of_2(group)),
        # Each word is read by one thread: threads that read the same word may see it at different
        # times, and would part ways.
        BW=max(32 * WARPS // next_power_of_2(group), next_power_of_2(2 * resident)),
        PAGE=page_size,
        HAS_CAP=logit_cap > 0,
        STAGES=STAGES,
        CAUTION=CAUTION,
        num_warps=WARPS,
        **common,
    )
    progressive_merge_kernel[(rows * query_heads,)](
        plan.seq_lens,
        plan.tail_start,
        plan.k_units,
        plan.list_rows,
        ranked,
        reached,
        epsilons,
        rest_bounds,
        workspace.partial,
        workspace.lse,
        workspace.least,
        out,
        counters,
        capacity,
        pieces,
        steps,
        sink,
        recent,
        BI=next_power_of_2(resident + microbatches),
        BM=MERGE_TILE,
        num_warps=4,
        **common,
    )
