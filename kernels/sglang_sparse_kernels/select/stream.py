# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Exact top-k of rows that do not fit in the registers of one program, such as a tenth of 128K.

A sample bounds the k-th best score. Long rows take a larger sample, which bounds it more closely.
Several programs share a row: they count the units above the bounds and list the units between them.
One program searches the listed units, and several write the winners in order. So a row is read
twice. Where all units between the bounds are equal, no list is needed to tell how many each split
takes. Where the sample misled, or too many units lie between the bounds, one program reads the row
some four times instead.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..records import Lists, Scores
from ..triton_ops import constants
from .bounds_kernel import HIGH, LOW, bounds_kernel
from .one_program import DONE, stream_topk_kernel, streamed_row
from .search import Domain, Held, free_range, key_of, kth_best, rankable, score_of
from .types import STREAM_SPLITS, TopkWorkspace

# Sizes, warps and registers were measured on one H200.
STREAM_UNITS, STREAM_WARPS = 8192, 16
BOUNDS_WARPS = SEARCH_WARPS = 8
TILE_UNITS, TILE_WARPS = 512, 1
# Limits of the units between the bounds: how many a split may list, and how many slots the lists of
# all splits may fill in the first of two launches and in the second. With 64 registers four
# programs share a multiprocessor.
MOST_BETWEEN, CHUNK = 1024, 32
FEW_LISTED, MOST_LISTED = 8192, 16384
FEW_REGISTERS, MOST_REGISTERS = 64, 128

# Columns of a row's state behind its bounds: the k-th best score; how many units that equal it win.
# Then, for each split, the units above the bounds, the units between them, the units above the k-th
# best and the units equal to it. The last two count all splits up to this one.
_SCORE, _TIES, _SPLITS = (tl.constexpr(i) for i in (2, 3, 8))


class StreamSplit(NamedTuple):
    """Constants: SPLITS programs share a row, TILE units are read at a time, CHUNK are a chunk."""

    SPLITS: int
    TILE: int
    CHUNK: int


@triton.jit
def _split(n, BT: tl.constexpr, SPLITS: tl.constexpr):
    """[first, last) of this program's split, in tiles."""
    tiles = tl.cdiv(n, BT)
    share = tl.cdiv(tiles, SPLITS)
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, tiles)


@triton.jit
def _load_tile(p_scores, i_t, n, free, BT: tl.constexpr, WHOLE: tl.constexpr):
    """(scores, units) [BT / 16, 4, 4] of a tile; NaN past the end."""
    # Each lane loads four neighbouring units, four times, so a warp loads whole cache lines.
    o_q = tl.arange(0, BT // 16)[:, None] * 4 + tl.arange(0, 4)[None, :] * (BT // 4)
    o_q += i_t * BT
    o_u = o_q[:, :, None] + tl.arange(0, 4)[None, None, :]
    m_u = (o_q < n)[:, :, None]
    if not WHOLE:
        m_u &= o_u < n
    b_s = tl.load(p_scores + o_u, mask=m_u)
    first, last = free
    if (i_t * BT < first) | (i_t * BT + BT > last):
        b_s = rankable(b_s, o_u, free, n)
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
    between,
    state,
    domain,
    width,
    between_held,
    most_between,
    S: tl.constexpr,
    P: tl.constexpr,
):
    """Count a split's units above the bounds; list the scores between them, and count them."""
    streamed, tokens, n, _ = streamed_row(domain, S)
    if streamed:
        i_rh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
        free = free_range(domain, tokens, n, S.UNIT)
        p_state = state + i_rh * S.COLUMNS
        p_list = between + i_rh * between_held + i_s * most_between
        low, high = score_of(tl.load(p_state + LOW)), score_of(tl.load(p_state + HIGH))
        b_above = tl.zeros((P.TILE // 16,), tl.int32)
        count = tl.full((), 0, tl.int32)
        first, last = _split(n, P.TILE, P.SPLITS)
        for i_t in range(first, last):
            b_s, _o_u = _load_tile(scores + i_rh * width, i_t, n, free, P.TILE, S.WHOLE)
            b_above += tl.sum(tl.sum((b_s > high).to(tl.int32), 2), 1)
            b_between = (b_s >= low) & (b_s <= high)
            b_rank, more = _ranks(b_between)
            m_w = b_between & (count + b_rank < most_between)
            tl.store(p_list + count + b_rank, b_s.to(tl.int32, bitcast=True), mask=m_w)
            count += more
        # The last chunk is filled up with -inf, which never wins.
        o_w = count + tl.arange(0, P.CHUNK)
        m_w = o_w < tl.minimum(tl.cdiv(count, P.CHUNK) * P.CHUNK, most_between)
        b_fill = tl.full((P.CHUNK,), float("-inf"), tl.float32).to(tl.int32, bitcast=True)
        tl.store(p_list + o_w, b_fill, mask=m_w)
        tl.store(p_state + _SPLITS + i_s, tl.sum(b_above))
        tl.store(p_state + _SPLITS + P.SPLITS + i_s, count)


@triton.jit
def _search(p_list, b_chunks, k, low, most_between, SIZE: tl.constexpr, P: tl.constexpr):
    """(k-th best of the listed scores; how many are above it, how many equal it, up to each split).

    ``SIZE`` scores fit; ``low`` is one that at least k reach.
    """
    o_c, o_i = tl.arange(0, SIZE // P.CHUNK), tl.arange(0, P.CHUNK)
    # [SPLITS]: chunks of the splits up to each one
    b_end = tl.cumsum(b_chunks, 0)
    # [SIZE / CHUNK]: where chunks lie, one split after the other
    b_skip = tl.where(
        o_c[:, None] >= b_end[None, :], most_between // P.CHUNK - b_chunks[None, :], 0
    )
    b_at = (o_c + tl.sum(b_skip, 1)) * P.CHUNK
    m_c = o_c < tl.sum(b_chunks)
    # [SIZE / CHUNK, CHUNK]; bits of -inf
    b_s = tl.load(p_list + b_at[:, None] + o_i[None, :], mask=m_c[:, None], other=-8388608)
    b_s = b_s.to(tl.float32, bitcast=True)
    forced = tl.sum((b_s == float("inf")).to(tl.int32))
    score, _, _ = kth_best(b_s, low, forced, k, k, SIZE)
    # Both counts in one word, up to each chunk, then up to the last one of each split
    b_count = (b_s > score).to(tl.int32) + ((b_s == score).to(tl.int32) << 16)
    b_upto = tl.cumsum(tl.sum(b_count, 1), 0)
    b_upto = tl.where(b_end > 0, tl.gather(b_upto, tl.maximum(b_end - 1, 0), 0), 0)
    return score, b_upto & 65535, b_upto >> 16


@triton.jit
def threshold_kernel(
    between,
    state,
    domain,
    between_held,
    most_between,
    min_slots,
    S: tl.constexpr,
    P: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Search the units between the bounds, and write for each split where its winners begin.

    Takes the rows whose lists fill more than ``min_slots`` slots and at most ``SIZE``.
    """
    streamed, _, _, k = streamed_row(domain, S)
    if streamed:
        i_rh = tl.program_id(0).to(tl.int64)
        p_state = state + i_rh * S.COLUMNS
        p_list = between + i_rh * between_held
        o_s = tl.arange(0, P.SPLITS)
        # [SPLITS]
        b_above = tl.load(p_state + _SPLITS + o_s)
        b_between = tl.load(p_state + _SPLITS + P.SPLITS + o_s)
        above = tl.sum(b_above)
        b_chunks = tl.cdiv(b_between, P.CHUNK)
        slots = tl.sum(b_chunks) * P.CHUNK
        low = score_of(tl.load(p_state + LOW))
        equal = low == score_of(tl.load(p_state + HIGH))
        if slots > min_slots:
            done = (above < k) & (k <= above + tl.sum(b_between))
            # What fills up chunks is -inf.
            fits = (low > float("-inf")) & (tl.max(b_between) <= most_between) & (slots <= SIZE)
            done &= equal | fits
            tl.store(p_state + DONE, done.to(tl.int32))
            if done:
                # [SPLITS]
                b_over, b_tied = tl.zeros_like(b_between), tl.cumsum(b_between, 0)
                score = low
                if not equal:
                    if slots <= SIZE // 2:
                        score, b_over, b_tied = _search(
                            p_list, b_chunks, k - above, low, most_between, SIZE // 2, P
                        )
                    else:
                        score, b_over, b_tied = _search(
                            p_list, b_chunks, k - above, low, most_between, SIZE, P
                        )
                b_over += tl.cumsum(b_above, 0)
                tl.store(p_state + _SCORE, key_of(score))
                tl.store(p_state + _TIES, k - tl.max(b_over))
                tl.store(p_state + _SPLITS + 2 * P.SPLITS + o_s, b_over)
                tl.store(p_state + _SPLITS + 3 * P.SPLITS + o_s, b_tied)


@triton.jit
def write_kernel(
    scores, state, domain, list_rows, out_indices, width, S: tl.constexpr, P: tl.constexpr
):
    """Write a split's winners behind those of the splits before it."""
    streamed, tokens, n, _ = streamed_row(domain, S)
    i_rh, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_state = state + i_rh * S.COLUMNS
    if streamed & (tl.load(p_state + DONE) != 0):
        free = free_range(domain, tokens, n, S.UNIT)
        i_l = tl.load(list_rows + tl.program_id(0) // S.H).to(tl.int64) * S.H + i_rh % S.H
        key, ties = tl.load(p_state + _SCORE), tl.load(p_state + _TIES)
        # The first units that equal the k-th best win.
        p_upto = p_state + _SPLITS + 2 * P.SPLITS + i_s
        before = tl.load(p_upto + P.SPLITS - 1, mask=i_s > 0, other=0)
        all_win = tl.load(p_upto + P.SPLITS) <= ties
        taken = tl.load(p_upto - 1, mask=i_s > 0, other=0) + tl.minimum(before, ties)
        ties = tl.maximum(ties - before, 0)
        some_win = (ties > 0) & (not all_win)
        score, threshold = score_of(key), score_of(key + (ties == 0).to(tl.int32))
        p_out = out_indices + i_l * domain.capacity
        first, last = _split(n, P.TILE, P.SPLITS)
        for i_t in range(first, last):
            b_s, o_u = _load_tile(scores + i_rh * width, i_t, n, free, P.TILE, S.WHOLE)
            b_win = b_s >= threshold
            if some_win:
                b_rank, tied = _ranks(b_s == score)
                b_win &= (b_s > score) | (b_rank < ties)
                ties -= tied
            b_rank, wins = _ranks(b_win)
            tl.store(p_out + taken + b_rank, o_u, mask=b_win)
            taken += wins


def stream_topk_triton(
    scores: Scores, lists: Lists, domain: Domain, held: Held, workspace: TopkWorkspace
) -> None:
    """Launch the passes over splits, then :func:`stream_topk_kernel` for rows left over."""
    rows, heads, width = scores.values.shape
    between, state, between_held = workspace.blocks, workspace.state, workspace.blocks.shape[2]
    most_between = min(between_held // STREAM_SPLITS, MOST_BETWEEN) // CHUNK * CHUNK
    shapes = {"S": constants(held), "P": constants(StreamSplit(STREAM_SPLITS, TILE_UNITS, CHUNK))}
    splits = (rows * heads, STREAM_SPLITS)
    bounds_kernel[splits[:1]](
        scores.values, between, state, domain, width, between_held,
        min(MOST_LISTED, STREAM_SPLITS * max(most_between, CHUNK)),
        S=shapes["S"], TILE=STREAM_UNITS, num_warps=BOUNDS_WARPS,
    )  # fmt: skip
    partition_kernel[splits](
        scores.values, between, state, domain, width, between_held, most_between,
        **shapes, num_warps=TILE_WARPS,
    )  # fmt: skip
    min_slots = -1
    for most, registers in ((FEW_LISTED, FEW_REGISTERS), (MOST_LISTED, MOST_REGISTERS)):
        threshold_kernel[splits[:1]](
            between, state, domain, between_held, most_between, min_slots,
            **shapes, SIZE=most, num_warps=SEARCH_WARPS, maxnreg=registers,
        )  # fmt: skip
        min_slots = most
    write_kernel[splits](
        scores.values, state, domain, lists.rows, lists.indices, width,
        **shapes, num_warps=TILE_WARPS,
    )  # fmt: skip
    stream_topk_kernel[splits[:1]](
        scores.values, between, state, domain, lists.rows, lists.indices, width,
        between_held,
        S=shapes["S"], TILE=STREAM_UNITS, num_warps=STREAM_WARPS,
    )  # fmt: skip
