# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Where a row and KV head stops, what is left to attend to until then, and the merge up to it."""

import triton
import triton.language as tl

from ..triton_ops import cast
from .work_kernel import attend_tiles, cuts, work


@triton.jit
def _joined(b_top, b_sum, b_low, b_other_top, b_other_sum, b_other_low):
    """Mass and smallest block of two runs of pieces."""
    b_new = tl.maximum(b_top, b_other_top)
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_sum = b_sum * tl.exp2(b_top - b_shift) + b_other_sum * tl.exp2(b_other_top - b_shift)
    return b_new, b_sum, tl.minimum(b_low, b_other_low)


@triton.jit
def _look(
    p_lse,
    p_least,
    p_rest,
    slack,
    there,
    parts,
    items,
    units,
    listed,
    forced,
    steps,
    G: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    STEP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Estimate the missing share after each of the pieces that are there (PSA, algorithm 1).

    Returns (pieces up to the stop, or -1 if it lies further on; those up to it if what lies further
    on had no mass; missing share there; of each head, log2 of the largest piece's mass up to there,
    and their mass over exp2 of it). A look sees only what lies before it, so none of those that
    count depends on how many pieces are there.
    """
    o_i, o_s = tl.arange(0, BI), tl.arange(0, BS)
    o_w = o_i[:, None] * G + o_s[None, :]
    m_w = (o_i < there)[:, None] & (o_s < G)[None, :]
    # [BI, BS]
    b_l = tl.load(p_lse + o_w, mask=m_w, other=float("-inf"))
    b_low = tl.load(p_least + o_w, mask=m_w, other=float("inf"))
    b_one = tl.where(b_l == float("-inf"), 0.0, 1.0)
    b_top, b_sum, b_low = tl.associative_scan((b_l, b_one, b_low), 0, _joined)
    looks = tl.maximum(o_i + 1 - parts, 0)
    left = units - tl.minimum(forced + looks * STEP, listed)
    b_shift = tl.where(b_top == float("-inf"), 0.0, b_top)
    if UPPER:
        p_bound = p_rest + o_s[None, :] * steps + looks[:, None]
        m_bound = (o_i < items)[:, None] & (o_s < G)[None, :]
        b_rest = tl.exp2(tl.load(p_bound, mask=m_bound, other=float("-inf")) - b_shift)
    else:
        b_rest = tl.exp2(b_low - b_shift) * left.to(tl.float32)[:, None]
    b_part = b_rest / (b_sum + b_rest)
    # Of infinite numbers nothing is known.
    b_part = tl.where(b_part == b_part, b_part, 1.0)
    b_part = tl.where((o_s < G)[None, :] & (left > 0)[:, None], b_part, 0.0)
    # [BI]
    b_missing = tl.sum(b_part, 1) / G if MEAN else tl.max(b_part, 1)
    enough = (o_i >= parts) & (o_i < items) & (b_missing <= slack)
    stop = tl.min(tl.where(enough & (o_i < there), o_i + 1, BI + 1))
    guess = tl.min(tl.where(enough & (o_i >= there), o_i + 1, items))
    stop = tl.where(stop > BI, tl.where(there < items, -1, items), stop)
    at = o_i == stop - 1
    missing = tl.sum(tl.where(at, b_missing, 0.0))
    top = tl.sum(tl.where(at[:, None], b_top, 0.0), 0)
    return stop, guess, missing, top, tl.sum(tl.where(at[:, None], b_sum, 0.0), 0)


@triton.jit
def _slack(epsilons, i_r):
    """Share that a row may leave out; at 1 nothing may be, however small it looks."""
    epsilon = tl.load(epsilons + i_r)
    return tl.where(epsilon < 1.0, 1.0 - epsilon, -1.0)


@triton.jit
def _conclude(
    stop,
    missing,
    b_top,
    b_sum,
    slack,
    reached,
    expected,
    expected_rows,
    partial,
    p_lse,
    out,
    counters,
    i_rh,
    i_l,
    base,
    parts,
    units,
    listed,
    forced,
    H: tl.constexpr,
    G: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write where a row and KV head stopped, count it, and merge the pieces up to there."""
    got = tl.minimum(forced + (stop - parts) * STEP, listed)
    tl.store(reached + i_l, got)
    i_e = tl.load(expected_rows + i_rh // H).to(tl.int64) * H + i_rh % H
    tl.store(expected + i_e, stop - parts)
    if counters is not None:
        missing = tl.where(got < units, missing, 0.0)
        reached_ppm = ((1.0 - missing) * 1000000.0 + 0.5).to(tl.int64)
        if listed > 0:
            tl.atomic_add(counters + 0, tl.full((), 1, tl.int64))
            tl.atomic_add(counters + 1, got.to(tl.int64))
            tl.atomic_add(counters + 2, units.to(tl.int64))
            tl.atomic_add(counters + 3, reached_ppm)
            tl.atomic_add(counters + 4, ((missing > slack) & (got < units)).to(tl.int64))
    o_m, o_s, o_d = tl.arange(0, BM), tl.arange(0, BS), tl.arange(0, D)
    m_s = o_s < G
    # [BM, BS, D]
    b_acc = tl.zeros((BM, BS, D), tl.float32)
    for i_m in tl.range(0, stop, BM):
        o_w = (i_m + o_m)[:, None] * G + o_s[None, :]
        m_w = (i_m + o_m < stop)[:, None] & m_s[None, :]
        b_w = tl.exp2(tl.load(p_lse + o_w, mask=m_w, other=float("-inf")) - b_top[None, :])
        p_o = partial + base * (G * D) + o_w[:, :, None] * D + o_d[None, None, :]
        b_acc += tl.load(p_o, mask=m_w[:, :, None], other=0.0) * b_w[:, :, None]
    b_out = tl.sum(b_acc, 0) / b_sum[:, None]
    p_out = out + (i_rh.to(tl.int64) * G + o_s)[:, None] * D + o_d[None, :]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_s[:, None])


@triton.jit
def progressive_look_kernel(
    seq_lens,
    tail_start,
    k_units,
    list_rows,
    ranked,
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
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    GROWTH: tl.constexpr,
    FEW: tl.constexpr,
):
    i_rh = tl.program_id(0)
    STEP: tl.constexpr = BN * TILES // UNIT
    there = tl.load(there_words + i_rh)
    i_l, _, _, prologue, total, units, listed, forced = work(
        seq_lens, tail_start, k_units, list_rows, ranked, i_rh, capacity, sink, recent, H, UNIT
    )
    _, _, parts, microbatches, _ = cuts(prologue, total, BN, TILES, PARTS)
    items = parts + microbatches
    slack = _slack(epsilons, i_rh // H)
    base = i_rh.to(tl.int64) * pieces
    p_lse, p_rest = lse + base * G, rest_bounds
    if UPPER:
        p_rest += i_rh.to(tl.int64) * (G * steps)
    stop, guess, missing, b_top, b_sum = _look(
        p_lse, least + base * G, p_rest, slack, there, parts, items, units, listed, forced, steps,
        G, BS, BI, STEP, UPPER, MEAN,
    )  # fmt: skip
    # Units further on that all had the least mass so far would end the row a little earlier.
    more = (guess - there).to(tl.float32) * (1.0 - tl.maximum(slack, 0.0))
    until = there + tl.maximum(tl.ceil(more).to(tl.int32), 1)
    until = tl.minimum(until, parts + GROWTH * tl.maximum(there - parts, FEW))
    tl.store(until_words + i_rh, tl.where(stop < 0, tl.minimum(until, items), there))
    if stop >= 0:
        _conclude(
            stop, missing, b_top, b_sum, slack, reached, expected, expected_rows, partial, p_lse,
            out, counters, i_rh, i_l, base, parts, units, listed, forced, H, G, BS, BM, D, STEP,
        )  # fmt: skip


@triton.jit
def progressive_finish_kernel(
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
    out,
    counters,
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
    BI: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPPER: tl.constexpr,
    MEAN: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_rh = tl.program_id(0)
    there = tl.load(until_words + i_rh)
    if there > tl.load(there_words + i_rh):
        STEP: tl.constexpr = BN * TILES // UNIT
        i_l, tail, tail_tokens, prologue, total, units, listed, forced = work(
            seq_lens, tail_start, k_units, list_rows, ranked, i_rh, capacity, sink, recent, H, UNIT
        )
        front, _, parts, microbatches, tiles = cuts(prologue, total, BN, TILES, PARTS)
        items = parts + microbatches
        slack = _slack(epsilons, i_rh // H)
        base = i_rh.to(tl.int64) * pieces
        p_lse, p_least, p_rest = lse + base * G, least + base * G, rest_bounds
        if UPPER:
            p_rest += i_rh.to(tl.int64) * (G * steps)
        stop, _guess, missing, b_top, b_sum = _look(
            p_lse, p_least, p_rest, slack, there, parts, items, units, listed, forced, steps,
            G, BS, BI, STEP, UPPER, MEAN,
        )  # fmt: skip
        chunk = CHUNK
        while stop < 0:
            until = tl.minimum(there + chunk, items)
            attend_tiles(
                q, k_buffer, v_buffer, page_table, indices, partial, lse, least, i_rh, i_l,
                front + (there - parts) * TILES,
                tl.minimum(front + (until - parts) * TILES, tiles),
                tail, tail_tokens, prologue, total, stride_q, stride_table, capacity, pieces,
                scale_log2, logit_cap, H, G, BG, D, PAGE, UNIT, BN, TILES, PARTS, HAS_CAP, STAGES,
            )  # fmt: skip
            # Other threads of this program wrote what is looked at next.
            tl.debug_barrier()
            there = until
            chunk *= 2
            stop, _guess, missing, b_top, b_sum = _look(
                p_lse, p_least, p_rest, slack, there, parts, items, units, listed, forced, steps,
                G, BS, BI, STEP, UPPER, MEAN,
            )  # fmt: skip
        _conclude(
            stop, missing, b_top, b_sum, slack, reached, expected, expected_rows, partial, p_lse,
            out, counters, i_rh, i_l, base, parts, units, listed, forced, H, G, BS, BM, D, STEP,
        )  # fmt: skip
