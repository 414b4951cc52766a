# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Exact top-k of rows that do not fit in the registers of one program, such as a tenth of 128K.

A sample bounds the k-th best score, of long rows a larger one more closely. Several programs a row
count the units above the bounds and list those between them, one program searches those, and
several write the winners in order: a row is read twice. Where all of those are equal, how many of
them each part takes needs no list. Where the sample misled, or too many units lie between, one
program reads the row some four times instead.
"""

import triton
import triton.language as tl

from ..plan import DecodePlan
from ..records import BLOCK_UNITS, Always, Lists, Scores
from .alone import DONE, ranks_around, sample_bounds, stream_topk_kernel, streamed_row
from .search import key_of, kth_best, load_units, rankable, score_of
from .types import STREAM_SPLITS, TopkWorkspace

STREAM_UNITS, STREAM_WARPS = 8192, 16
BOUNDS_WARPS = SEARCH_WARPS = 8
PART_UNITS, PART_WARPS = 512, 1
# Units between the bounds: what a part may list, and what all parts together may, by chunks, in the
# first of two launches and in the second. 64 registers let four programs share a multiprocessor.
MOST_OPEN, CHUNK = 1024, 32
FEW_LISTED, MOST_LISTED = 8192, 16384
FEW_REGISTERS, MOST_REGISTERS = 64, 128

# Columns of a row's state: bounds, the k-th best score, how many that equal it win, then of each
# part: units above the bounds, units between, and, up to its end, units above the k-th best and
# units equal to it.
_LOW, _HIGH, _SCORE, _TIES, _PARTS = (tl.constexpr(i) for i in (0, 1, 2, 3, 8))


@triton.jit
def _closer_bounds(
    p_scores,
    p_list,
    low,
    high,
    n,
    k,
    rounds,
    most,
    forced_below,
    free_below,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Bounds from a sample of ``rounds`` times ``BT`` units, of which those between the bounds that
    are known are listed and searched; the same bounds if those are more than ``most``."""
    ROWS: tl.constexpr = BT // BLOCK
    num_blocks = tl.cdiv(n, BLOCK)
    above = tl.full((), 0, tl.int32)
    listed = tl.full((), 0, tl.int32)
    for i_r in range(rounds):
        o_b = tl.arange(0, ROWS).to(tl.int64) * rounds + i_r
        o_b = (o_b * num_blocks // (ROWS * rounds)).to(tl.int32)
        b_s, _ = load_units(
            p_scores, o_b, o_b < num_blocks, n, forced_below, free_below, BLOCK, WHOLE
        )
        above += tl.sum((b_s > high).to(tl.int32))
        b_open = ((b_s >= low) & (b_s <= high)).to(tl.int32)
        b_row = tl.sum(b_open, 1)
        o_w = (listed + tl.cumsum(b_row, 0) - b_row)[:, None] + tl.cumsum(b_open, 1) - 1
        m_w = (b_open != 0) & (o_w < most)
        tl.store(p_list + o_w, b_s.to(tl.int32, bitcast=True), mask=m_w)
        listed += tl.sum(b_row)
    lower, upper, slack = ranks_around(k, n, rounds * BT, BLOCK)
    lower, upper = lower - above, upper - above
    if (listed <= most) & (upper > 0) & (lower <= listed):
        # The list is read back by other threads of this program.
        tl.debug_barrier()
        o_l = tl.arange(0, BT)
        b_s = tl.load(p_list + o_l, mask=o_l < listed, other=-8388608)  # bits of -inf
        b_s = b_s.to(tl.float32, bitcast=True)
        forced = tl.sum((b_s == float("inf")).to(tl.int32))
        low, _, _ = kth_best(b_s, low, forced, lower, lower + slack, BT)
        high, _, _ = kth_best(b_s, low, forced, upper, upper + slack, BT)
    return low, high


@triton.jit
def bounds_kernel(
    scores,
    lists,
    state,
    tail_start,
    k_units,
    reselect,
    width,
    list_blocks,
    most_listed,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    streamed, tokens, n, k = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    if streamed:
        i_rh = tl.program_id(0).to(tl.int64)
        p_scores, p_list = scores + i_rh * width, lists + i_rh * list_blocks
        forced_below = tl.cdiv(sink, UNIT)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        low, high = sample_bounds(p_scores, n, k, forced_below, free_below, TILE, BLOCK, WHOLE)
        # Between the bounds lie some 15 standard deviations of a rank in the sample at most. If the
        # sample is as large as this, they are five sixths of what may be listed of a row.
        share = k.to(tl.float32) / n
        variance, spread = share * (1.0 - share), n.to(tl.float32) * 18 / most_listed
        rounds = variance * spread * spread / TILE
        # What lies between the bounds of the first sample must fit, too.
        most = tl.minimum(list_blocks, TILE)
        room = most / (15.0 * tl.sqrt(variance * TILE) + 3.0 * BLOCK)
        rounds = tl.ceil(tl.minimum(rounds, room - 1.0)).to(tl.int32)
        if rounds > 1:
            low, high = _closer_bounds(
                p_scores, p_list, low, high, n, k, rounds, most, forced_below, free_below, TILE,
                BLOCK, WHOLE,
            )  # fmt: skip
        tl.store(state + i_rh * COLUMNS + _LOW, key_of(low))
        tl.store(state + i_rh * COLUMNS + _HIGH, key_of(high))


@triton.jit
def _part(n, BT: tl.constexpr, SPLITS: tl.constexpr):
    """[first, last) of this program's part, in tiles."""
    tiles = tl.cdiv(n, BT)
    share = tl.cdiv(tiles, SPLITS)
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, tiles)


@triton.jit
def _load_tile(
    p_scores,
    i_t,
    n,
    forced_below,
    free_below,
    BT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(scores, units) [BT / 16, 4, 4] of a tile; NaN past the end."""
    # Four units a lane, side by side, four times over: so the loads of a warp are whole lines.
    o_q = tl.arange(0, BT // 16)[:, None] * 4 + tl.arange(0, 4)[None, :] * (BT // 4)
    o_q += i_t * BT
    o_u = o_q[:, :, None] + tl.arange(0, 4)[None, None, :]
    m_u = (o_q < n)[:, :, None]
    if not WHOLE:
        m_u &= o_u < n
    b_s = tl.load(p_scores + o_u, mask=m_u)
    if (i_t * BT < forced_below) | (i_t * BT + BT > free_below):
        b_s = rankable(b_s, o_u, forced_below, free_below, n)
        b_s = tl.where(o_u < n, b_s, float("nan"))
    return b_s, o_u


@triton.jit
def _ranks(b_m):
    """(how many of a tile's flags are set before each, in order of units; how many are set)."""
    b_m = b_m.to(tl.int32)
    o_8 = tl.arange(0, 4) * 8
    # One scan over the lanes counts four times, in the bytes of a word: at most 128 flags each.
    b_lane = tl.sum(tl.sum(b_m, 2) << o_8[None, :], 1)
    sums = tl.sum(b_lane)
    sum_0, sum_1, sum_2 = sums & 255, (sums >> 8) & 255, (sums >> 16) & 255
    b_base = tl.where(o_8 > 0, sum_0, 0) + tl.where(o_8 > 8, sum_1, 0)
    b_base += tl.where(o_8 > 16, sum_2, 0)
    b_first = (((tl.cumsum(b_lane, 0) - b_lane)[:, None] >> o_8[None, :]) & 255) + b_base[None, :]
    total = sum_0 + sum_1 + sum_2 + ((sums >> 24) & 255)
    return b_first[:, :, None] + tl.cumsum(b_m, 2) - b_m, total


@triton.jit
def partition_kernel(
    scores,
    lists,
    state,
    tail_start,
    k_units,
    reselect,
    width,
    list_blocks,
    most_open,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    BT: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count a part's units above the bounds; list the scores between them, and count them."""
    streamed, tokens, n, _ = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    if streamed:
        i_rh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
        forced_below = tl.cdiv(sink, UNIT)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        p_state = state + i_rh * COLUMNS
        p_list = lists + i_rh * list_blocks + i_s * most_open
        low, high = score_of(tl.load(p_state + _LOW)), score_of(tl.load(p_state + _HIGH))
        b_above = tl.zeros((BT // 16,), tl.int32)
        listed = tl.full((), 0, tl.int32)
        first, last = _part(n, BT, SPLITS)
        for i_t in range(first, last):
            b_s, _o_u = _load_tile(
                scores + i_rh * width, i_t, n, forced_below, free_below, BT, WHOLE
            )
            b_above += tl.sum(tl.sum((b_s > high).to(tl.int32), 2), 1)
            b_open = (b_s >= low) & (b_s <= high)
            b_rank, opened = _ranks(b_open)
            m_w = b_open & (listed + b_rank < most_open)
            tl.store(p_list + listed + b_rank, b_s.to(tl.int32, bitcast=True), mask=m_w)
            listed += opened
        # What fills up the last chunk never wins.
        o_w = listed + tl.arange(0, CHUNK)
        m_w = o_w < tl.minimum(tl.cdiv(listed, CHUNK) * CHUNK, most_open)
        b_fill = tl.full((CHUNK,), float("-inf"), tl.float32).to(tl.int32, bitcast=True)
        tl.store(p_list + o_w, b_fill, mask=m_w)
        tl.store(p_state + _PARTS + i_s, tl.sum(b_above))
        tl.store(p_state + _PARTS + SPLITS + i_s, listed)


@triton.jit
def _search(
    p_list,
    b_chunks,
    k,
    low,
    most_open,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(k-th best of the listed scores; how many are above it, up to each part; how many equal it).

    ``SIZE`` scores fit; ``low`` is one that at least k reach.
    """
    o_c, o_i = tl.arange(0, SIZE // CHUNK), tl.arange(0, CHUNK)
    # [SPLITS]: chunks of the parts up to each one
    b_end = tl.cumsum(b_chunks, 0)
    # [SIZE / CHUNK]: where chunks lie, one list after the other
    b_skip = tl.where(o_c[:, None] >= b_end[None, :], most_open // CHUNK - b_chunks[None, :], 0)
    b_at = (o_c + tl.sum(b_skip, 1)) * CHUNK
    m_c = o_c < tl.sum(b_chunks)
    # [SIZE / CHUNK, CHUNK]; bits of -inf
    b_s = tl.load(p_list + b_at[:, None] + o_i[None, :], mask=m_c[:, None], other=-8388608)
    b_s = b_s.to(tl.float32, bitcast=True)
    forced = tl.sum((b_s == float("inf")).to(tl.int32))
    score, _, _ = kth_best(b_s, low, forced, k, k, SIZE)
    # Both counts in one word, up to each chunk, then up to the last one of each part
    b_count = (b_s > score).to(tl.int32) + ((b_s == score).to(tl.int32) << 16)
    b_upto = tl.cumsum(tl.sum(b_count, 1), 0)
    b_upto = tl.where(b_end > 0, tl.gather(b_upto, tl.maximum(b_end - 1, 0), 0), 0)
    return score, b_upto & 65535, b_upto >> 16


@triton.jit
def threshold_kernel(
    lists,
    state,
    tail_start,
    k_units,
    reselect,
    list_blocks,
    most_open,
    least,
    capacity,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Search the units between the bounds; say where the winners of each part go.

    Takes the rows whose lists fill more than ``least`` slots and at most ``SIZE``.
    """
    streamed, _, _, k = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    if streamed:
        i_rh = tl.program_id(0).to(tl.int64)
        p_state = state + i_rh * COLUMNS
        p_list = lists + i_rh * list_blocks
        o_s = tl.arange(0, SPLITS)
        # [SPLITS]
        b_above = tl.load(p_state + _PARTS + o_s)
        b_open = tl.load(p_state + _PARTS + SPLITS + o_s)
        above = tl.sum(b_above)
        b_chunks = tl.cdiv(b_open, CHUNK)
        slots = tl.sum(b_chunks) * CHUNK
        low = score_of(tl.load(p_state + _LOW))
        equal = low == score_of(tl.load(p_state + _HIGH))
        if slots > least:
            done = (above < k) & (k <= above + tl.sum(b_open))
            # What fills up chunks is -inf.
            listed = (low > float("-inf")) & (tl.max(b_open) <= most_open) & (slots <= SIZE)
            done &= equal | listed
            tl.store(p_state + DONE, done.to(tl.int32))
            if done:
                # [SPLITS]
                b_over, b_tied = tl.zeros_like(b_open), tl.cumsum(b_open, 0)
                score = low
                if not equal:
                    if slots <= SIZE // 2:
                        score, b_over, b_tied = _search(
                            p_list, b_chunks, k - above, low, most_open, SIZE // 2, CHUNK, SPLITS
                        )
                    else:
                        score, b_over, b_tied = _search(
                            p_list, b_chunks, k - above, low, most_open, SIZE, CHUNK, SPLITS
                        )
                b_over += tl.cumsum(b_above, 0)
                tl.store(p_state + _SCORE, key_of(score))
                tl.store(p_state + _TIES, k - tl.max(b_over))
                tl.store(p_state + _PARTS + 2 * SPLITS + o_s, b_over)
                tl.store(p_state + _PARTS + 3 * SPLITS + o_s, b_tied)


@triton.jit
def write_kernel(
    scores,
    state,
    tail_start,
    k_units,
    reselect,
    list_rows,
    out_indices,
    width,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    BT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a part's winners behind those of the parts before it."""
    streamed, tokens, n, _ = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    i_rh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_state = state + i_rh * COLUMNS
    if streamed & (tl.load(p_state + DONE) != 0):
        forced_below = tl.cdiv(sink, UNIT)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        i_l = tl.load(list_rows + tl.program_id(0) // H).to(tl.int64) * H + i_rh % H
        key, ties = tl.load(p_state + _SCORE), tl.load(p_state + _TIES)
        # Of the units that equal the k-th best, the first ones win.
        p_upto = p_state + _PARTS + 2 * SPLITS + i_s
        before = tl.load(p_upto + SPLITS - 1, mask=i_s > 0, other=0)
        all_win = tl.load(p_upto + SPLITS) <= ties
        taken = tl.load(p_upto - 1, mask=i_s > 0, other=0) + tl.minimum(before, ties)
        ties = tl.maximum(ties - before, 0)
        some_win = (ties > 0) & (not all_win)
        score, least = score_of(key), score_of(key + (ties == 0).to(tl.int32))
        p_out = out_indices + i_l * capacity
        first, last = _part(n, BT, SPLITS)
        for i_t in range(first, last):
            b_s, o_u = _load_tile(
                scores + i_rh * width, i_t, n, forced_below, free_below, BT, WHOLE
            )
            b_win = b_s >= least
            if some_win:
                b_rank, tied = _ranks(b_s == score)
                b_win &= (b_s > score) | (b_rank < ties)
                ties -= tied
            b_rank, wins = _ranks(b_win)
            tl.store(p_out + taken + b_rank, o_u, mask=b_win)
            taken += wins


def stream_topk_triton(
    scores: Scores,
    plan: DecodePlan,
    lists: Lists,
    held: dict[str, int],
    *,
    always: Always,
    workspace: TopkWorkspace,
) -> None:
    """Launch the passes over parts, then :func:`stream_topk_kernel` for rows left over.

    ``held`` says what :func:`select_topk_kernel` holds at a time.
    """
    rows, heads, width = scores.values.shape
    capacity, list_blocks = lists.capacity, workspace.blocks.shape[2]
    sink, recent = always.sink, always.recent
    most_open = min(list_blocks // STREAM_SPLITS, MOST_OPEN) // CHUNK * CHUNK
    row = (plan.tail_start, plan.k_units, plan.reselect)
    shapes = {
        "H": heads,
        "UNIT": lists.unit,
        "BLOCK": BLOCK_UNITS,
        "COLUMNS": workspace.state.shape[2],
    } | held
    reads = {"WHOLE": width % BLOCK_UNITS == 0}
    tiles = {"BT": PART_UNITS, "SPLITS": STREAM_SPLITS, "num_warps": PART_WARPS}
    parts = (rows * heads, STREAM_SPLITS)
    bounds_kernel[parts[:1]](
        scores.values, workspace.blocks, workspace.state, *row, width, list_blocks,
        min(MOST_LISTED, STREAM_SPLITS * max(most_open, CHUNK)), capacity, sink, recent,
        TILE=STREAM_UNITS, num_warps=BOUNDS_WARPS, **reads, **shapes,
    )  # fmt: skip
    partition_kernel[parts](
        scores.values, workspace.blocks, workspace.state, *row, width, list_blocks, most_open,
        capacity, sink, recent,
        CHUNK=CHUNK, **tiles, **reads, **shapes,
    )  # fmt: skip
    least = -1
    for most, registers in ((FEW_LISTED, FEW_REGISTERS), (MOST_LISTED, MOST_REGISTERS)):
        threshold_kernel[parts[:1]](
            workspace.blocks, workspace.state, *row, list_blocks, most_open, least, capacity,
            SIZE=most, CHUNK=CHUNK, SPLITS=STREAM_SPLITS, num_warps=SEARCH_WARPS,
            maxnreg=registers, **shapes,
        )  # fmt: skip
        least = most
    write_kernel[parts](
        scores.values, workspace.state, *row, lists.rows, lists.indices, width, capacity, sink,
        recent, **tiles, **reads, **shapes,
    )  # fmt: skip
    stream_topk_kernel[parts[:1]](
        scores.values, workspace.blocks, workspace.state, *row, lists.rows, lists.indices, width,
        list_blocks, capacity, sink, recent,
        TILE=STREAM_UNITS, num_warps=STREAM_WARPS, **reads, **shapes,
    )  # fmt: skip
