# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of exact top-k: prune whole blocks, then search the survivors.

The k best units lie in the k blocks with the largest maxima, so with k small against the context
only the block maxima and k blocks are read. Both searches keep their scores in the registers of
one program and interpolate the score that k of them reach; ties are cut by index. A row that does
not fit is read about four times: a sample bounds the k-th best score, and only the units between
the bounds are searched.
"""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..plan import DecodePlan
from .types import BLOCK_UNITS, TopkWorkspace

MAX_BLOCKS = 16384
MIN_UNITS, MAX_UNITS = 16384, 32768
MAX_WARPS = 16
BLOCK_MAX_TILE = 4096
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


def _tiles(width: int, capacity: int) -> tuple[int, int, int]:
    """(block maxima, units, warps): what one program holds in registers at a time."""
    blocks = next_power_of_2(triton.cdiv(width, BLOCK_UNITS))
    wanted = max(MIN_UNITS, next_power_of_2(capacity) * BLOCK_UNITS)
    units = min(wanted, MAX_UNITS, max(1024, next_power_of_2(width)))
    return min(max(blocks, 1024), MAX_BLOCKS), units, max(4, min(MAX_WARPS, units // 512))


@triton.jit
def block_max_kernel(
    scores,
    block_max,
    tail_start,
    k_units,
    reselect,
    width,
    blocks,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // H
    if (tl.load(reselect + i_r) != 0) & (tl.load(k_units + i_r) > 0):
        n = tl.cdiv(tl.load(tail_start + i_r), UNIT)
        o_b = tl.program_id(1) * (BT // BLOCK) + tl.arange(0, BT // BLOCK)
        o_u = o_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        # [BT / BLOCK, BLOCK]
        b_s = tl.load(scores + i_rh * width + o_u, mask=o_u < n, other=float("-inf"))
        b_s = tl.where(b_s == b_s, b_s, float("-inf"))
        tl.store(block_max + i_rh * blocks + o_b, tl.max(b_s, 1), mask=o_b * BLOCK < n)


@triton.jit
def _rankable(b_s, b_u, forced_below, free_below, n, CLEAN: tl.constexpr):
    """Scores of units ``b_u`` (of a block, its first) as they rank.

    Free are the units of [forced_below, free_below); the others are +inf below ``n``, where they
    are forced, and -inf from there on. Of the free ones NaN is -inf and -0 is +0; ``CLEAN`` scores
    hold neither, nor +inf.
    """
    if not CLEAN:
        b_s = tl.where(b_s == b_s, b_s, float("-inf"))
        b_s = tl.minimum(b_s, FLOAT32_MAX) + 0.0
    free = (b_u >= forced_below) & (b_u < free_below)
    return tl.where(free, b_s, tl.where(b_u < n, float("inf"), float("-inf")))


@triton.jit
def _key_of(score):
    """int32 that orders as the float does."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    """Inverse of :func:`_key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count_reaching(b_s, score, SIZE: tl.constexpr):
    """How many of ``SIZE`` scores are at least ``score``, a finite one."""
    # The sign of a difference counts in two instructions; a comparison takes three.
    return SIZE + tl.sum((b_s - score).to(tl.int32, bitcast=True) >> 31)


@triton.jit
def _probe(lo, hi, weight_lo, weight_hi, step):
    """Next key to count at: where the log of the count, linear in the score, would meet k.

    Every sixth step halves the range of keys instead, which bounds the steps of any distribution.
    """
    halved = (lo & hi) + ((lo ^ hi) >> 1) + 1
    score_lo, score_hi = _score_of(lo), _score_of(hi)
    score = score_lo + (score_hi - score_lo) * (weight_lo / (weight_lo + weight_hi))
    guess = tl.minimum(tl.maximum(_key_of(score), lo + 1), hi)
    usable = (step % 6 != 5) & (tl.abs(score) <= FLOAT32_MAX)
    return tl.where(usable, guess, halved)


@triton.jit
def _log_ratio(count, k):
    return tl.log2(tl.maximum(count.to(tl.float32), 0.5) / k)


@triton.jit
def _cut_ties(b_tie, last, ties, need):
    """Smallest index up to which ``need`` of the indices in ``b_tie`` lie."""
    lo = tl.full((), -1, tl.int32)
    hi = last
    count_lo = tl.full((), 0, tl.int32)
    count_hi = ties
    step = tl.full((), 0, tl.int32)
    while lo + 1 < hi:
        part = (need - count_lo).to(tl.float32) / tl.maximum(count_hi - count_lo, 1)
        guess = lo + ((hi - lo).to(tl.float32) * part).to(tl.int32)
        guess = tl.where(step % 4 == 3, (lo + hi) >> 1, guess)
        guess = tl.minimum(tl.maximum(guess, lo + 1), hi - 1)
        count = -tl.sum((b_tie - guess - 1) >> 31)
        lo = tl.where(count == need, guess - 1, tl.where(count > need, lo, guess))
        hi = tl.where(count >= need, guess, hi)
        count_lo = tl.where(count < need, count, count_lo)
        count_hi = tl.where(count >= need, count, count_hi)
        step += 1
    return hi


@triton.jit
def _winners(b_s, b_i, floor, last, k, SIZE: tl.constexpr):
    """(mask of the k best of ``SIZE`` scores, a score that all of them reach).

    Of equal scores those with the lower index ``b_i``, at most ``last``, win. ``floor`` is a score
    that at least k reach, or -inf.
    """
    forced = tl.sum((b_s == float("inf")).to(tl.int32))
    finite = tl.min(tl.where(b_s > float("-inf"), b_s, FLOAT32_MAX))
    low = tl.minimum(tl.maximum(finite, floor), FLOAT32_MAX)
    high = tl.max(tl.where(b_s < float("inf"), b_s, float("-inf")))
    count_lo = _count_reaching(b_s, low, SIZE)
    count_hi = forced
    lo = _key_of(low)
    searched = (forced < k) & (count_lo > k)
    hi = tl.where(searched, _key_of(high), lo)
    weight_lo = tl.abs(_log_ratio(count_lo, k))
    weight_hi = tl.abs(_log_ratio(forced, k))
    side = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while lo < hi:
        middle = _probe(lo, hi, weight_lo, weight_hi, step)
        count = _count_reaching(b_s, _score_of(middle), SIZE)
        weight = tl.abs(_log_ratio(count, k))
        # The end that moves takes its real weight; one that stays twice is pulled in (Illinois).
        up = count >= k
        moved = tl.where(up, 1, -1)
        stale = tl.where(moved == side, 0.5, 1.0)
        weight_lo = tl.where(up, weight, weight_lo * stale)
        weight_hi = tl.where(up, weight_hi * stale, weight)
        count_lo = tl.where(up, count, count_lo)
        count_hi = tl.where(up, count_hi, count)
        lo = tl.where(up, middle, lo)
        hi = tl.where(count == k, middle, tl.where(up, hi, middle - 1))
        side = moved
        step += 1

    above = count_hi
    score = _score_of(lo)
    if count_lo < k:
        # Fewer than k are finite: the rest are -inf.
        score = float("-inf") + tl.zeros_like(score)
        above = count_lo
        count_lo = tl.full((), SIZE, tl.int32)
    if forced >= k:
        score = float("inf") + tl.zeros_like(score)
        above = tl.full((), 0, tl.int32)
        count_lo = forced
    cut = last
    if count_lo != k:
        b_tie = tl.where(b_s == score, b_i, 2147483647)
        cut = _cut_ties(b_tie, last, count_lo - above, k - above)
    return (b_s > score) | ((b_s == score) & (b_i <= cut)), score


@triton.jit
def _store_winners(p_out, b_win, b_i, taken, k):
    """Write the indices of winners in order, after ``taken`` others; returns how many there are."""
    b_won = b_win.to(tl.int32)
    b_wins = tl.sum(b_won, 1)
    b_first = taken + tl.cumsum(b_wins, 0) - b_wins
    o_w = b_first[:, None] + tl.cumsum(b_won, 1) - 1
    tl.store(p_out + o_w, b_i, mask=b_win & (o_w < k))
    return taken + tl.sum(b_wins)


@triton.jit
def _prune(
    p_max,
    p_blocks,
    n,
    k,
    forced_below,
    free_below,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """List the k blocks that hold the k best units; returns a score that k units reach."""
    num_blocks = tl.cdiv(n, BLOCK)
    C: tl.constexpr = 16
    o_r = tl.arange(0, BT // C)
    o_b = o_r[:, None] * C + tl.arange(0, C)[None, :]
    # [BT / C, C]; rows are padded, so that they load whole.
    b_s = tl.load(p_max + o_b, mask=(o_r * C < num_blocks)[:, None], other=float("-inf"))
    o_u = o_b * BLOCK
    # With nothing recent to force, the last block is free whole.
    free_blocks = tl.where(free_below < n, free_below // BLOCK, num_blocks)
    b_s = _rankable(b_s, o_u, forced_below, free_blocks * BLOCK, n, CLEAN)
    b_win, floor = _winners(b_s, o_b, float("-inf"), num_blocks - 1, k, BT)
    _store_winners(p_blocks, b_win, o_b, 0, k)
    return floor


@triton.jit
def _load_units(
    p_scores,
    b_block,
    m_b,
    n,
    forced_below,
    free_below,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """(scores, units) [blocks, BLOCK]; ``WHOLE`` says that a row's last block is readable whole.

    Blocks that are masked off must lie past the end.
    """
    o_u = b_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        b_s = tl.load(p_scores + o_u, mask=m_b[:, None], other=float("-inf"))
    else:
        b_s = tl.load(p_scores + o_u, mask=m_b[:, None] & (o_u < n), other=float("-inf"))
    return _rankable(b_s, o_u, forced_below, free_below, n, CLEAN), o_u


@triton.jit
def _take(
    p_scores,
    p_blocks,
    p_out,
    pruned,
    floor,
    num_blocks,
    n,
    k,
    forced_below,
    free_below,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Write the k best units of the listed blocks, or of all blocks if not ``pruned``."""
    o_b = tl.arange(0, BT // BLOCK)
    m_b = o_b < num_blocks
    b_block = tl.load(p_blocks + o_b, mask=m_b & pruned, other=0)
    b_block = tl.where(pruned & m_b, b_block, tl.where(m_b, o_b, tl.cdiv(n, BLOCK)))
    # [BT / BLOCK, BLOCK]
    b_s, o_u = _load_units(p_scores, b_block, m_b, n, forced_below, free_below, BLOCK, WHOLE, CLEAN)
    b_win, _ = _winners(b_s, o_u, floor, n - 1, k, BT)
    _store_winners(p_out, b_win, o_u, 0, k)


@triton.jit
def _sample_bounds(
    p_scores,
    n,
    k,
    forced_below,
    free_below,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """(low, high): scores that the k-th best of n units lies between, most likely.

    Every so many blocks are looked at; units of a block are alike, so a block counts as one draw
    and the bounds are four standard deviations of that apart.
    """
    ROWS: tl.constexpr = BT // BLOCK
    num_blocks = tl.cdiv(n, BLOCK)
    o_b = (tl.arange(0, ROWS).to(tl.int64) * num_blocks // ROWS).to(tl.int32)
    b_s, o_u = _load_units(
        p_scores, o_b, o_b < num_blocks, n, forced_below, free_below, BLOCK, WHOLE, CLEAN
    )
    share = k.to(tl.float32) / n
    middle = share * BT
    margin = 4.0 * tl.sqrt(middle * BLOCK * (1.0 - share)) + BLOCK
    rank_low = tl.minimum(middle + margin, BT).to(tl.int32)
    rank_high = tl.maximum(middle - margin, 1.0).to(tl.int32)
    _, low = _winners(b_s, o_u, float("-inf"), n - 1, rank_low, BT)
    _, high = _winners(b_s, o_u, float("-inf"), n - 1, rank_high, BT)
    return low, high


@triton.jit
def _take_streamed(
    p_scores,
    p_list,
    p_out,
    n,
    k,
    forced_below,
    free_below,
    list_blocks,
    BT: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Write the k best of any number of units, which are read a few times over.

    A sample says between which scores the k-th best lies; two counts narrow it to that, and more
    halve it, until the units in question fit in registers or are all equal.
    """
    ROWS: tl.constexpr = BT // BLOCK
    num_blocks = tl.cdiv(n, BLOCK)
    limit = tl.minimum(list_blocks, BT)
    low, high = _sample_bounds(
        p_scores, n, k, forced_below, free_below, SAMPLE, BLOCK, WHOLE, CLEAN
    )
    # Keys of -inf and +inf: count_lo scores, at least k, reach lo; above, fewer than k, pass hi.
    lo = tl.full((), -2139095041, tl.int32)
    hi = tl.full((), 2139095040, tl.int32)
    count_lo = tl.full((), 0, tl.int32) + n
    above = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while (lo < hi) & (count_lo - above > limit):
        middle = (lo & hi) + ((lo ^ hi) >> 1) + 1
        middle = tl.where(step == 0, _key_of(high), middle)
        middle = tl.where(step == 1, _key_of(low), middle)
        middle = tl.minimum(tl.maximum(middle, lo + 1), hi)
        score = _score_of(middle)
        count = tl.full((), 0, tl.int32)
        for i_b in range(0, num_blocks, ROWS):
            o_b = i_b + tl.arange(0, ROWS)
            b_s, _ = _load_units(
                p_scores, o_b, o_b < num_blocks, n, forced_below, free_below, BLOCK, WHOLE, CLEAN
            )
            count += tl.sum((b_s >= score).to(tl.int32))
        above = tl.where(count >= k, above, count)
        count_lo = tl.where(count >= k, count, count_lo)
        lo = tl.where(count >= k, middle, lo)
        hi = tl.where(count >= k, hi, middle - 1)
        step += 1
    score = _score_of(lo)
    if lo < hi:
        # List the units in question, find the k-th best among them.
        top = _score_of(hi)
        listed = tl.full((), 0, tl.int32)
        for i_b in range(0, num_blocks, ROWS):
            o_b = i_b + tl.arange(0, ROWS)
            b_s, o_u = _load_units(
                p_scores, o_b, o_b < num_blocks, n, forced_below, free_below, BLOCK, WHOLE, CLEAN
            )
            b_open = (b_s >= score) & (b_s <= top) & (o_u < n)
            listed = _store_winners(p_list, b_open, o_u, listed, limit)
        # The list is read back by other threads of this program.
        tl.debug_barrier()
        o_l = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        m_l = o_l < listed
        b_u = tl.load(p_list + o_l, mask=m_l, other=2147483647)
        b_s = tl.load(p_scores + b_u, mask=m_l, other=float("-inf"))
        b_s = _rankable(b_s, b_u, forced_below, free_below, n, CLEAN)
        _, score = _winners(b_s, b_u, float("-inf"), n - 1, k - above, BT)
        above += tl.sum(((b_s > score) & m_l).to(tl.int32))
    taken = tl.full((), 0, tl.int32)
    tied = above
    for i_b in range(0, num_blocks, ROWS):
        o_b = i_b + tl.arange(0, ROWS)
        # [ROWS, BLOCK]
        b_s, o_u = _load_units(
            p_scores, o_b, o_b < num_blocks, n, forced_below, free_below, BLOCK, WHOLE, CLEAN
        )
        b_tie = ((b_s == score) & (o_u < n)).to(tl.int32)
        b_ties = tl.sum(b_tie, 1)
        b_before = tied + tl.cumsum(b_ties, 0) - b_ties
        b_rank = b_before[:, None] + tl.cumsum(b_tie, 1)
        b_win = (b_s > score) | ((b_tie != 0) & (b_rank <= k))
        taken = _store_winners(p_out, b_win, o_u, taken, k)
        tied += tl.sum(b_ties)


@triton.jit
def select_topk_kernel(
    scores,
    block_max,
    block_list,
    tail_start,
    k_units,
    reselect,
    list_rows,
    out_indices,
    out_counts,
    width,
    blocks,
    list_blocks,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BB: tl.constexpr,
    BU: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEAN: tl.constexpr,
):
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // H
    # What the row's plan says is read at once, not one answer after the other.
    reselected = tl.load(reselect + i_r) != 0
    tokens = tl.load(tail_start + i_r)
    n = tl.cdiv(tokens, UNIT)
    k = tl.minimum(tl.minimum(tl.load(k_units + i_r), n), capacity)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
    if reselected:
        tl.store(out_counts + i_l, k)
        if k > 0:
            forced_below = tl.cdiv(sink, UNIT)
            free_below = tl.minimum(tl.maximum(tokens - recent, 0) // UNIT, n)
            p_scores = scores + i_rh * width
            p_max = block_max + i_rh * blocks
            p_blocks = block_list + i_rh * list_blocks
            p_out = out_indices + i_l * capacity
            num_blocks = tl.cdiv(n, BLOCK)
            # A quarter of the tile is enough for short rows, at a quarter of the work.
            SB: tl.constexpr = BB // 4
            SU: tl.constexpr = BU // 4
            if n <= SU:
                _take(
                    p_scores, p_blocks, p_out, False, float("-inf"), num_blocks, n, k,
                    forced_below, free_below, SU, BLOCK, WHOLE, CLEAN,
                )  # fmt: skip
            elif (n > BU) & ((num_blocks > BB) | (k * BLOCK > BU)):
                _take_streamed(
                    p_scores, p_blocks, p_out, n, k, forced_below, free_below, list_blocks,
                    BU, SU, BLOCK, WHOLE, CLEAN,
                )  # fmt: skip
            else:
                pruned = n > BU
                floor = tl.full((), float("-inf"), tl.float32)
                if pruned:
                    if num_blocks <= SB:
                        floor = _prune(
                            p_max, p_blocks, n, k, forced_below, free_below, SB, BLOCK, CLEAN
                        )
                    else:
                        floor = _prune(
                            p_max, p_blocks, n, k, forced_below, free_below, BB, BLOCK, CLEAN
                        )
                    num_blocks = k
                    # The list is read back by other threads of this program.
                    tl.debug_barrier()
                _take(
                    p_scores, p_blocks, p_out, pruned, floor, num_blocks, n, k,
                    forced_below, free_below, BU, BLOCK, WHOLE, CLEAN,
                )  # fmt: skip


def select_topk_triton(
    scores: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    sink: int,
    recent: int,
    out_indices: torch.Tensor,
    out_counts: torch.Tensor,
    workspace: TopkWorkspace,
    has_block_max: bool,
) -> None:
    """Launch :func:`select_topk_kernel`, one program a row and KV head; block maxima first."""
    rows, heads, width = scores.shape
    blocks = workspace.block_max.shape[2]
    capacity = out_indices.shape[2]
    if not has_block_max:
        block_max_kernel[(rows * heads, triton.cdiv(width, BLOCK_MAX_TILE))](
            scores,
            workspace.block_max,
            plan.tail_start,
            plan.k_units,
            plan.reselect,
            width,
            blocks,
            H=heads,
            UNIT=unit,
            BT=BLOCK_MAX_TILE,
            BLOCK=BLOCK_UNITS,
        )
    tile_blocks, tile_units, warps = _tiles(width, capacity)
    select_topk_kernel[(rows * heads,)](
        scores,
        workspace.block_max,
        workspace.blocks,
        plan.tail_start,
        plan.k_units,
        plan.reselect,
        plan.list_rows,
        out_indices,
        out_counts,
        width,
        blocks,
        workspace.blocks.shape[2],
        capacity,
        sink,
        recent,
        H=heads,
        UNIT=unit,
        BB=tile_blocks,
        BU=tile_units,
        BLOCK=BLOCK_UNITS,
        WHOLE=width % BLOCK_UNITS == 0,
        CLEAN=has_block_max,
        num_warps=warps,
    )
