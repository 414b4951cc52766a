# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Bounds of the k-th best score of a streamed row, from samples of its scores."""

import triton
import triton.language as tl

from .one_program import ranks_around, sample_bounds, streamed_row
from .search import free_range, key_of, kth_best, load_units

# Columns of a row's state.
LOW, HIGH = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _closer_bounds(
    p_scores,
    p_list,
    low,
    high,
    n,
    k,
    rounds,
    room,
    free,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Closer bounds of the k-th best score, from a sample of ``rounds`` times ``BT`` units.

    Only the units of the sample that lie between ``low`` and ``high`` are listed and searched. If
    they are more than ``room``, the result is ``low`` and ``high``.
    """
    ROWS: tl.constexpr = BT // BLOCK
    num_blocks = tl.cdiv(n, BLOCK)
    above = tl.full((), 0, tl.int32)
    between = tl.full((), 0, tl.int32)
    for i_r in range(rounds):
        o_b = tl.arange(0, ROWS).to(tl.int64) * rounds + i_r
        o_b = (o_b * num_blocks // (ROWS * rounds)).to(tl.int32)
        b_s, _ = load_units(p_scores, o_b, o_b < num_blocks, n, free, BLOCK, WHOLE)
        above += tl.sum((b_s > high).to(tl.int32))
        b_between = ((b_s >= low) & (b_s <= high)).to(tl.int32)
        b_row = tl.sum(b_between, 1)
        o_w = (between + tl.cumsum(b_row, 0) - b_row)[:, None] + tl.cumsum(b_between, 1) - 1
        m_w = (b_between != 0) & (o_w < room)
        tl.store(p_list + o_w, b_s.to(tl.int32, bitcast=True), mask=m_w)
        between += tl.sum(b_row)
    lower, upper, slack = ranks_around(k, n, rounds * BT, BLOCK)
    lower, upper = lower - above, upper - above
    if (between <= room) & (upper > 0) & (lower <= between):
        # The list is read back by other threads of this program.
        tl.debug_barrier()
        o_l = tl.arange(0, BT)
        b_s = tl.load(p_list + o_l, mask=o_l < between, other=-8388608)  # bits of -inf
        b_s = b_s.to(tl.float32, bitcast=True)
        forced = tl.sum((b_s == float("inf")).to(tl.int32))
        low, _, _ = kth_best(b_s, low, forced, lower, lower + slack, BT)
        high, _, _ = kth_best(b_s, low, forced, upper, upper + slack, BT)
    return low, high


@triton.jit
def bounds_kernel(
    scores,
    between,
    state,
    domain,
    width,
    between_held,
    most_between,
    S: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find two scores between which the k-th best score of a streamed row most likely lies."""
    streamed, tokens, n, k = streamed_row(domain, S)
    if streamed:
        i_rh = tl.program_id(0).to(tl.int64)
        p_scores, p_list = scores + i_rh * width, between + i_rh * between_held
        free = free_range(domain, tokens, n, S.UNIT)
        low, high = sample_bounds(p_scores, n, k, free, TILE, S.BLOCK, S.WHOLE)
        # At most some 15 standard deviations of a rank in the sample lie between the bounds. With a
        # sample of this size, that is five sixths of the units that may be listed for a row.
        share = k.to(tl.float32) / n
        variance, spread = share * (1.0 - share), n.to(tl.float32) * 18 / most_between
        rounds = variance * spread * spread / TILE
        # What lies between the bounds of the first sample must fit, too.
        most = tl.minimum(between_held, TILE)
        room = most / (15.0 * tl.sqrt(variance * TILE) + 3.0 * S.BLOCK)
        rounds = tl.ceil(tl.minimum(rounds, room - 1.0)).to(tl.int32)
        if rounds > 1:
            low, high = _closer_bounds(
                p_scores, p_list, low, high, n, k, rounds, most, free, TILE,
                S.BLOCK, S.WHOLE,
            )  # fmt: skip
        tl.store(state + i_rh * S.COLUMNS + LOW, key_of(low))
        tl.store(state + i_rh * S.COLUMNS + HIGH, key_of(high))
