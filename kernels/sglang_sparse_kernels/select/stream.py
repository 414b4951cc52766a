# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Exact top-k of rows that do not fit in the registers of one program, such as a tenth of 128K.

A sample bounds the k-th best score. Several programs a row count the units above the bounds and
list those between them, one program searches those, and several write the winners in order: a row
is read twice. Where all of those are equal, how many of them each part takes needs no list. Where
the sample misled, or too many units lie between, one program reads the row some four times instead.
"""

import torch
import triton
import triton.language as tl

from ..plan import DecodePlan
from .alone import DONE, sample_bounds, stream_topk_kernel, streamed_row
from .search import key_of, load_units, rankable, score_of, store_winners, winners
from .types import BLOCK_UNITS, STREAM_SPLITS, TopkWorkspace

STREAM_UNITS, STREAM_WARPS = 8192, 16
BOUNDS_WARPS = SEARCH_WARPS = 8
PART_UNITS, PART_BLOCK, PART_WARPS = 1024, 4, 2
# Units between the bounds that a part may list, and as many as the search takes in less time.
MOST_OPEN, FEW_OPEN = 512, 256

# Columns of a row's state: bounds, the k-th best score, then of each part: units above, units
# between, where its winners go, how many units that equal the k-th best win.
_LOW, _HIGH, _SCORE, _PARTS = (tl.constexpr(i) for i in (0, 1, 2, 8))


@triton.jit
def bounds_kernel(
    scores,
    state,
    tail_start,
    k_units,
    reselect,
    width,
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
    CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    streamed, tokens, n, k = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    if streamed:
        i_rh = tl.program_id(0).to(tl.int64)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        low, high = sample_bounds(
            scores + i_rh * width, n, k, tl.cdiv(sink, UNIT), free_below, TILE, BLOCK, WHOLE, CLEAN
        )
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
    PB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count a part's units above the bounds; list those between them, and count them."""
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
        ROWS: tl.constexpr = BT // PB
        above = tl.full((), 0, tl.int32)
        listed = tl.full((), 0, tl.int32)
        first, last = _part(n, BT, SPLITS)
        for i_t in range(first, last):
            o_b = i_t * ROWS + tl.arange(0, ROWS)
            b_s, o_u = load_units(
                scores + i_rh * width, o_b, o_b * PB < n, n, forced_below, free_below, PB,
                WHOLE, CLEAN,
            )  # fmt: skip
            above += tl.sum((b_s > high).to(tl.int32))
            b_open = (b_s >= low) & (b_s <= high) & (o_u < n)
            listed = store_winners(p_list, b_open, o_u, listed, most_open)
        tl.store(p_state + _PARTS + i_s, above)
        tl.store(p_state + _PARTS + SPLITS + i_s, listed)


@triton.jit
def _search(
    p_scores,
    p_list,
    b_open,
    k,
    n,
    forced_below,
    free_below,
    most_open,
    BC: tl.constexpr,
    SPLITS: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """(k-th best of the listed units, at most ``BC`` of each part; how many of it each part takes,
    and how many above it)."""
    o_s, o_c = tl.arange(0, SPLITS), tl.arange(0, BC)
    m_c = o_c[None, :] < b_open[:, None]
    # [SPLITS, BC]
    b_u = tl.load(p_list + o_s[:, None] * most_open + o_c[None, :], mask=m_c, other=2147483647)
    b_s = tl.load(p_scores + b_u, mask=m_c, other=float("-inf"))
    b_s = rankable(b_s, b_u, forced_below, free_below, n, CLEAN)
    b_win, score = winners(b_s, b_u, float("-inf"), n - 1, k, SPLITS * BC)
    b_tied = tl.sum((b_win & m_c & (b_s == score)).to(tl.int32), 1)
    return score, b_tied, tl.sum((b_s > score).to(tl.int32), 1)


@triton.jit
def threshold_kernel(
    scores,
    lists,
    state,
    tail_start,
    k_units,
    reselect,
    width,
    list_blocks,
    most_open,
    least,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    BC: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Search the units between the bounds; say where the winners of each part go.

    Takes the rows of whose parts one lists more than ``least`` units, and none more than ``BC``.
    """
    streamed, tokens, n, k = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    if streamed:
        i_rh = tl.program_id(0).to(tl.int64)
        forced_below = tl.cdiv(sink, UNIT)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        p_state = state + i_rh * COLUMNS
        o_s = tl.arange(0, SPLITS)
        # [SPLITS]
        b_above = tl.load(p_state + _PARTS + o_s)
        b_open = tl.load(p_state + _PARTS + SPLITS + o_s)
        above = tl.sum(b_above)
        most = tl.max(b_open)
        low = tl.load(p_state + _LOW)
        equal = low == tl.load(p_state + _HIGH)
        if most > least:
            done = (above < k) & (k <= above + tl.sum(b_open))
            done &= equal | (most <= tl.minimum(BC, most_open))
            tl.store(p_state + DONE, done.to(tl.int32))
            if done:
                # [SPLITS]: of equal units the first ones win
                b_tied = tl.maximum(k - above - (tl.cumsum(b_open, 0) - b_open), 0)
                b_tied = tl.minimum(b_tied, b_open)
                score = score_of(low)
                if not equal:
                    score, b_tied, b_over = _search(
                        scores + i_rh * width, lists + i_rh * list_blocks, b_open, k - above, n,
                        forced_below, free_below, most_open, BC, SPLITS, CLEAN,
                    )  # fmt: skip
                    b_above += b_over
                b_taken = b_above + b_tied
                tl.store(p_state + _SCORE, key_of(score))
                tl.store(p_state + _PARTS + 2 * SPLITS + o_s, tl.cumsum(b_taken, 0) - b_taken)
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
    PB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a part's winners behind those of the parts before it."""
    streamed, tokens, n, k = streamed_row(
        tail_start, k_units, reselect, capacity, H, UNIT, BB, BU, BLOCK
    )
    i_rh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_state = state + i_rh * COLUMNS
    if streamed & (tl.load(p_state + DONE) != 0):
        forced_below = tl.cdiv(sink, UNIT)
        free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
        i_l = tl.load(list_rows + tl.program_id(0) // H).to(tl.int64) * H + i_rh % H
        score = score_of(tl.load(p_state + _SCORE))
        taken = tl.load(p_state + _PARTS + 2 * SPLITS + i_s)
        tied = tl.load(p_state + _PARTS + 3 * SPLITS + i_s)
        ROWS: tl.constexpr = BT // PB
        first, last = _part(n, BT, SPLITS)
        for i_t in range(first, last):
            o_b = i_t * ROWS + tl.arange(0, ROWS)
            b_s, o_u = load_units(
                scores + i_rh * width, o_b, o_b * PB < n, n, forced_below, free_below, PB,
                WHOLE, CLEAN,
            )  # fmt: skip
            b_win = b_s > score
            b_tie = ((b_s == score) & (o_u < n)).to(tl.int32)
            ties = tl.sum(b_tie)
            if ties <= tied:
                b_win |= b_tie != 0
            elif tied > 0:
                b_row = tl.sum(b_tie, 1)
                b_rank = (tl.cumsum(b_row, 0) - b_row)[:, None] + tl.cumsum(b_tie, 1)
                b_win |= (b_tie != 0) & (b_rank <= tied)
            tied -= tl.minimum(ties, tied)
            taken = store_winners(out_indices + i_l * capacity, b_win, o_u, taken, k)


def stream_topk_triton(
    scores: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    sink: int,
    recent: int,
    out_indices: torch.Tensor,
    workspace: TopkWorkspace,
    clean: bool,
    tile_blocks: int,
    tile_units: int,
) -> None:
    """Launch the four passes over parts, then :func:`stream_topk_kernel` for rows left over.

    Args:
        clean: scores hold neither NaN nor +inf.
        tile_blocks, tile_units: what :func:`select_topk_kernel` holds at a time.
    """
    rows, heads, width = scores.shape
    capacity, list_blocks = out_indices.shape[2], workspace.blocks.shape[2]
    most_open = min(list_blocks // STREAM_SPLITS, MOST_OPEN)
    row = (plan.tail_start, plan.k_units, plan.reselect)
    shapes = {
        "H": heads,
        "UNIT": unit,
        "BB": tile_blocks,
        "BU": tile_units,
        "BLOCK": BLOCK_UNITS,
        "CLEAN": clean,
        "COLUMNS": workspace.state.shape[2],
    }
    whole = width % BLOCK_UNITS == 0
    tiles = {"BT": PART_UNITS, "PB": PART_BLOCK, "SPLITS": STREAM_SPLITS}
    parts = (rows * heads, STREAM_SPLITS)
    bounds_kernel[parts[:1]](
        scores, workspace.state, *row, width, capacity, sink, recent,
        TILE=STREAM_UNITS, WHOLE=whole, num_warps=BOUNDS_WARPS, **shapes,
    )  # fmt: skip
    partition_kernel[parts](
        scores, workspace.blocks, workspace.state, *row, width, list_blocks, most_open, capacity,
        sink, recent,
        WHOLE=whole, num_warps=PART_WARPS, **tiles, **shapes,
    )  # fmt: skip
    least = -1
    for most in (FEW_OPEN, MOST_OPEN):
        threshold_kernel[parts[:1]](
            scores, workspace.blocks, workspace.state, *row, width, list_blocks, most_open, least,
            capacity, sink, recent,
            BC=most, SPLITS=STREAM_SPLITS, num_warps=SEARCH_WARPS, **shapes,
        )  # fmt: skip
        least = most
    write_kernel[parts](
        scores, workspace.state, *row, plan.list_rows, out_indices, width, capacity, sink, recent,
        WHOLE=whole, num_warps=PART_WARPS, **tiles, **shapes,
    )  # fmt: skip
    stream_topk_kernel[parts[:1]](
        scores, workspace.blocks, workspace.state, *row, plan.list_rows, out_indices, width,
        list_blocks, capacity, sink, recent,
        TILE=STREAM_UNITS, WHOLE=whole, num_warps=STREAM_WARPS, **shapes,
    )  # fmt: skip
