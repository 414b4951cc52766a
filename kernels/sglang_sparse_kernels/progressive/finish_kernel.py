# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Stop checks, which find where a row and KV head stops, and the merge of its chunks up to it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton_ops import begin, cast
from .work_kernel import chunk_plan, row_plan

# These are slices of buffers for all layers and may begin at any address. One compiled kernel
# serves all of them.
SLICES = ["ranked", "reached", "expected", "counters"]
NEVER = tl.constexpr(1 << 30)


class Checks(NamedTuple):
    """Constants of the stop checks, BC at once, and of the merge of BM chunks, BD channels each.

    BOUNDED says that bounds of the residual mass are given, MEAN that a group's share is the mean.
    """

    BG: int
    BC: int
    BM: int
    BD: int
    BOUNDED: bool
    MEAN: bool


class Progress(NamedTuple):
    """Progress of each row and KV head (:class:`ProgressiveWorkspace`)."""

    attended: torch.Tensor
    extended: torch.Tensor
    stop: torch.Tensor
    candidates: torch.Tensor


@triton.jit
def _smaller(b_a, b_b):
    return tl.minimum(b_a, b_b)


@triton.jit
def _exp2_from(b_l, exponent):
    """exp2(b_l - exponent) for an integer ``exponent``, which scales it without rounding."""
    b_whole = tl.floor(b_l)
    b_fraction = tl.where(b_l == float("-inf"), 0.0, b_l - b_whole)
    return tl.exp2(b_fraction) * tl.exp2(b_whole - exponent)


@triton.jit
def _find_stop(
    p_lse,
    p_min,
    b_next_l,
    b_next_min,
    p_residual,
    held,
    checks_held,
    attended,
    first_chunks,
    chunks,
    units,
    first_units,
    candidates,
    allowed,
    L: tl.constexpr,
    C: tl.constexpr,
):
    """Estimate the missing share after each chunk, BC of them at a time, until it is small enough.

    ``p_lse`` and ``p_min`` point at the numbers of the first BC chunks [BG, BC]; ``b_next_l`` and
    ``b_next_min`` are those numbers.

    Returns:
        (chunks up to the stop, the share missing there).
    """
    o_n, o_g = tl.arange(0, C.BC), tl.arange(0, C.BG)
    m_g = (o_g < L.G)[:, None]
    # [BG], of the chunks before
    b_top = tl.zeros((C.BG,), tl.float32)
    b_before = tl.zeros((C.BG,), tl.float32)
    b_min_before = tl.full((C.BG,), float("inf"), tl.float32)
    first, stop, missing = 0, chunks, 0.0
    searching = chunks >= 0
    while searching:
        o_i = first + o_n
        first += C.BC
        m_attended = (o_i < attended)[None, :]
        b_l = tl.where(m_attended, b_next_l, float("-inf"))
        b_min = tl.where(m_attended, b_next_min, float("inf"))
        m_w = m_g & (o_i + C.BC < held)[None, :]
        b_next_l = tl.load(p_lse + first, mask=m_w, other=float("-inf"))
        b_next_min = tl.load(p_min + first, mask=m_w, other=float("inf"))
        b_high = tl.floor(tl.max(b_l, 1))
        b_high = tl.where(b_before > 0, tl.maximum(b_top, b_high), b_high)
        b_high = tl.where(b_high == float("-inf"), 0.0, b_high)
        b_before = tl.where(b_before > 0, b_before * tl.exp2(b_top - b_high), b_before)
        b_top = b_high
        # [BG, BC]
        b_mass = _exp2_from(b_l, b_top[:, None])
        b_sum = b_before[:, None] + tl.cumsum(b_mass, 1)
        b_min = tl.minimum(b_min_before[:, None], tl.associative_scan(b_min, 1, _smaller))
        check = tl.maximum(o_i + 1 - first_chunks, 0)
        left = units - tl.minimum(
            first_units + check * (L.BN * L.BATCH_TILES // L.UNIT), candidates
        )
        if C.BOUNDED:
            p_check = p_residual + o_g[:, None] * checks_held + check[None, :]
            m_check = m_g & (o_i < chunks)[None, :]
            b_bound = tl.load(p_check, mask=m_check, other=float("-inf"))
            b_residual = _exp2_from(b_bound, b_top[:, None])
        else:
            b_residual = _exp2_from(b_min, b_top[:, None]) * left.to(tl.float32)[None, :]
        b_part = b_residual / (b_sum + b_residual)
        # NaN comes from infinite masses: the rest counts as unread.
        b_part = tl.where(b_part == b_part, b_part, 1.0)
        b_part = tl.where(m_g & (left > 0)[None, :], b_part, 0.0)
        # [BC]
        b_missing = tl.sum(b_part, 0) / L.G if C.MEAN else tl.max(b_part, 0)
        enough = (o_i >= first_chunks) & (o_i < chunks) & (b_missing <= allowed)
        stop = tl.minimum(tl.min(tl.where(enough, o_i + 1, NEVER)), chunks)
        missing = tl.sum(tl.where(o_i == stop - 1, b_missing, 0.0))
        searching = stop > first
        if searching:
            b_before += tl.sum(b_mass, 1)
            b_min_before = tl.min(b_min, 1)
    return stop, missing


@triton.jit
def check_stop(
    rows,
    windows,
    out,
    reached,
    expected,
    request_slots,
    epsilons,
    residual,
    checks_held,
    candidate_counts,
    counters,
    i_rh,
    attended,
    writes,
    L: tl.constexpr,
    C: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Find where a row and KV head stops, of which ``attended`` chunks are done (algorithm 1).

    If ``writes`` is set and the row has stopped, its results are written.

    Returns:
        (chunks up to the stop, more than ``attended`` if it lies behind those; all chunks).
    """
    base = i_rh.to(tl.int64) * out.held * L.G
    # [BG, BC]: a query head's chunks are neighbours, so that one warp sums them. Chunks that were
    # not attended to still hold numbers of an earlier step. All are loaded, before it is known
    # which.
    o_g, o_n = tl.arange(0, C.BG), tl.arange(0, C.BC)
    o_w = base + o_g[:, None] * out.held + o_n[None, :]
    m_w = (o_g < L.G)[:, None] & (o_n < out.held)[None, :]
    b_l = tl.load(out.lse + o_w, mask=m_w, other=float("-inf"))
    b_min = tl.load(out.min_block + o_w, mask=m_w, other=float("inf"))
    i_r, candidates = i_rh // L.H, tl.load(candidate_counts + i_rh)
    _tail, _tokens, prologue, total, units, first_units, _forced = row_plan(
        rows, windows, i_rh, candidates, L
    )
    _first_tiles, _chunk_tiles, first_chunks, batches, _tiles = chunk_plan(prologue, total, L)
    chunks = first_chunks + batches
    if AGAIN:
        # With NaN no check may end the row; only chunks that were attended to hold results.
        chunks = tl.minimum(chunks, attended)
    epsilon = tl.load(epsilons + i_r)
    i_l = tl.load(rows.list_rows + i_r).to(tl.int64) * L.H + i_rh % L.H
    i_e = tl.load(request_slots + i_r).to(tl.int64) * L.H + i_rh % L.H
    # At 1 nothing may be left out, however small it looks.
    allowed = tl.where(epsilon < 1.0, 1.0 - epsilon, -1.0)
    p_residual = None if residual is None else residual + i_rh.to(tl.int64) * (L.G * checks_held)
    # A check depends on nothing after its chunk; one after ``attended`` chunks sees no more mass.
    stop, missing = _find_stop(
        out.lse + o_w, out.min_block + o_w, b_l, b_min, p_residual, out.held, checks_held, attended,
        first_chunks, chunks, units, first_units, candidates, allowed, L, C,
    )  # fmt: skip
    if writes & (stop <= attended):
        got = first_units + (stop - first_chunks) * (L.BN * L.BATCH_TILES // L.UNIT)
        got = tl.minimum(got, candidates)
        tl.store(reached + i_l, got)
        tl.store(expected + i_e, stop - first_chunks)
        if counters is not None:
            missing = tl.where(got < units, missing, 0.0)
            reached_ppm = ((1.0 - missing) * 1000000.0 + 0.5).to(tl.int64)
            short = (missing > allowed) & (got < units)
            if candidates > 0:
                # No launch reads these counters, so relaxed atomics suffice.
                tl.atomic_add(counters + 0, tl.full((), 1, tl.int64), sem="relaxed")
                tl.atomic_add(counters + 1, got.to(tl.int64), sem="relaxed")
                tl.atomic_add(counters + 2, units.to(tl.int64), sem="relaxed")
                tl.atomic_add(counters + 3, reached_ppm, sem="relaxed")
                tl.atomic_add(counters + 4, short.to(tl.int64), sem="relaxed")
    return stop, chunks


@triton.jit
def merge_chunks(chunks, out, i_rh, i_d, stop, L: tl.constexpr, C: tl.constexpr):
    """Merge the chunks before ``stop`` of a slice of the channels."""
    base = i_rh.to(tl.int64) * chunks.held * L.G
    o_m, o_g, o_d = tl.arange(0, C.BM), tl.arange(0, C.BG), i_d * C.BD + tl.arange(0, C.BD)
    m_g = (o_g < L.G)[:, None]
    # [BG, BM, BD], so that a thread sums chunks, rather than threads do.
    o_o = (o_m[None, :] * L.G + o_g[:, None])[:, :, None] * L.D
    p_o = chunks.partial + base * L.D + o_o + o_d
    p_x = chunks.lse + base + o_g[:, None] * chunks.held + o_m[None, :]
    b_acc = tl.zeros((C.BG, C.BM, C.BD), tl.float32)
    b_sum = tl.zeros((C.BG, C.BM), tl.float32)
    b_top = tl.full((C.BG,), float("-inf"), tl.float32)
    for i_m in tl.range(0, stop, C.BM):
        # Chunks after the stop may hold NaN.
        m_p = m_g & (i_m + o_m < stop)[None, :]
        b_o = tl.load(p_o + i_m * (L.G * L.D), mask=m_p[:, :, None], other=0.0)
        b_x = tl.load(p_x + i_m, mask=m_p, other=float("-inf"))
        b_high = tl.maximum(b_top, tl.floor(tl.max(b_x, 1)))
        b_whole = tl.where(b_high == float("-inf"), 0.0, b_high)
        b_scale = tl.exp2(b_top - b_whole)
        b_top = b_high
        b_mass = _exp2_from(b_x, b_whole[:, None])
        b_sum = b_sum * b_scale[:, None] + b_mass
        b_acc = b_acc * b_scale[:, None, None] + b_o * b_mass[:, :, None]
    b_out = tl.sum(b_acc, 1) / tl.sum(b_sum, 1)[:, None]
    p_out = out + (i_rh.to(tl.int64) * L.G + o_g)[:, None] * L.D + o_d[None, :]
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_g)


@triton.jit(do_not_specialize_on_alignment=SLICES)
def progressive_finish_kernel(
    rows,
    windows,
    chunks,
    progress,
    reached,
    expected,
    request_slots,
    epsilons,
    residual,
    checks_held,
    out,
    counters,
    L: tl.constexpr,
    C: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Find where a row and KV head stops, and merge its chunks up to the stop.

    In the first launch one program does the stop checks, while others merge all chunks that were
    attended to, which mostly end near the stop. For a row that goes on, the check finds the latest
    point where it can stop: where it would stop if no further unit held any mass. In the second
    launch rows that went on are checked again. They and the rows that stopped earlier than expected
    are merged up to their stop.
    """
    begin()
    i_rh, i_d = tl.program_id(0), tl.program_id(1)
    attended = tl.load(progress.attended + i_rh)
    if AGAIN:
        extended, stop = tl.load(progress.extended + i_rh), tl.load(progress.stop + i_rh)
        if (extended > attended) | (stop < attended):
            if extended > attended:
                stop, _chunks = check_stop(
                    rows, windows, chunks, reached, expected, request_slots, epsilons, residual,
                    checks_held, progress.candidates, counters, i_rh, extended, i_d == 0, L, C,
                    True,
                )  # fmt: skip
            if L.OUTPUT:
                merge_chunks(chunks, out, i_rh, i_d, stop, L, C)
    else:
        if i_d == 0:
            stop, most = check_stop(
                rows, windows, chunks, reached, expected, request_slots, epsilons, residual,
                checks_held, progress.candidates, counters, i_rh, attended, True, L, C, False,
            )  # fmt: skip
            # One more, lest sums that are rounded elsewhere should fall a little short there.
            latest = tl.where(stop > attended, tl.minimum(stop + 1, most), attended)
            tl.store(progress.extended + i_rh, latest)
            tl.store(progress.stop + i_rh, stop)
        else:
            # Compiled even where no program gets here.
            if L.OUTPUT:
                merge_chunks(chunks, out, i_rh, i_d - 1, attended, L, C)
