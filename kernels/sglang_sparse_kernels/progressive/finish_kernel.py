# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Where a row and KV head stops, where it does at the latest, and the merge up to the stop."""

import triton
import triton.language as tl

from ..triton_ops import begin, cast
from .work_kernel import cuts, work

# Slices of what all layers share, which begin anywhere: one compiled kernel serves all.
SLICES = ["ranked", "reached", "expected", "counters"]
FAR = tl.constexpr(1 << 30)


@triton.jit
def _smaller(b_a, b_b):
    return tl.minimum(b_a, b_b)


@triton.jit
def _power(b_l, exponent):
    """exp2(b_l - exponent) for a whole ``exponent``: another one scales it and changes no bit."""
    b_whole = tl.floor(b_l)
    b_fraction = tl.where(b_l == float("-inf"), 0.0, b_l - b_whole)
    return tl.exp2(b_fraction) * tl.exp2(b_whole - exponent)


@triton.jit
def _find_stop(
    p_lse,
    p_least,
    b_next_l,
    b_next_low,
    p_rest,
    pieces,
    steps,
    there,
    parts,
    items,
    units,
    before,
    listed,
    slack,
    G: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    STEP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Look at the missing share after piece by piece, BI at a time, until it is small enough.

    ``p_lse`` and ``p_least`` point at the first BI pieces' numbers [BS, BI], ``b_next_l`` and
    ``b_next_low``.
    Returns (pieces up to the stop, the share missing there).
    """
    o_n, o_s = tl.arange(0, BI), tl.arange(0, BS)
    m_s = (o_s < G)[:, None]
    # [BS], of the pieces before
    b_top = tl.zeros((BS,), tl.float32)
    b_before = tl.zeros((BS,), tl.float32)
    b_low_before = tl.full((BS,), float("inf"), tl.float32)
    first, stop, missing = 0, items, 0.0
    searching = items >= 0
    while searching:
        o_i = first + o_n
        first += BI
        m_there = (o_i < there)[None, :]
        b_l = tl.where(m_there, b_next_l, float("-inf"))
        b_low = tl.where(m_there, b_next_low, float("inf"))
        m_w = m_s & (o_i + BI < pieces)[None, :]
        b_next_l = tl.load(p_lse + first, mask=m_w, other=float("-inf"))
        b_next_low = tl.load(p_least + first, mask=m_w, other=float("inf"))
        b_high = tl.floor(tl.max(b_l, 1))
        b_high = tl.where(b_before > 0, tl.maximum(b_top, b_high), b_high)
        b_high = tl.where(b_high == float("-inf"), 0.0, b_high)
        b_before = tl.where(b_before > 0, b_before * tl.exp2(b_top - b_high), b_before)
        b_top = b_high
        # [BS, BI]
        b_mass = _power(b_l, b_top[:, None])
        b_sum = b_before[:, None] + tl.cumsum(b_mass, 1)
        b_low = tl.minimum(b_low_before[:, None], tl.associative_scan(b_low, 1, _smaller))
        looks = tl.maximum(o_i + 1 - parts, 0)
        left = units - tl.minimum(before + looks * STEP, listed)
        if UPPER:
            p_looks = p_rest + o_s[:, None] * steps + looks[None, :]
            m_looks = m_s & (o_i < items)[None, :]
            b_rest = _power(tl.load(p_looks, mask=m_looks, other=float("-inf")), b_top[:, None])
        else:
            b_rest = _power(b_low, b_top[:, None]) * left.to(tl.float32)[None, :]
        b_part = b_rest / (b_sum + b_rest)
        # Of infinite numbers nothing is known.
        b_part = tl.where(b_part == b_part, b_part, 1.0)
        b_part = tl.where(m_s & (left > 0)[None, :], b_part, 0.0)
        # [BI]
        b_missing = tl.sum(b_part, 0) / G if MEAN else tl.max(b_part, 0)
        enough = (o_i >= parts) & (o_i < items) & (b_missing <= slack)
        stop = tl.minimum(tl.min(tl.where(enough, o_i + 1, FAR)), items)
        missing = tl.sum(tl.where(o_i == stop - 1, b_missing, 0.0))
        searching = stop > first
        if searching:
            b_before += tl.sum(b_mass, 1)
            b_low_before = tl.min(b_low, 1)
    return stop, missing


@triton.jit
def _look(
    seq_lens,
    tail_start,
    list_rows,
    reached,
    expected,
    expected_rows,
    epsilons,
    rest_bounds,
    lse,
    least,
    listed_words,
    counters,
    i_rh,
    there,
    pieces,
    steps,
    sink,
    recent,
    writes,
    H: tl.constexpr,
    G: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Estimate the missing share after each of the pieces that are ``there`` (PSA, algorithm 1).

    Returns the pieces up to the stop, more than ``there`` if it lies behind those, and the most
    there may be. What a row that stopped came to is written if ``writes``.
    """
    STEP: tl.constexpr = BN * TILES // UNIT
    base = i_rh.to(tl.int64) * pieces * G
    # [BS, BI]: a query head's looks are neighbours, so that one warp sums them. What is not
    # there yet is of an earlier step; it is loaded while the rest is on its way.
    o_s, o_n = tl.arange(0, BS), tl.arange(0, BI)
    o_w = base + o_s[:, None] * pieces + o_n[None, :]
    m_w = (o_s < G)[:, None] & (o_n < pieces)[None, :]
    b_l = tl.load(lse + o_w, mask=m_w, other=float("-inf"))
    b_low = tl.load(least + o_w, mask=m_w, other=float("inf"))
    i_r, listed = i_rh // H, tl.load(listed_words + i_rh)
    _tail, _tokens, prologue, total, units, before, _forced = work(
        seq_lens, tail_start, i_r, listed, sink, recent, UNIT, STEP
    )
    _front, _part, parts, microbatches, _tiles = cuts(prologue, total, BN, TILES, PARTS)
    items = parts + microbatches
    if AGAIN:
        # Of infinite numbers nothing is known, but what was not attended to holds no numbers.
        items = tl.minimum(items, there)
    epsilon = tl.load(epsilons + i_r)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
    i_e = tl.load(expected_rows + i_r).to(tl.int64) * H + i_rh % H
    # At 1 nothing may be left out, however small it looks.
    slack = tl.where(epsilon < 1.0, 1.0 - epsilon, -1.0)
    p_rest = None if rest_bounds is None else rest_bounds + i_rh.to(tl.int64) * (G * steps)
    # A look at what is there depends on nothing after it; one further on sees no more mass.
    stop, missing = _find_stop(
        lse + o_w, least + o_w, b_l, b_low, p_rest, pieces, steps, there, parts, items, units,
        before, listed, slack, G, BS, BI, STEP, UPPER, MEAN,
    )  # fmt: skip
    if writes & (stop <= there):
        got = tl.minimum(before + (stop - parts) * STEP, listed)
        tl.store(reached + i_l, got)
        tl.store(expected + i_e, stop - parts)
        if counters is not None:
            missing = tl.where(got < units, missing, 0.0)
            reached_ppm = ((1.0 - missing) * 1000000.0 + 0.5).to(tl.int64)
            short = (missing > slack) & (got < units)
            if listed > 0:
                # In any order and seen by no launch: without waiting for what was written.
                tl.atomic_add(counters + 0, tl.full((), 1, tl.int64), sem="relaxed")
                tl.atomic_add(counters + 1, got.to(tl.int64), sem="relaxed")
                tl.atomic_add(counters + 2, units.to(tl.int64), sem="relaxed")
                tl.atomic_add(counters + 3, reached_ppm, sem="relaxed")
                tl.atomic_add(counters + 4, short.to(tl.int64), sem="relaxed")
    return stop, items


@triton.jit
def _merge(
    partial,
    lse,
    out,
    i_rh,
    i_d,
    stop,
    pieces,
    G: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Merge the pieces before ``stop`` of a slice of the channels."""
    base = i_rh.to(tl.int64) * pieces * G
    o_m, o_s, o_d = tl.arange(0, BM), tl.arange(0, BS), i_d * BD + tl.arange(0, BD)
    m_s = (o_s < G)[:, None]
    # [BS, BM, BD], so that a thread sums pieces, rather than threads do.
    p_o = partial + base * D + (o_m[None, :] * G + o_s[:, None])[:, :, None] * D + o_d
    p_x = lse + base + o_s[:, None] * pieces + o_m[None, :]
    b_acc = tl.zeros((BS, BM, BD), tl.float32)
    b_sum = tl.zeros((BS, BM), tl.float32)
    b_top = tl.full((BS,), float("-inf"), tl.float32)
    for i_m in tl.range(0, stop, BM):
        # What lies after the stop may be no number.
        m_p = m_s & (i_m + o_m < stop)[None, :]
        b_o = tl.load(p_o + i_m * (G * D), mask=m_p[:, :, None], other=0.0)
        b_x = tl.load(p_x + i_m, mask=m_p, other=float("-inf"))
        b_high = tl.maximum(b_top, tl.floor(tl.max(b_x, 1)))
        b_whole = tl.where(b_high == float("-inf"), 0.0, b_high)
        b_scale = tl.exp2(b_top - b_whole)
        b_top = b_high
        b_mass = _power(b_x, b_whole[:, None])
        b_sum = b_sum * b_scale[:, None] + b_mass
        b_acc = b_acc * b_scale[:, None, None] + b_o * b_mass[:, :, None]
    b_out = tl.sum(b_acc, 1) / tl.sum(b_sum, 1)[:, None]
    p_out = out + (i_rh.to(tl.int64) * G + o_s)[:, None] * D + o_d[None, :]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_s)


@triton.jit(do_not_specialize_on_alignment=SLICES)
def progressive_finish_kernel(
    seq_lens,
    tail_start,
    list_rows,
    reached,
    expected,
    expected_rows,
    epsilons,
    rest_bounds,
    partial,
    lse,
    least,
    there_words,
    until_words,
    stop_words,
    listed_words,
    out,
    counters,
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
    BD: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    OUTPUT: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Find where a row and KV head stops, and merge it up to there.

    At first one program looks while others merge all that is there: much is it what was to be
    attended to. ``until_words`` then says where a row that goes on stops at the latest, were
    nothing further on of any mass, ``stop_words`` where another one stops. AGAIN, rows that went
    on, or that stop earlier, are merged up to their stop.
    """
    begin()
    i_rh, i_d = tl.program_id(0), tl.program_id(1)
    there = tl.load(there_words + i_rh)
    if AGAIN:
        until, stop = tl.load(until_words + i_rh), tl.load(stop_words + i_rh)
        if (until > there) | (stop < there):
            if until > there:
                stop, _items = _look(
                    seq_lens, tail_start, list_rows, reached, expected, expected_rows, epsilons,
                    rest_bounds, lse, least, listed_words, counters, i_rh, until, pieces, steps,
                    sink, recent, i_d == 0, H, G, BS, BI, UNIT, BN, TILES, PARTS, UPPER, MEAN, True,
                )  # fmt: skip
            if OUTPUT:
                _merge(partial, lse, out, i_rh, i_d, stop, pieces, G, BS, BM, D, BD)
    else:
        if i_d == 0:
            stop, items = _look(
                seq_lens, tail_start, list_rows, reached, expected, expected_rows, epsilons,
                rest_bounds, lse, least, listed_words, counters, i_rh, there, pieces, steps, sink,
                recent, True, H, G, BS, BI, UNIT, BN, TILES, PARTS, UPPER, MEAN, False,
            )  # fmt: skip
            # One more, lest sums that are rounded elsewhere should fall a little short there.
            latest = tl.where(stop > there, tl.minimum(stop + 1, items), there)
            tl.store(until_words + i_rh, latest)
            tl.store(stop_words + i_rh, stop)
        else:
            _merge(partial, lse, out, i_rh, i_d - 1, there, pieces, G, BS, BM, D, BD)
