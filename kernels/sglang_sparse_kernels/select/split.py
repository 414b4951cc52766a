# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Exact top-k of few rows: several programs split each, so that one request fills the device.

No program waits for another. In the first launch each program finds a threshold: a score that at
least k units reach, and not many more. It finds it from the block maxima, or from the units of a
short row. It then lists its split's candidates, the units that reach the threshold. In the second
launch each program searches all candidates for the k-th best, and writes its split's winners behind
those of the splits before it. There may be too many candidates, where the best units lie close
together or are equal, or too few, where a sample misled. One program then takes the row and reads
it some four times.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..device import multiprocessors
from ..records import BLOCK_UNITS, Lists, Scores
from ..triton_ops import FLOAT32_MAX, begin, constants, overlapping
from .one_program import take_streamed
from .search import (
    Domain,
    Held,
    count_reaching,
    forced_of,
    free_range,
    key_of,
    load_units,
    log_ratio,
    probe,
    rankable,
    row_budget,
    score_of,
    search_winners,
)
from .types import MAX_CANDIDATES, MAX_PROGRAMS, MAX_SPLITS, TopkWorkspace

# Sizes and warps were measured on one H200.
MAX_BLOCKS = 16384
WHOLE_UNITS = 16384  # longer rows are held as block maxima
TILE_UNITS, VECTOR = 2048, 4
CHUNK = 32
# The candidates of all splits are searched if they are at most eight times the budget.
LEAST_BUDGET, MOST_BUDGET = 128, 2048
WRITE_UNITS = 512
CANDIDATES_WARPS = WINNERS_WARPS = 8
FALLBACK_UNITS = 4096

# Columns of a row's state: the key of its threshold; then, for each split, its candidates' number.
THRESHOLD, CANDIDATES = tl.constexpr(0), tl.constexpr(8)


class Split(NamedTuple):
    """Constants: SPLITS programs share a row, STRIDE candidates each may list, CHUNK a chunk.

    TILE units are read at a time, VECTOR of them by a thread; WRITE winners are written at a time.
    BLOCKS block maxima or UNITS units are held to find a threshold, SLOTS candidates to find the
    winners, FALLBACK units where one program takes the row.
    """

    SPLITS: int
    STRIDE: int
    CHUNK: int
    TILE: int
    VECTOR: int
    WRITE: int
    BLOCKS: int
    UNITS: int
    SLOTS: int
    FALLBACK: int


def num_splits(row_heads: int, width: int, capacity: int, device: torch.device) -> int:
    """Programs that share a row and KV head, a power of two; 0 if rows are not split."""
    fill = min(multiprocessors(device), MAX_PROGRAMS) // row_heads
    if fill < 2 or width <= WHOLE_UNITS or capacity > MOST_BUDGET:
        return 0
    return min(MAX_SPLITS, next_power_of_2(fill + 1) // 2)


@triton.jit
def _threshold(p_s, n, free, k, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """(a threshold: a score that at least k of n scores reach; whether far more reach it).

    Far more reach it only where many scores are equal. The threshold is -inf if fewer than k scores
    are above -inf. ``SIZE`` scores are held in registers. Of a longer row blocks at equal distances
    are sampled, and fewer than k of its scores may reach the threshold.
    """
    step = tl.cdiv(tl.cdiv(n, BLOCK), SIZE // BLOCK)
    o_b = tl.arange(0, SIZE // BLOCK) * step
    b_s, _ = load_units(p_s, o_b, o_b * BLOCK < n, n, free, BLOCK, WHOLE)
    forced = forced_of(free, n) // step
    # Neighbours are alike, so four count as one draw. The margin is three standard deviations.
    expected = k.to(tl.float32) / step
    k = tl.ceil(expected + 6.0 * tl.sqrt(expected * (1.0 - 1.0 / step))).to(tl.int32)
    # A few candidates more cost less than a closer threshold, so twelve guesses are enough.
    # kth_best would go on until equal scores are told apart, which takes 3 of 10 µs.
    enough = k + k // 16
    low = tl.min(tl.where(b_s > float("-inf"), b_s, FLOAT32_MAX))
    low = tl.minimum(low, FLOAT32_MAX)
    high = tl.max(tl.where(b_s < float("inf"), b_s, float("-inf")))
    count_lo = count_reaching(b_s, low, SIZE)
    lo = key_of(low)
    hi = tl.where((forced < k) & (count_lo > enough), key_of(high), lo)
    weight_lo = tl.abs(log_ratio(count_lo, k))
    weight_hi = tl.abs(log_ratio(forced, k))
    side = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while (lo < hi) & (step < 12):
        middle = probe(lo, hi, weight_lo, weight_hi, step)
        count = count_reaching(b_s, score_of(middle), SIZE)
        weight = tl.abs(log_ratio(count, k))
        up = count >= k
        moved = tl.where(up, 1, -1)
        stale = tl.where(moved == side, 0.5, 1.0)
        weight_lo = tl.where(up, weight, weight_lo * stale)
        weight_hi = tl.where(up, weight_hi * stale, weight)
        count_lo = tl.where(up, count, count_lo)
        lo = tl.where(up, middle, lo)
        hi = tl.where(up, hi, middle - 1)
        hi = tl.where(up & (count <= enough), lo, hi)
        side = moved
        step += 1
    return tl.where(count_lo < k, float("-inf"), score_of(lo)), count_lo > k + k // 2


@triton.jit
def _load_tile(
    p_scores, start, end, n, BT: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr
):
    """(scores, units) [BT / VECTOR, VECTOR] from ``start`` on; undefined from ``end`` on."""
    o_u = start + tl.arange(0, BT // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Splits begin and end with a block, and a row's last block may be readable whole.
    m_u = (start + tl.arange(0, BT // VECTOR) * VECTOR < end)[:, None]
    if not WHOLE:
        m_u &= o_u < n
    return tl.load(p_scores + o_u, mask=m_u, other=float("-inf")), o_u


@triton.jit
def candidates_kernel(
    scores,
    block_max,
    candidate_scores,
    candidate_units,
    state,
    domain,
    list_rows,
    out_counts,
    width,
    blocks,
    S: tl.constexpr,
    P: tl.constexpr,
):
    """List a split's candidates: units that reach a threshold which at least k units reach."""
    begin()
    i_rh, i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(0) // S.H, tl.program_id(1)
    # All that is needed of the row's plan is loaded at once, so that no load waits for another.
    reselected, tokens, n, k = row_budget(domain, S)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * S.H + i_rh % S.H
    if reselected:
        if i_s == 0:
            tl.store(out_counts + i_l, k)
        if k > 0:
            free = free_range(domain, tokens, n, S.UNIT)
            p_scores = scores + i_rh * width
            p_max = block_max + i_rh * blocks
            share = tl.cdiv(tl.cdiv(n, P.SPLITS), S.BLOCK) * S.BLOCK
            first = i_s * share
            last = tl.minimum(first + share, n)
            # This split's units are on their way while the threshold is searched.
            b_next, o_next = _load_tile(p_scores, first, last, n, P.TILE, P.VECTOR, S.WHOLE)
            count = tl.cdiv(n, S.BLOCK)
            if (n <= P.UNITS) & (count < 2 * k):
                threshold, tied = _threshold(p_scores, n, free, k, P.UNITS, S.BLOCK, S.WHOLE)
            else:
                below, end = free
                below = tl.cdiv(below, S.BLOCK)
                # Without forced recent units the whole last block competes.
                free_blocks = (below, tl.where(end < n, end // S.BLOCK, count))
                if count <= P.BLOCKS // 4:
                    threshold, tied = _threshold(
                        p_max, count, free_blocks, k, P.BLOCKS // 4, S.BLOCK, True
                    )
                else:
                    threshold, tied = _threshold(
                        p_max, count, free_blocks, k, P.BLOCKS, S.BLOCK, True
                    )
            base = (i_rh * P.SPLITS + i_s) * P.STRIDE
            # Units that reach the threshold before this split, as far as k of them.
            before = tl.full((), 0, tl.int32)
            i_t = tl.full((), 0, tl.int32)
            while tied & (i_t < first) & (before < k):
                b_s, o_u = _load_tile(p_scores, i_t, first, n, P.TILE, P.VECTOR, S.WHOLE)
                b_s = rankable(b_s, o_u, free, first)
                before += tl.sum(((b_s >= threshold) & (o_u < first)).to(tl.int32))
                i_t += P.TILE
            found = tl.full((), 0, tl.int32)
            for i_t in range(first, last, P.TILE):
                b_s, o_u = rankable(b_next, o_next, free, n), o_next
                b_next, o_next = _load_tile(
                    p_scores, i_t + P.TILE, last, n, P.TILE, P.VECTOR, S.WHOLE
                )
                # [TILE / VECTOR, VECTOR]
                # Once k units have reached the threshold, a later score that equals it cannot win.
                b_reach = (b_s > threshold) | ((b_s == threshold) & (before + found < k))
                b_reach = (b_reach & (o_u < last)).to(tl.int32)
                b_row = tl.sum(b_reach, 1)
                o_w = (found + tl.cumsum(b_row, 0) - b_row)[:, None] + tl.cumsum(b_reach, 1) - 1
                m_w = (b_reach != 0) & (o_w < P.STRIDE)
                tl.store(candidate_scores + base + o_w, b_s, mask=m_w)
                tl.store(candidate_units + base + o_w, o_u, mask=m_w)
                found += tl.sum(b_row)
            # Candidates are searched by chunks; what fills up the last one never wins.
            o_w = found + tl.arange(0, P.CHUNK)
            m_w = (o_w < tl.cdiv(found, P.CHUNK) * P.CHUNK) & (o_w < P.STRIDE)
            b_fill = tl.full((P.CHUNK,), float("-inf"), tl.float32)
            tl.store(candidate_scores + base + o_w, b_fill, mask=m_w)
            # Where fewer than k are above -inf, the candidates do not hold those that win.
            found = tl.where(threshold == float("-inf"), P.STRIDE + 1, found)
            tl.store(state + i_rh * S.COLUMNS + CANDIDATES + i_s, found)
            if i_s == 0:
                tl.store(state + i_rh * S.COLUMNS + THRESHOLD, key_of(threshold))


@triton.jit
def _write_winners(
    p_scores, p_units, p_out, b_chunks, own, threshold, forced, k, BC: tl.constexpr, P: tl.constexpr
):
    """Write the units of this split that are among the k best of all candidates, at most ``BC``."""
    i_s = tl.program_id(1)
    o_s, o_c, o_i = tl.arange(0, P.SPLITS), tl.arange(0, BC // P.CHUNK), tl.arange(0, P.CHUNK)
    # [SPLITS]: chunks of the splits up to each one
    b_end = tl.cumsum(b_chunks, 0)
    # [BC / CHUNK]: where chunks lie, one split after the other
    b_skip = tl.where(o_c[:, None] >= b_end[None, :], P.STRIDE // P.CHUNK - b_chunks[None, :], 0)
    b_at = (o_c + tl.sum(b_skip, 1)) * P.CHUNK
    m_c = o_c < tl.sum(b_chunks)
    # [BC / CHUNK, CHUNK]
    b_s = tl.load(p_scores + b_at[:, None] + o_i[None, :], mask=m_c[:, None], other=float("-inf"))
    o_o = tl.arange(0, P.WRITE)
    # [WRITE]: what may be written is on its way while the k-th best is searched.
    b_o = tl.load(p_scores + i_s * P.STRIDE + o_o, mask=o_o < own, other=float("-inf"))
    b_u = tl.load(p_units + i_s * P.STRIDE + o_o, mask=o_o < own, other=0)
    # Positions order as units do. At least k candidates reach the threshold, which is above -inf.
    o_p = o_c[:, None] * P.CHUNK + o_i[None, :]
    b_win, score = search_winners(b_s, o_p, threshold, forced, BC - 1, k, BC)
    cut = tl.max(tl.where(b_win & (b_s == score), o_p, -1))
    before = tl.sum(tl.where(o_s < i_s, b_chunks, 0))
    taken = tl.sum((b_win & (o_c < before)[:, None]).to(tl.int32))
    for i_o in range(0, own, P.WRITE):
        m_o = i_o + o_o < own
        b_tie = (b_o == score) & (before * P.CHUNK + i_o + o_o <= cut)
        b_won = (m_o & ((b_o > score) | b_tie)).to(tl.int32)
        o_w = taken + tl.cumsum(b_won, 0) - 1
        tl.store(p_out + o_w, b_u, mask=(b_won != 0) & (o_w < k))
        taken += tl.sum(b_won)
        o_n = i_o + P.WRITE + o_o
        b_o = tl.load(p_scores + i_s * P.STRIDE + o_n, mask=o_n < own, other=float("-inf"))
        b_u = tl.load(p_units + i_s * P.STRIDE + o_n, mask=o_n < own, other=0)


@triton.jit
def winners_kernel(
    scores,
    candidate_scores,
    candidate_units,
    block_list,
    state,
    domain,
    list_rows,
    out_indices,
    width,
    list_blocks,
    S: tl.constexpr,
    P: tl.constexpr,
):
    """Find the k best of all candidates; write those of this split."""
    begin()
    i_rh, i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(0) // S.H, tl.program_id(1)
    p_found = state + i_rh * S.COLUMNS + CANDIDATES
    reselected, tokens, n, k = row_budget(domain, S)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * S.H + i_rh % S.H
    # [SPLITS]
    b_found = tl.load(p_found + tl.arange(0, P.SPLITS))
    own = tl.load(p_found + i_s)
    threshold = score_of(tl.load(state + i_rh * S.COLUMNS + THRESHOLD))
    if reselected & (k > 0):
        free = free_range(domain, tokens, n, S.UNIT)
        forced = forced_of(free, n)
        first = i_rh * P.SPLITS * P.STRIDE
        p_scores, p_units = candidate_scores + first, candidate_units + first
        p_out = out_indices + i_l * domain.capacity
        b_chunks = tl.cdiv(b_found, P.CHUNK)
        complete = (tl.sum(b_found) >= k) & (tl.max(b_found) <= P.STRIDE)
        size = tl.where(complete, tl.sum(b_chunks) * P.CHUNK, P.SLOTS + 1)
        if size <= P.SLOTS // 4:
            _write_winners(
                p_scores, p_units, p_out, b_chunks, own, threshold, forced, k, P.SLOTS // 4, P
            )
        elif size <= P.SLOTS // 2:
            _write_winners(
                p_scores, p_units, p_out, b_chunks, own, threshold, forced, k, P.SLOTS // 2, P
            )
        elif size <= P.SLOTS:
            _write_winners(
                p_scores, p_units, p_out, b_chunks, own, threshold, forced, k, P.SLOTS, P
            )
        elif i_s == 0:
            take_streamed(
                scores + i_rh * width, block_list + i_rh * list_blocks, p_out, n, k,
                free, list_blocks, P.FALLBACK, S.BLOCK, S.WHOLE,
            )  # fmt: skip


def split_topk_triton(
    scores: Scores, lists: Lists, domain: Domain, held: Held, workspace: TopkWorkspace, splits: int
) -> None:
    """Launch the two kernels, ``splits`` programs a row and KV head."""
    rows, heads, width = scores.values.shape
    blocks = max(1024, next_power_of_2(triton.cdiv(width, BLOCK_UNITS)))
    split = Split(
        SPLITS=splits, STRIDE=MAX_CANDIDATES, CHUNK=CHUNK, TILE=TILE_UNITS, VECTOR=VECTOR,
        WRITE=WRITE_UNITS, BLOCKS=min(blocks, MAX_BLOCKS),
        UNITS=min(WHOLE_UNITS, max(1024, next_power_of_2(width))),
        SLOTS=8 * max(LEAST_BUDGET, next_power_of_2(domain.capacity)), FALLBACK=FALLBACK_UNITS,
    )  # fmt: skip
    shapes = {"S": constants(held), "P": constants(split)}
    found = (workspace.candidate_scores, workspace.candidate_units)
    # Programs that start while scores are being written would take room from the writers.
    candidates_kernel[(rows * heads, splits)](
        scores.values, scores.block_max, *found, workspace.state, domain,
        lists.rows, lists.counts, width, scores.block_max.shape[2],
        **shapes, num_warps=CANDIDATES_WARPS,
    )  # fmt: skip
    winners_kernel[(rows * heads, splits)](
        scores.values, *found, workspace.blocks, workspace.state, domain,
        lists.rows, lists.indices, width, workspace.blocks.shape[2],
        **shapes, num_warps=WINNERS_WARPS, **overlapping(rows * heads),
    )  # fmt: skip
