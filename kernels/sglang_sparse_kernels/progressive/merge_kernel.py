# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Where a row stops: what it has to do, the share at a look, and the merge up to the exact stop."""

import triton
import triton.language as tl

from ..triton_ops import cast
from .rank_kernel import forced_range


@triton.jit
def work(
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
    SPLITS: tl.constexpr,
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
    share = tl.maximum(tl.cdiv(tl.cdiv(prologue, SPLITS), BN), 1) * BN
    parts = tl.cdiv(prologue, share)
    items = parts + tl.cdiv(total - prologue, BN)
    return i_l, tail, tail_tokens, prologue, total, share, parts, items, units, listed, forced


@triton.jit
def slack_of(epsilons, i_r):
    """Share that a row may leave out; at 1 nothing may be, however small it looks."""
    epsilon = tl.load(epsilons + i_r)
    return tl.where(epsilon < 1.0, 1.0 - epsilon, -1.0)


@triton.jit
def missing(
    b_top,
    b_sum,
    b_low,
    looks,
    units,
    listed,
    forced,
    p_rest,
    steps,
    o_g,
    G: tl.constexpr,
    STEP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Estimated share of the mass that is missing at a look (PSA, algorithm 1).

    ``b_sum`` [heads] is the mass over exp2(``b_top``), ``b_low`` log2 of the smallest block's.
    """
    looks = tl.maximum(looks, 0)
    left = units - tl.minimum(forced + looks * STEP, listed)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    if UPPER:
        b_low = tl.load(p_rest + o_g * steps + looks, mask=o_g < G, other=float("-inf"))
        b_rest = tl.exp2(b_low - b_top)
    else:
        b_rest = tl.exp2(b_low - b_top) * left.to(tl.float32)
    b_part = b_rest / (b_sum + b_rest)
    # Of infinite numbers nothing is known.
    b_part = tl.where(b_part == b_part, b_part, 1.0)
    b_part = tl.where((o_g < G) & (left > 0), b_part, 0.0)
    return tl.sum(b_part) / G if MEAN else tl.max(b_part)


@triton.jit
def absent(b_l, b_m):
    """Which pieces' words are not there yet."""
    return tl.max(((b_l != b_l) | (b_m != b_m)).to(tl.int32), 1)


@triton.jit
def mass_of(b_l, b_m, b_in):
    """(log2 of the largest, sum over exp2 of it, smallest block) of the pieces in ``b_in``."""
    b_some = tl.where(b_in, b_l, float("-inf"))
    b_top = tl.max(b_some, 0)
    b_shift = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_sum = tl.sum(tl.exp2(b_some - b_shift[None, :]), 0)
    return b_top, b_sum, tl.min(tl.where(b_in, b_m, float("inf")), 0)


@triton.jit
def progressive_merge_kernel(
    seq_lens,
    tail_start,
    k_units,
    list_rows,
    ranked,
    reached,
    epsilons,
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
    H: tl.constexpr,
    G: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
):
    i_q = tl.program_id(0)
    i_rh, i_g = i_q // G, i_q % G
    STEP: tl.constexpr = BN // UNIT
    i_l, _, _, _, _, _, parts, items, units, listed, forced = work(
        seq_lens, tail_start, k_units, list_rows, ranked, i_rh // H, i_rh % H, capacity, sink,
        recent, H, UNIT, BN, SPLITS,
    )  # fmt: skip
    o_i, o_s, o_d, o_m = tl.arange(0, BI), tl.arange(0, BS), tl.arange(0, D), tl.arange(0, BM)
    slack = slack_of(epsilons, i_rh // H)
    base = i_rh.to(tl.int64) * pieces
    p_rest = rest_bounds
    if UPPER:
        p_rest += i_rh.to(tl.int64) * (G * steps)
    p_words = (base + o_i)[:, None] * G + o_s[None, :]
    m_words = (o_i < items)[:, None] & (o_s < G)[None, :]
    # [BI, BS]
    b_l = tl.load(lse + p_words, mask=m_words, other=0.0)
    b_m = tl.load(least + p_words, mask=m_words, other=0.0)
    complete = tl.min(tl.where((absent(b_l, b_m) != 0) | (o_i >= items), o_i, BI))
    b_m = tl.where((o_i >= parts)[:, None], b_m, float("inf"))
    # The share only grows, so that its first sufficient look is found by halving.
    low, stop = parts, items
    while stop - low > 1:
        middle = (low + stop) >> 1
        b_top, b_sum, b_low = mass_of(b_l, b_m, (o_i < middle)[:, None])
        part = missing(
            b_top, b_sum, b_low, middle - parts, units, listed, forced, p_rest, steps, o_s,
            G, STEP, UPPER, MEAN,
        )  # fmt: skip
        enough = (middle > complete) | (part <= slack)
        stop = tl.where(enough, middle, stop)
        low = tl.where(enough, low, middle)

    if i_g == 0:
        got = tl.minimum(forced + (stop - parts) * STEP, listed)
        tl.store(reached + i_l, got)
        if counters is not None:
            b_top, b_sum, b_low = mass_of(b_l, b_m, (o_i < stop)[:, None])
            part = missing(
                b_top, b_sum, b_low, stop - parts, units, listed, forced, p_rest, steps, o_s,
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
