# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention that stops when enough of the mass is reached.

Programs of a row and KV head take microbatches in the order of the ranking, each the next that
nobody has taken, and leave behind what the microbatch came to. Before the next one a program looks
at what is there already: if the complete beginning of the ranking has reached the share, it ends.
What others have not written yet only makes it go on, so the look needs no order between programs.
A second launch finds the exact stop from the complete numbers and merges what lies before it;
microbatches that were taken too many are left out. So the result does not depend on timing.
"""

import torch
import triton
import triton.language as tl

from ..common import group_size, next_power_of_2
from ..plan import DecodePlan
from ..triton_ops import cast, dot
from .rank_kernel import forced_range
from .types import PROLOGUE_PARTS, ProgressiveWorkspace, num_programs, padded_items

STAGES = 2
# With 8 warps the registers of a tile of 128 tokens leave room for one program a multiprocessor.
WARPS = 4
MERGE_TILE = 32
# A program ends at a share a little above the one that is asked for, so that the exact stop, found
# with other roundings, never lies after it.
CAUTION = 1 - 2.0**-7


@triton.jit
def _work(
    seq_lens,
    tail_start,
    k_units,
    list_rows,
    ranked,
    i_r,
    i_h,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What a row and KV head has to attend to: tokens in the order tail, forced, ranked units.

    Returns (list row, tail start, tokens of the tail, tokens attended to in any case, all tokens,
    tokens of a part of the former, parts, all pieces of work, units of the domain, listed, forced).
    """
    i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_h
    tail = tl.load(tail_start + i_r)
    tail_tokens = tl.load(seq_lens + i_r) - tail
    k = tl.minimum(tl.load(k_units + i_r), capacity)
    units = tl.cdiv(tail, UNIT)
    # A dense row's count is whatever its owner before left there.
    listed = tl.where(k > 0, tl.minimum(tl.load(ranked + i_l), k), 0)
    _, _, forced = forced_range(tail, sink, recent, UNIT)
    forced = tl.minimum(forced, listed)
    prologue = tail_tokens + forced * UNIT
    total = tail_tokens + listed * UNIT
    share = tl.maximum(tl.cdiv(tl.cdiv(prologue, PARTS), BN), 1) * BN
    parts = tl.cdiv(prologue, share)
    items = parts + tl.cdiv(total - prologue, BN)
    return i_l, tail, tail_tokens, prologue, total, share, parts, items, units, listed, forced


@triton.jit
def _missing(
    b_l,
    b_m,
    o_i,
    o_g,
    stop,
    parts,
    units,
    listed,
    forced,
    p_rest,
    steps,
    G: tl.constexpr,
    STEP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Estimated share of the mass after the first ``stop`` pieces of work (PSA, algorithm 1).

    ``b_l``, ``b_m`` [items, heads] are log2 of each piece's mass and of its smallest block's.
    """
    b_in = (o_i < stop)[:, None]
    b_l = tl.where(b_in, b_l, float("-inf"))
    b_top = tl.max(b_l, 0)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_sum = tl.sum(tl.exp2(b_l - b_top[None, :]), 0)
    looks = tl.maximum(stop - parts, 0)
    left = units - tl.minimum(forced + looks * STEP, listed)
    if UPPER:
        b_low = tl.load(p_rest + o_g * steps + looks, mask=o_g < G, other=float("-inf"))
        b_rest = tl.exp2(b_low - b_top)
    else:
        b_low = tl.min(tl.where(b_in & (o_i >= parts)[:, None], b_m, float("inf")), 0)
        b_rest = tl.exp2(b_low - b_top) * left.to(tl.float32)
    b_part = b_rest / (b_sum + b_rest)
    # Of infinite numbers nothing is known.
    b_part = tl.where(b_part == b_part, b_part, 1.0)
    b_part = tl.where((o_g < G) & (left > 0), b_part, 0.0)
    return tl.sum(b_part) / G if MEAN else tl.max(b_part)


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
    slack,
    resident,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_rh = tl.program_id(0)
    i_r, i_h = i_rh // H, i_rh % H
    STEP: tl.constexpr = BN // UNIT
    i_l, tail, tail_tokens, prologue, total, share, parts, items, units, listed, forced = _work(
        seq_lens, tail_start, k_units, list_rows, ranked, i_r, i_h, capacity, sink, recent,
        H, UNIT, BN, PARTS,
    )  # fmt: skip
    o_g, o_d, o_n, o_b = tl.arange(0, BG), tl.arange(0, D), tl.arange(0, BN), tl.arange(0, STEP)
    o_i, o_s = tl.arange(0, BI), tl.arange(0, BS)
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
    p_words = (base + o_i)[:, None] * G + o_s[None, :]

    item = tl.atomic_add(tickets + i_rh, 1)
    while item < items:
        # Programs that start together all have work to do before there is anything to look at.
        m_words = ((o_i < item) & (item >= resident))[:, None] & (o_s < G)[None, :]
        # [BI, BS]; volatile, so that each look sees what others wrote since the last one.
        b_l = tl.load(lse + p_words, mask=m_words, other=0.0, volatile=True)
        b_m = tl.load(least + p_words, mask=m_words, other=0.0, volatile=True)
        b_absent = tl.max(((b_l != b_l) | (b_m != b_m)).to(tl.int32), 1)
        complete = tl.min(tl.where((b_absent != 0) | (o_i >= item), o_i, BI))
        part = _missing(
            b_l, b_m, o_i, o_s, complete, parts, units, listed, forced, p_rest, steps,
            G, STEP, UPPER, MEAN,
        )  # fmt: skip
        if (item >= resident) & (complete > parts) & (part <= slack):
            item = items
        else:
            in_prologue = item < parts
            first = tl.where(in_prologue, item * share, prologue + (item - parts) * BN)
            last = tl.minimum(
                first + tl.where(in_prologue, share, BN), tl.where(in_prologue, prologue, total)
            )
            b_acc = tl.zeros((BG, D), tl.float32)
            b_max = tl.full((BG,), float("-inf"), tl.float32)
            b_sum = tl.zeros((BG,), tl.float32)
            b_least = tl.full((BG,), float("inf"), tl.float32)
            for i_n in tl.range(first, last, BN, num_stages=STAGES):
                o_t = i_n + o_n
                m_tail, m_n = o_t < tail_tokens, o_t < last
                o_l = o_t - tail_tokens
                # [BN]
                b_unit = tl.load(p_list + o_l // UNIT, mask=m_n & ~m_tail, other=0)
                b_pos = tl.where(m_tail, tail + o_t, b_unit * UNIT + o_l % UNIT)
                m_n &= m_tail | ((b_pos >= 0) & (b_pos < tail))
                # [BN]
                b_page = tl.load(p_table + b_pos // PAGE, mask=m_n, other=0).to(tl.int64)
                o_kv = ((b_page * PAGE + b_pos % PAGE) * H + i_h) * D
                # [BN, D]
                b_k = tl.load(k_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
                # [BG, BN]
                b_s = dot(b_q, tl.trans(b_k), tl.zeros((BG, BN), tl.float32))
                if HAS_CAP:
                    b_s = scale_log2 * b_s / logit_cap
                    b_s = logit_cap * (1.0 - 2.0 / (tl.exp2(2.0 * b_s) + 1.0))
                    b_s *= 1.4426950408889634
                else:
                    b_s *= scale_log2
                b_s = tl.where(m_n[None, :], b_s, float("-inf"))
                b_new = tl.maximum(b_max, tl.max(b_s, 1))
                b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
                b_p = tl.exp2(b_s - b_shift[:, None])
                b_alpha = tl.exp2(b_max - b_shift)
                b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
                b_max = b_new
                # [BG, STEP]; a microbatch is one tile, so its blocks are this tile's.
                b_mass = b_p
                if UNIT > 1:
                    b_mass = tl.sum(tl.reshape(b_p, (BG, STEP, UNIT)), 2)
                b_mass = tl.where(b_mass > 0, tl.log2(b_mass), float("-inf")) + b_shift[:, None]
                b_mass = tl.where((i_n + o_b * UNIT < last)[None, :], b_mass, float("inf"))
                b_least = tl.min(b_mass, 1)
                # [BN, D]
                b_v = tl.load(v_buffer + o_kv[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
                b_acc = dot(cast(b_p, b_v.dtype), b_v, b_acc * b_alpha[:, None])

            o_o = (base + item) * G + o_g
            b_some = tl.where(b_sum > 0, b_sum, 1.0)
            b_o = b_acc / b_some[:, None]
            tl.store(partial + o_o[:, None] * D + o_d[None, :], b_o, mask=m_g[:, None])
            b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_some), float("-inf"))
            tl.store(lse + o_o, b_lse, mask=m_g)
            tl.store(least + o_o, tl.where(in_prologue, float("inf"), b_least), mask=m_g)
            item = tl.atomic_add(tickets + i_rh, 1)


@triton.jit
def progressive_merge_kernel(
    seq_lens,
    tail_start,
    k_units,
    list_rows,
    ranked,
    reached,
    rest_bounds,
    partial,
    lse,
    least,
    out,
    counters,
    capacity,
    pieces,
    steps,
    sink,
    recent,
    slack,
    H: tl.constexpr,
    G: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    BM: tl.constexpr,
):
    i_q = tl.program_id(0)
    i_rh, i_g = i_q // G, i_q % G
    STEP: tl.constexpr = BN // UNIT
    i_l, _, _, _, _, _, parts, items, units, listed, forced = _work(
        seq_lens, tail_start, k_units, list_rows, ranked, i_rh // H, i_rh % H, capacity, sink,
        recent, H, UNIT, BN, PARTS,
    )  # fmt: skip
    o_i, o_s, o_d, o_m = tl.arange(0, BI), tl.arange(0, BS), tl.arange(0, D), tl.arange(0, BM)
    base = i_rh.to(tl.int64) * pieces
    p_rest = rest_bounds
    if UPPER:
        p_rest += i_rh.to(tl.int64) * (G * steps)
    p_words = (base + o_i)[:, None] * G + o_s[None, :]
    m_words = (o_i < items)[:, None] & (o_s < G)[None, :]
    # [BI, BS]
    b_l = tl.load(lse + p_words, mask=m_words, other=0.0)
    b_m = tl.load(least + p_words, mask=m_words, other=0.0)
    b_absent = tl.max(((b_l != b_l) | (b_m != b_m)).to(tl.int32), 1)
    complete = tl.min(tl.where((b_absent != 0) | (o_i >= items), o_i, BI))
    # The share only grows, so that its first sufficient look is found by halving.
    low, stop = parts, items
    while stop - low > 1:
        middle = (low + stop) >> 1
        part = _missing(
            b_l, b_m, o_i, o_s, middle, parts, units, listed, forced, p_rest, steps,
            G, STEP, UPPER, MEAN,
        )  # fmt: skip
        enough = (middle > complete) | (part <= slack)
        stop = tl.where(enough, middle, stop)
        low = tl.where(enough, low, middle)

    if i_g == 0:
        got = tl.minimum(forced + (stop - parts) * STEP, listed)
        tl.store(reached + i_l, got)
        if counters is not None:
            part = _missing(
                b_l, b_m, o_i, o_s, stop, parts, units, listed, forced, p_rest, steps,
                G, STEP, UPPER, MEAN,
            )  # fmt: skip
            part = tl.where(got < units, part, 0.0)
            reached_ppm = ((1.0 - part) * 1000000.0 + 0.5).to(tl.int64)
            if listed > 0:
                tl.atomic_add(counters + 0, tl.full((), 1, tl.int64))
                tl.atomic_add(counters + 1, got.to(tl.int64))
                tl.atomic_add(counters + 2, units.to(tl.int64))
                tl.atomic_add(counters + 3, reached_ppm)
                tl.atomic_add(counters + 4, ((part > slack) & (got < units)).to(tl.int64))

    p_l = lse + base * G + i_g
    b_all = tl.load(p_l + o_i * G, mask=o_i < stop, other=float("-inf"))
    top = tl.max(b_all, 0)
    total = tl.sum(tl.exp2(b_all - top), 0)
    b_out = tl.zeros((D,), tl.float32)
    for i_m in tl.range(0, stop, BM):
        m_m = i_m + o_m < stop
        # [BM]
        b_w = tl.exp2(tl.load(p_l + (i_m + o_m) * G, mask=m_m, other=float("-inf")) - top)
        # [BM, D]
        p_o = partial + ((base + i_m + o_m) * G + i_g)[:, None] * D + o_d[None, :]
        b_o = tl.load(p_o, mask=m_m[:, None], other=0.0)
        b_out += tl.sum(b_o * b_w[:, None], 0)
    tl.store(out + i_q.to(tl.int64) * D + o_d, cast(b_out / total, out.dtype.element_ty))


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
    epsilon: float,
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
    programs, resident = num_programs(rows, heads, pieces, q.device)
    steps = 0 if rest_bounds is None else rest_bounds.shape[3]
    # At 1 nothing may be left out, however small it looks.
    slack = 1.0 - epsilon if epsilon < 1 else -1.0
    common = {
        "H": heads,
        "G": group,
        "BS": next_power_of_2(group),
        "BI": padded_items(pieces),
        "D": dim,
        "UNIT": unit,
        "BN": microbatch,
        "PARTS": PROLOGUE_PARTS,
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
        slack * CAUTION if slack > 0 else slack,
        resident,
        BG=max(16, next_power_of_2(group)),
        PAGE=page_size,
        HAS_CAP=logit_cap > 0,
        STAGES=STAGES,
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
        slack,
        BM=MERGE_TILE,
        num_warps=4,
        **common,
    )
