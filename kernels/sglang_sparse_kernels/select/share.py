# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Exact top-k of few rows: several programs share each, so that one request fills the device.

No program waits for another. First each finds, from the block maxima (or the units of a short
row), a score that at least k units reach and few more do, and lists the units of its own part that
reach it. Then each searches the lists of all parts for the k-th best and writes its part's winners
behind those of the parts before it. A row whose parts list too many, for its best units lie close
together or are equal, or too few, for a sample misled, is taken by one program that reads it some
four times.
"""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..device import multiprocessors
from ..plan import DecodePlan
from ..records import BLOCK_UNITS, Always, Lists, Scores
from ..triton_ops import FLOAT32_MAX, begin, overlapping
from .alone import take_streamed
from .search import (
    count_reaching,
    forced_of,
    key_of,
    load_units,
    log_ratio,
    probe,
    rankable,
    score_of,
    search_winners,
)
from .types import FOUND_UNITS, MAX_PARTS, MAX_PROGRAMS, TopkWorkspace

MAX_BLOCKS = 16384
WHOLE_UNITS = 16384  # up to so many units of a row are looked at, of longer ones the block maxima
PART_UNITS, PART_BLOCK = 2048, 4
CHUNK = 32
# Lists of all parts together are searched if they are at most eight times the budget.
LEAST_BUDGET, MOST_BUDGET = 128, 2048
WRITE_UNITS = 512
FIND_WARPS = SETTLE_WARPS = 8
FALLBACK_UNITS = 4096

# Columns of a row's state: key of its floor; the first of how many units each part listed.
FLOOR, FOUND = tl.constexpr(0), tl.constexpr(8)


def parts_of(row_heads: int, width: int, capacity: int, device: torch.device) -> int:
    """Programs that share a row and KV head; 0 if rows are not shared."""
    fill = min(multiprocessors(device), MAX_PROGRAMS) // row_heads
    if fill < 2 or width <= WHOLE_UNITS or capacity > MOST_BUDGET:
        return 0
    return min(MAX_PARTS, next_power_of_2(fill + 1) // 2)


@triton.jit
def _floor(
    p_s,
    n,
    forced_below,
    free_below,
    k,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(A score that at least k of n scores reach, whether far more do).

    Few more do unless many are equal; -inf if fewer than k are above that. ``SIZE`` scores are held
    in registers; of more, blocks at equal distances are looked at, and fewer than k may reach it.
    """
    step = tl.cdiv(tl.cdiv(n, BLOCK), SIZE // BLOCK)
    o_b = tl.arange(0, SIZE // BLOCK) * step
    b_s, _ = load_units(p_s, o_b, o_b * BLOCK < n, n, forced_below, free_below, BLOCK, WHOLE)
    forced = forced_of(forced_below, free_below, n) // step
    # Neighbours are alike, so that four count as one draw; three standard deviations of that.
    part = k.to(tl.float32) / step
    k = tl.ceil(part + 6.0 * tl.sqrt(part * (1.0 - 1.0 / step))).to(tl.int32)
    # A few more than k cost less than counting on. Twelve guesses are enough for a floor, where
    # kth_best goes on until equal scores are told apart: 3 µs of 10.
    most = k + k // 16
    low = tl.min(tl.where(b_s > float("-inf"), b_s, FLOAT32_MAX))
    low = tl.minimum(low, FLOAT32_MAX)
    high = tl.max(tl.where(b_s < float("inf"), b_s, float("-inf")))
    count_lo = count_reaching(b_s, low, SIZE)
    lo = key_of(low)
    hi = tl.where((forced < k) & (count_lo > most), key_of(high), lo)
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
        hi = tl.where(up & (count <= most), lo, hi)
        side = moved
        step += 1
    return tl.where(count_lo < k, float("-inf"), score_of(lo)), count_lo > k + k // 2


@triton.jit
def _load_tile(p_scores, start, end, n, BT: tl.constexpr, PB: tl.constexpr, WHOLE: tl.constexpr):
    """(scores, units) [BT / PB, PB] from ``start`` on; those from ``end`` on may be anything."""
    o_u = start + tl.arange(0, BT // PB)[:, None] * PB + tl.arange(0, PB)[None, :]
    # Parts begin and end with a block, and a row's last block may be readable whole.
    m_u = (start + tl.arange(0, BT // PB) * PB < end)[:, None]
    if not WHOLE:
        m_u &= o_u < n
    return tl.load(p_scores + o_u, mask=m_u, other=float("-inf")), o_u


@triton.jit
def find_kernel(
    scores,
    block_max,
    found_scores,
    found_units,
    state,
    tail_start,
    k_units,
    reselect,
    list_rows,
    out_counts,
    width,
    blocks,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    BT: tl.constexpr,
    PB: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """List a part's units that reach a score which at least k units of the row reach."""
    begin()
    i_rh, i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(0) // H, tl.program_id(1)
    # What the row's plan says is read at once, not one answer after the other.
    reselected = tl.load(reselect + i_r) != 0
    tokens = tl.load(tail_start + i_r)
    n = tl.cdiv(tokens, UNIT)
    k = tl.minimum(tl.minimum(tl.load(k_units + i_r), n), capacity)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
    if reselected:
        if i_s == 0:
            tl.store(out_counts + i_l, k)
        if k > 0:
            forced_below = tl.cdiv(sink, UNIT)
            free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
            p_scores = scores + i_rh * width
            p_max = block_max + i_rh * blocks
            share = tl.cdiv(tl.cdiv(n, PARTS), BLOCK) * BLOCK
            first = i_s * share
            last = tl.minimum(first + share, n)
            # This part's units are on their way while the floor is searched.
            b_next, o_next = _load_tile(p_scores, first, last, n, BT, PB, WHOLE)
            count = tl.cdiv(n, BLOCK)
            if (n <= BU) & (count < 2 * k):
                floor, tied = _floor(p_scores, n, forced_below, free_below, k, BU, BLOCK, WHOLE)
            else:
                below = tl.cdiv(forced_below, BLOCK)
                # With nothing recent to force, the last block is free whole.
                free = tl.where(free_below < n, free_below // BLOCK, count)
                if count <= BB // 4:
                    floor, tied = _floor(p_max, count, below, free, k, BB // 4, BLOCK, True)
                else:
                    floor, tied = _floor(p_max, count, below, free, k, BB, BLOCK, True)
            base = (i_rh * PARTS + i_s) * STRIDE
            # Units that reach the floor before this part, as far as k of them.
            before = tl.full((), 0, tl.int32)
            i_t = tl.full((), 0, tl.int32)
            while tied & (i_t < first) & (before < k):
                b_s, o_u = _load_tile(p_scores, i_t, first, n, BT, PB, WHOLE)
                b_s = rankable(b_s, o_u, forced_below, free_below, first)
                before += tl.sum(((b_s >= floor) & (o_u < first)).to(tl.int32))
                i_t += BT
            found = tl.full((), 0, tl.int32)
            for i_t in range(first, last, BT):
                b_s, o_u = rankable(b_next, o_next, forced_below, free_below, n), o_next
                b_next, o_next = _load_tile(p_scores, i_t + BT, last, n, BT, PB, WHOLE)
                # [BT / PB, PB]
                # Behind k that reach it, a score equal to the floor cannot win.
                b_reach = (b_s > floor) | ((b_s == floor) & (before + found < k))
                b_reach = (b_reach & (o_u < last)).to(tl.int32)
                b_row = tl.sum(b_reach, 1)
                o_w = (found + tl.cumsum(b_row, 0) - b_row)[:, None] + tl.cumsum(b_reach, 1) - 1
                m_w = (b_reach != 0) & (o_w < STRIDE)
                tl.store(found_scores + base + o_w, b_s, mask=m_w)
                tl.store(found_units + base + o_w, o_u, mask=m_w)
                found += tl.sum(b_row)
            # Lists are searched by chunks; what fills up the last one never wins.
            o_w = found + tl.arange(0, CHUNK)
            m_w = (o_w < tl.cdiv(found, CHUNK) * CHUNK) & (o_w < STRIDE)
            tl.store(
                found_scores + base + o_w, tl.full((CHUNK,), float("-inf"), tl.float32), mask=m_w
            )
            # Where fewer than k are above -inf, the lists do not hold those that win.
            found = tl.where(floor == float("-inf"), STRIDE + 1, found)
            tl.store(state + i_rh * COLUMNS + FOUND + i_s, found)
            if i_s == 0:
                tl.store(state + i_rh * COLUMNS + FLOOR, key_of(floor))


@triton.jit
def _settle(
    p_scores,
    p_units,
    p_out,
    b_chunks,
    own,
    floor,
    forced,
    k,
    BC: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BO: tl.constexpr,
):
    """Write this part's winners of the k best of all lists, which are at most ``BC`` units."""
    i_s = tl.program_id(1)
    o_s, o_c, o_i = tl.arange(0, PARTS), tl.arange(0, BC // CHUNK), tl.arange(0, CHUNK)
    # [PARTS]: chunks of the parts up to each one
    b_end = tl.cumsum(b_chunks, 0)
    # [BC / CHUNK]: where chunks lie, one list after the other
    b_skip = tl.where(o_c[:, None] >= b_end[None, :], STRIDE // CHUNK - b_chunks[None, :], 0)
    b_at = (o_c + tl.sum(b_skip, 1)) * CHUNK
    m_c = o_c < tl.sum(b_chunks)
    # [BC / CHUNK, CHUNK]
    b_s = tl.load(p_scores + b_at[:, None] + o_i[None, :], mask=m_c[:, None], other=float("-inf"))
    o_o = tl.arange(0, BO)
    # [BO]: what may be written is on its way while the k-th best is searched.
    b_o = tl.load(p_scores + i_s * STRIDE + o_o, mask=o_o < own, other=float("-inf"))
    b_u = tl.load(p_units + i_s * STRIDE + o_o, mask=o_o < own, other=0)
    # Positions order as units do. At least k listed scores reach the floor, which is above -inf.
    o_p = o_c[:, None] * CHUNK + o_i[None, :]
    b_win, score = search_winners(b_s, o_p, floor, forced, BC - 1, k, BC)
    cut = tl.max(tl.where(b_win & (b_s == score), o_p, -1))
    before = tl.sum(tl.where(o_s < i_s, b_chunks, 0))
    taken = tl.sum((b_win & (o_c < before)[:, None]).to(tl.int32))
    for i_o in range(0, own, BO):
        m_o = i_o + o_o < own
        b_tie = (b_o == score) & (before * CHUNK + i_o + o_o <= cut)
        b_won = (m_o & ((b_o > score) | b_tie)).to(tl.int32)
        o_w = taken + tl.cumsum(b_won, 0) - 1
        tl.store(p_out + o_w, b_u, mask=(b_won != 0) & (o_w < k))
        taken += tl.sum(b_won)
        o_n = i_o + BO + o_o
        b_o = tl.load(p_scores + i_s * STRIDE + o_n, mask=o_n < own, other=float("-inf"))
        b_u = tl.load(p_units + i_s * STRIDE + o_n, mask=o_n < own, other=0)


@triton.jit
def settle_kernel(
    scores,
    found_scores,
    found_units,
    block_list,
    state,
    tail_start,
    k_units,
    reselect,
    list_rows,
    out_indices,
    width,
    list_blocks,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    BO: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the k best of what the parts listed; write those of this part."""
    begin()
    i_rh, i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(0) // H, tl.program_id(1)
    p_found = state + i_rh * COLUMNS + FOUND
    reselected = tl.load(reselect + i_r) != 0
    tokens = tl.load(tail_start + i_r)
    n = tl.cdiv(tokens, UNIT)
    k = tl.minimum(tl.minimum(tl.load(k_units + i_r), n), capacity)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
    # [PARTS]
    b_found = tl.load(p_found + tl.arange(0, PARTS))
    own = tl.load(p_found + i_s)
    floor = score_of(tl.load(state + i_rh * COLUMNS + FLOOR))
    if reselected & (k > 0):
        forced_below = tl.cdiv(sink, UNIT)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        forced = forced_of(forced_below, free_below, n)
        first = i_rh * PARTS * STRIDE
        p_scores, p_units = found_scores + first, found_units + first
        p_out = out_indices + i_l * capacity
        b_chunks = tl.cdiv(b_found, CHUNK)
        listed = (tl.sum(b_found) >= k) & (tl.max(b_found) <= STRIDE)
        size = tl.where(listed, tl.sum(b_chunks) * CHUNK, SLOTS + 1)
        if size <= SLOTS // 4:
            _settle(
                p_scores, p_units, p_out, b_chunks, own, floor, forced, k, SLOTS // 4, PARTS,
                STRIDE, CHUNK, BO,
            )  # fmt: skip
        elif size <= SLOTS // 2:
            _settle(
                p_scores, p_units, p_out, b_chunks, own, floor, forced, k, SLOTS // 2, PARTS,
                STRIDE, CHUNK, BO,
            )  # fmt: skip
        elif size <= SLOTS:
            _settle(
                p_scores, p_units, p_out, b_chunks, own, floor, forced, k, SLOTS, PARTS,
                STRIDE, CHUNK, BO,
            )  # fmt: skip
        elif i_s == 0:
            take_streamed(
                scores + i_rh * width,
                block_list + i_rh * list_blocks,
                p_out,
                n,
                k,
                forced_below,
                free_below,
                list_blocks,
                TILE,
                BLOCK,
                WHOLE,
            )


def share_topk_triton(
    scores: Scores,
    plan: DecodePlan,
    lists: Lists,
    *,
    always: Always,
    workspace: TopkWorkspace,
    parts: int,
) -> None:
    """Launch the two kernels, ``parts`` programs a row and KV head: a power of two."""
    rows, heads, width = scores.values.shape
    row = (plan.tail_start, plan.k_units, plan.reselect, lists.rows)
    shapes: dict[str, int] = {
        "H": heads,
        "UNIT": lists.unit,
        "PARTS": parts,
        "STRIDE": FOUND_UNITS,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK_UNITS,
        "WHOLE": width % BLOCK_UNITS == 0,
        "COLUMNS": workspace.state.shape[2],
    }
    found = (workspace.found_scores, workspace.found_units)
    # Programs of the first launch that came up while scores are being written would crowd.
    blocks = max(1024, next_power_of_2(triton.cdiv(width, BLOCK_UNITS)))
    find_kernel[(rows * heads, parts)](
        scores.values, scores.block_max, *found, workspace.state, *row, lists.counts,
        width, scores.block_max.shape[2], lists.capacity, always.sink, always.recent,
        BB=min(blocks, MAX_BLOCKS), BU=min(WHOLE_UNITS, max(1024, next_power_of_2(width))),
        BT=PART_UNITS, PB=PART_BLOCK, num_warps=FIND_WARPS, **shapes,
    )  # fmt: skip
    settle_kernel[(rows * heads, parts)](
        scores.values, *found, workspace.blocks, workspace.state, *row, lists.indices,
        width, workspace.blocks.shape[2], lists.capacity, always.sink, always.recent,
        SLOTS=8 * max(LEAST_BUDGET, next_power_of_2(lists.capacity)), BO=WRITE_UNITS,
        TILE=FALLBACK_UNITS, num_warps=SETTLE_WARPS, **shapes, **overlapping(rows * heads),
    )  # fmt: skip
