# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Device functions that rank scores in the registers of one program."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton_ops import FLOAT32_MAX, is_read

# A search guesses scores that need not exist, which is cheap, until few scores are left or for this
# many steps.
SNAP_AT, SNAP_AFTER = tl.constexpr(32), tl.constexpr(8)


class Domain(NamedTuple):
    """The domain of each row, which of its units are always selected, and which lists are read."""

    tail_start: torch.Tensor
    k_units: torch.Tensor
    reselect: torch.Tensor
    sink: int
    recent: int
    capacity: int
    unread: torch.Tensor | None


class Held(NamedTuple):
    """Constants: shapes, and how much of a row one program holds in registers.

    BLOCKS block maxima and UNITS units are held, BLOCK units are a block. WHOLE says that a row's
    last block is readable whole, COLUMNS are the columns of a row's state.
    """

    H: int
    UNIT: int
    BLOCK: int
    WHOLE: bool
    COLUMNS: int
    BLOCKS: int
    UNITS: int


@triton.jit
def row_budget(domain, S: tl.constexpr):
    """(whether this program's list is selected anew, tokens of its domain, units of that, budget).

    Programs are those of rows and lists.
    """
    i_r = tl.program_id(0) // S.H
    reselected = tl.load(domain.reselect + i_r) != 0
    reselected &= is_read(domain.unread, tl.program_id(0) % S.H)
    tokens = tl.load(domain.tail_start + i_r)
    n = tl.cdiv(tokens, S.UNIT)
    k = tl.minimum(tl.minimum(tl.load(domain.k_units + i_r), n), domain.capacity)
    return reselected, tokens, n, k


@triton.jit
def free_range(domain, tokens, n, UNIT: tl.constexpr):
    """[first, last) of the units that are not always selected."""
    first = tl.cdiv(domain.sink, UNIT)
    return first, tl.minimum(tl.maximum(tokens - domain.recent, 0) // UNIT, n)


@triton.jit
def rankable(b_s, b_u, free, n):
    """Scores of units ``b_u`` as they rank; of a block, ``b_u`` is its first unit.

    Units of the range [first, last) ``free`` are ranked by their scores. The other units below
    ``n`` are forced and become +inf. Units from ``n`` on do not exist and become -inf.
    """
    first, last = free
    m_free = (b_u >= first) & (b_u < last)
    return tl.where(m_free, b_s, tl.where(b_u < n, float("inf"), float("-inf")))


@triton.jit
def forced_of(free, n):
    """How many of n units are forced: those out of the range ``free``."""
    first, start = free
    below = tl.minimum(first, n)
    return below + n - tl.maximum(start, below)


@triton.jit
def key_of(score):
    """int32 that orders as the float does; -0 has the key of +0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Inverse of :func:`key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def count_reaching(b_s, score, SIZE: tl.constexpr):
    """How many of ``SIZE`` scores are at least ``score``, a finite one."""
    # The sign of a difference counts in two instructions; a comparison takes three.
    return SIZE + tl.sum((b_s - score).to(tl.int32, bitcast=True) >> 31)


@triton.jit
def probe(lo, hi, weight_lo, weight_hi, step):
    """The next key to count at: where the count would be k, were its logarithm linear in the score.

    Every sixth step halves the range of keys instead. This bounds the number of steps for any
    distribution of scores.
    """
    halved = (lo & hi) + ((lo ^ hi) >> 1) + 1
    score_lo, score_hi = score_of(lo), score_of(hi)
    score = score_lo + (score_hi - score_lo) * (weight_lo / (weight_lo + weight_hi))
    guess = tl.minimum(tl.maximum(key_of(score), lo + 1), hi)
    usable = (step % 6 != 5) & (tl.abs(score) <= FLOAT32_MAX)
    return tl.where(usable, guess, halved)


@triton.jit
def log_ratio(count, k):
    return tl.log2(tl.maximum(count.to(tl.float32), 0.5) / k)


@triton.jit
def _cut_ties(b_tie, last, ties, need):
    """The ``need``-th smallest index in ``b_tie``, where INT_MAX stands for no index."""
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
        # Both ends move to an index of a tie, so that few ties take few steps, however far apart.
        if count >= need:
            hi = tl.max(tl.where(b_tie <= guess, b_tie, -1))
            lo = tl.where(count == need, hi - 1, lo)
        else:
            lo = tl.min(tl.where(b_tie > guess, b_tie, 2147483647)) - 1
        count_lo = tl.where(count < need, count, count_lo)
        count_hi = tl.where(count >= need, count, count_hi)
        step += 1
    return hi


@triton.jit
def winners(b_s, b_i, threshold, last, k, SIZE: tl.constexpr):
    """(mask of the k best of ``SIZE`` scores, a score that all of them reach).

    Equal scores: the lower indices ``b_i`` win; none is above ``last``. ``threshold`` is a score
    that at least k scores reach, or -inf.
    """
    forced = tl.sum((b_s == float("inf")).to(tl.int32))
    return search_winners(b_s, b_i, threshold, forced, last, k, SIZE)


@triton.jit
def search_winners(b_s, b_i, threshold, forced, last, k, SIZE: tl.constexpr):
    """As :func:`winners`, told how many scores are +inf: ``forced``, which from k on is a bound."""
    score, above, reach = kth_best(b_s, threshold, forced, k, k, SIZE)
    cut = last
    if reach != k:
        b_tie = tl.where(b_s == score, b_i, 2147483647)
        cut = _cut_ties(b_tie, last, reach - above, k - above)
    return (b_s > score) | ((b_s == score) & (b_i <= cut)), score


@triton.jit
def kth_best(b_s, threshold, forced, k, at_most, SIZE: tl.constexpr):
    """Search a score that at least k and at most ``at_most`` of ``SIZE`` scores reach.

    Where equal scores leave no such score, it is the k-th best score. It is +inf if the ``forced``
    scores are enough, and -inf if fewer than k scores are above -inf. See :func:`search_winners`.

    Returns:
        (the score; how many scores are above it, where it is the k-th best; how many reach it).
    """
    low = threshold
    if threshold == float("-inf"):
        low = tl.min(tl.where(b_s > float("-inf"), b_s, FLOAT32_MAX))
    low = tl.minimum(low, FLOAT32_MAX)
    high = tl.max(tl.where(b_s < float("inf"), b_s, float("-inf")))
    count_lo = count_reaching(b_s, low, SIZE)
    count_hi = forced
    lo = key_of(low)
    searched = (forced < k) & (count_lo > at_most)
    hi = tl.where(searched, key_of(high), lo)
    weight_lo = tl.abs(log_ratio(count_lo, k))
    weight_hi = tl.abs(log_ratio(forced, k))
    side = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while lo < hi:
        middle = probe(lo, hi, weight_lo, weight_hi, step)
        score = score_of(middle)
        count = count_reaching(b_s, score, SIZE)
        weight = tl.abs(log_ratio(count, k))
        # The end that moves takes its real weight. An end that stays twice in a row gets half of
        # its weight, which pulls the next guess towards it (the Illinois method).
        up = count >= k
        moved = tl.where(up, 1, -1)
        stale = tl.where(moved == side, 0.5, 1.0)
        weight_lo = tl.where(up, weight, weight_lo * stale)
        weight_hi = tl.where(up, weight_hi * stale, weight)
        count_lo = tl.where(up, count, count_lo)
        count_hi = tl.where(up, count_hi, count)
        if (count_lo - count_hi <= SNAP_AT) | (step >= SNAP_AFTER):
            # Move to a score that exists, so that the search ends even where the k-th best is tied.
            if up:
                lo = key_of(tl.min(tl.where(b_s >= score, b_s, float("inf"))))
            else:
                hi = key_of(tl.max(tl.where(b_s < score, b_s, float("-inf"))))
        else:
            lo = tl.where(up, middle, lo)
            hi = tl.where(up, hi, middle - 1)
        hi = tl.where(up & (count <= at_most), lo, hi)
        side = moved
        step += 1

    above = count_hi
    score = score_of(lo)
    if count_lo < k:
        # Fewer than k are finite: the rest are -inf.
        score = float("-inf") + tl.zeros_like(score)
        above = count_lo
        count_lo = tl.full((), SIZE, tl.int32)
    if forced >= k:
        score = float("inf") + tl.zeros_like(score)
        above = tl.full((), 0, tl.int32)
        count_lo = forced
    return score, above, count_lo


@triton.jit
def store_winners(p_out, b_win, b_i, taken, k):
    """Write the indices of winners in order behind ``taken`` others; returns the new number."""
    b_won = b_win.to(tl.int32)
    b_wins = tl.sum(b_won, 1)
    b_first = taken + tl.cumsum(b_wins, 0) - b_wins
    o_w = b_first[:, None] + tl.cumsum(b_won, 1) - 1
    tl.store(p_out + o_w, b_i, mask=b_win & (o_w < k))
    return taken + tl.sum(b_wins)


@triton.jit
def store_in_order(p_out, b_win, b_base, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the k indices ``b_base[r] + c`` of the winners ``b_win[r, c]``, row by row.

    The winners of a row, at most 16, become the bits of one word. So rows are ranked and stored,
    and not single elements. ``b_base`` is in the layout that a gather leaves, or any that needs
    none.
    """
    b_bits = tl.sum(b_win.to(tl.int32) << tl.arange(0, COLUMNS)[None, :], 1)
    # Move to the layout of the stores once. Otherwise the compiler converts at each of them.
    b_bits = tl.gather(b_bits, tl.arange(0, ROWS), 0)
    b_wins = b_bits - ((b_bits >> 1) & 0x5555)
    b_wins = (b_wins & 0x3333) + ((b_wins >> 2) & 0x3333)
    b_wins = (b_wins + (b_wins >> 4)) & 0x0F0F
    b_wins = (b_wins + (b_wins >> 8)) & 0x1F
    b_to = tl.cumsum(b_wins, 0) - b_wins
    for i_c in tl.static_range(COLUMNS):
        b_bit = (b_bits >> i_c) & 1
        tl.store(p_out + b_to, b_base + i_c, mask=(b_bit != 0) & (b_to < k))
        b_to += b_bit


@triton.jit
def load_units(p_scores, b_block, m_b, n, free, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """(scores, units) [blocks, BLOCK]; ``WHOLE`` says that a row's last block is readable whole.

    Blocks that are masked off must lie past the end. ``free`` is from :func:`free_range`.
    """
    o_u = b_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        b_s = tl.load(p_scores + o_u, mask=m_b[:, None], other=float("-inf"))
    else:
        b_s = tl.load(p_scores + o_u, mask=m_b[:, None] & (o_u < n), other=float("-inf"))
    return rankable(b_s, o_u, free, n), o_u
