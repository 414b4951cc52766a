# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Exact top-k by one program, for a row that does not fit in its registers.

The row is read about four times. A sample bounds the k-th best score, and two counts test the
bounds. Only the units between the bounds are searched, and a last pass writes the list in order.
"""

import triton
import triton.language as tl

from .search import (
    free_range,
    key_of,
    kth_best,
    load_units,
    rankable,
    row_budget,
    score_of,
    store_winners,
    winners,
)

DONE = tl.constexpr(4)  # column of a row's state: whether several programs have finished it


@triton.jit
def is_streamed(n, k, S: tl.constexpr):
    """Whether a row is streamed: it fits in registers neither whole nor pruned."""
    return (n > S.UNITS) & ((tl.cdiv(n, S.BLOCK) > S.BLOCKS) | (k * S.BLOCK > S.UNITS))


@triton.jit
def streamed_row(domain, S: tl.constexpr):
    """(whether this program's row is streamed, its tokens, units and budget)."""
    reselected, tokens, n, k = row_budget(domain, S)
    return reselected & (k > 0) & is_streamed(n, k, S), tokens, n, k


@triton.jit
def ranks_around(k, n, size, BLOCK: tl.constexpr):
    """(lower, upper, slack): two ranks in a sample between which the k-th best of n units lies.

    Units of one block are alike, so four of them count as one independent draw. The ranks lie three
    standard deviations of such a sample apart from the expected rank. A search may end up to
    ``slack`` ranks further out, since going on would cost more than the units that it saves.
    """
    share = k.to(tl.float32) / n
    middle = share * size
    margin = 3.0 * tl.sqrt(middle * 4.0 * (1.0 - share)) + BLOCK
    slack = (margin / 4).to(tl.int32)
    lower = tl.minimum(middle + margin, size).to(tl.int32)
    upper = tl.maximum(middle - margin, 1.0).to(tl.int32)
    return lower, tl.maximum(upper - slack, 1), slack


@triton.jit
def sample_bounds(p_scores, n, k, free, BT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """(low, high): two scores between which the k-th best of n units most likely lies.

    The sample is made of blocks at equal distances. A wrong bound costs one more read of the row.
    """
    ROWS: tl.constexpr = BT // BLOCK
    num_blocks = tl.cdiv(n, BLOCK)
    o_b = (tl.arange(0, ROWS).to(tl.int64) * num_blocks // ROWS).to(tl.int32)
    b_s, _ = load_units(p_scores, o_b, o_b < num_blocks, n, free, BLOCK, WHOLE)
    forced = tl.sum((b_s == float("inf")).to(tl.int32))
    lower, upper, slack = ranks_around(k, n, BT, BLOCK)
    low, _, _ = kth_best(b_s, float("-inf"), forced, lower, lower + slack, BT)
    high, _, _ = kth_best(b_s, low, forced, upper, upper + slack, BT)
    return low, high


@triton.jit
def take_streamed(
    p_scores,
    p_list,
    p_out,
    n,
    k,
    free,
    list_blocks,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the k best of any number of units.

    ``TILE`` units are read, sampled or searched at a time. A sample says between which scores the
    k-th best most likely lies, and two counts over the row test these bounds. More counts halve the
    range, until the units in it fit in registers or are all equal.
    """
    ROWS: tl.constexpr = TILE // BLOCK
    num_blocks = tl.cdiv(n, BLOCK)
    limit = tl.minimum(list_blocks, TILE)
    low, high = sample_bounds(p_scores, n, k, free, TILE, BLOCK, WHOLE)
    # Keys of -inf and +inf. At least k scores (count_lo) reach lo; fewer than k (above) lie above
    # hi.
    lo = tl.full((), -2139095041, tl.int32)
    hi = tl.full((), 2139095040, tl.int32)
    count_lo = tl.full((), 0, tl.int32) + n
    above = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while (lo < hi) & (count_lo - above > limit):
        middle = (lo & hi) + ((lo ^ hi) >> 1) + 1
        middle = tl.where(step == 0, key_of(high), middle)
        middle = tl.where(step == 1, key_of(low), middle)
        middle = tl.minimum(tl.maximum(middle, lo + 1), hi)
        score = score_of(middle)
        count = tl.full((), 0, tl.int32)
        for i_b in range(0, num_blocks, ROWS):
            o_b = i_b + tl.arange(0, ROWS)
            b_s, _ = load_units(p_scores, o_b, o_b < num_blocks, n, free, BLOCK, WHOLE)
            count += tl.sum((b_s >= score).to(tl.int32))
        above = tl.where(count >= k, above, count)
        count_lo = tl.where(count >= k, count, count_lo)
        lo = tl.where(count >= k, middle, lo)
        hi = tl.where(count >= k, hi, middle - 1)
        step += 1
    score = score_of(lo)
    if lo < hi:
        # List the units in question, find the k-th best among them. Counting scores that reach the
        # key above hi counts -0 and +0 alike, though their keys differ.
        top = score_of(hi + 1)
        between = tl.full((), 0, tl.int32)
        for i_b in range(0, num_blocks, ROWS):
            o_b = i_b + tl.arange(0, ROWS)
            b_s, o_u = load_units(p_scores, o_b, o_b < num_blocks, n, free, BLOCK, WHOLE)
            b_open = (b_s >= score) & ~(b_s >= top) & (o_u < n)
            between = store_winners(p_list, b_open, o_u, between, limit)
        # The list is read back by other threads of this program.
        tl.debug_barrier()
        o_l = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        m_l = o_l < between
        b_u = tl.load(p_list + o_l, mask=m_l, other=2147483647)
        b_s = tl.load(p_scores + b_u, mask=m_l, other=float("-inf"))
        b_s = rankable(b_s, b_u, free, n)
        _, score = winners(b_s, b_u, float("-inf"), n - 1, k - above, TILE)
        above += tl.sum(((b_s > score) & m_l).to(tl.int32))
    taken = tl.full((), 0, tl.int32)
    tied = above
    for i_b in range(0, num_blocks, ROWS):
        o_b = i_b + tl.arange(0, ROWS)
        # [ROWS, BLOCK]
        b_s, o_u = load_units(p_scores, o_b, o_b < num_blocks, n, free, BLOCK, WHOLE)
        b_tie = ((b_s == score) & (o_u < n)).to(tl.int32)
        b_ties = tl.sum(b_tie, 1)
        b_before = tied + tl.cumsum(b_ties, 0) - b_ties
        b_rank = b_before[:, None] + tl.cumsum(b_tie, 1)
        b_win = (b_s > score) | ((b_tie != 0) & (b_rank <= k))
        taken = store_winners(p_out, b_win, o_u, taken, k)
        tied += tl.sum(b_ties)


@triton.jit
def stream_topk_kernel(
    scores,
    block_list,
    state,
    domain,
    list_rows,
    out_indices,
    width,
    list_blocks,
    S: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows that the splits did not finish, by one program each."""
    streamed, tokens, n, k = streamed_row(domain, S)
    i_rh = tl.program_id(0).to(tl.int64)
    if streamed & (tl.load(state + i_rh * S.COLUMNS + DONE) == 0):
        i_l = tl.load(list_rows + tl.program_id(0) // S.H).to(tl.int64) * S.H + i_rh % S.H
        free = free_range(domain, tokens, n, S.UNIT)
        take_streamed(
            scores + i_rh * width, block_list + i_rh * list_blocks,
            out_indices + i_l * domain.capacity, n, k, free, list_blocks,
            TILE, S.BLOCK, S.WHOLE,
        )  # fmt: skip
