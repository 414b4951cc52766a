# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of exact top-k: prune whole blocks, then search the survivors.

The k best units lie in the k blocks with the largest maxima, so with k small against the context
only the block maxima and k blocks are read. Both searches look for the k-th largest among
order-preserving integer keys; a tile that holds all of them stays in registers, longer inputs are
re-read.
"""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..plan import DecodePlan
from .types import BLOCK_UNITS, TopkWorkspace

MAX_TILE = 16384
BLOCK_MAX_TILE = 4096


def _tile_and_warps(width: int) -> tuple[int, int]:
    tile = min(MAX_TILE, max(64, next_power_of_2(width)))
    return tile, min(32, max(4, tile // 512))


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
def _sortable(b_s):
    """int32 keys that order as the floats do; -0 and +0 tie, NaN is -inf."""
    b_s = tl.where(b_s == b_s, b_s, float("-inf"))
    b_bits = tl.where(b_s == 0.0, 0.0, b_s).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    """Inverse of :func:`_sortable`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_block_keys(p_max, o_b, num_blocks, forced_below, forced_from, BLOCK: tl.constexpr):
    """Keys of block maxima; INT32_MAX for a block with a forced unit, INT32_MIN past the end."""
    b_key = _sortable(tl.load(p_max + o_b, mask=o_b < num_blocks, other=float("-inf")))
    forced = (o_b * BLOCK < forced_below) | ((o_b + 1) * BLOCK > forced_from)
    b_key = tl.where(forced, 2147483647, b_key)
    return tl.where(o_b < num_blocks, b_key, -2147483648)


@triton.jit
def _load_unit_keys(
    p_scores, p_blocks, pruned, o_b, num_blocks, n, forced_below, forced_from, BLOCK: tl.constexpr
):
    """(keys, units) [rows of o_b, BLOCK] of candidate blocks: listed ones if pruned, else all."""
    m_b = o_b < num_blocks
    b_block = tl.load(p_blocks + o_b, mask=m_b & pruned, other=0)
    b_block = tl.where(pruned, b_block, o_b)
    o_u = b_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_u = m_b[:, None] & (o_u < n)
    b_key = _sortable(tl.load(p_scores + o_u, mask=m_u, other=float("-inf")))
    forced = (o_u < forced_below) | (o_u >= forced_from)
    b_key = tl.where(forced, 2147483647, b_key)
    return tl.where(m_u, b_key, -2147483648), o_u


@triton.jit
def _probe(lo, hi, weight_lo, weight_hi, step):
    """Next key to count at: where the log of the count, linear in the score, would meet k.

    Every third step bisects the keys instead, so that no distribution takes more than a few dozen.
    """
    bisected = lo + ((hi - lo + 1) >> 1)
    score_lo, score_hi = _score_of(lo.to(tl.int32)), _score_of(hi.to(tl.int32))
    score = score_lo + (score_hi - score_lo) * (weight_lo / (weight_lo + weight_hi))
    guess = tl.minimum(tl.maximum(_sortable(score).to(tl.int64), lo + 1), hi)
    usable = (step % 3 != 2) & (tl.abs(score) < float("inf"))
    return tl.where(usable, guess, bisected)


@triton.jit
def _narrow(lo, hi, middle, count, k):
    """A count above k raises lo, one below lowers hi; exactly k ends the search at once."""
    hi = tl.where(count == k, middle, tl.where(count > k, hi, middle - 1))
    return tl.where(count >= k, middle, lo), hi


@triton.jit
def _resident_threshold(b_key, floor, n, k):
    """(threshold, keys above it) of keys held in registers.

    At least k keys reach ``threshold``; unless exactly k do, it is the k-th largest key.
    ``floor`` is a key that at least k keys reach, ``n`` about the number of valid keys.
    """
    b_valid = tl.where(b_key == -2147483648, 2147483647, b_key)
    b_free = tl.where(b_key == 2147483647, -2147483648, b_key)
    forced = tl.sum((b_key == 2147483647).to(tl.int32))
    lo = tl.maximum(tl.min(b_valid), floor).to(tl.int64)
    hi = tl.where(forced >= k, lo, tl.max(b_free).to(tl.int64))
    lo = tl.where(forced >= k, 2147483647, lo)
    weight_lo = tl.log2(tl.maximum(n, k + 1).to(tl.float32) / k)
    weight_hi = tl.log2(k / tl.maximum(forced.to(tl.float32), 0.5))
    side = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while lo < hi:
        middle = _probe(lo, hi, weight_lo, weight_hi, step)
        count = tl.sum((b_key >= middle.to(tl.int32)).to(tl.int32))
        lo, hi = _narrow(lo, hi, middle, count, k)
        # The end that moves gets its real weight; one that stays twice is pulled in (Illinois).
        moved = tl.where(count > k, 1, -1)
        gap = tl.abs(tl.log2(tl.maximum(count.to(tl.float32), 0.5) / k))
        stale = tl.where(moved == side, 0.5, 1.0)
        weight_hi = tl.where(moved == 1, weight_hi * stale, gap)
        weight_lo = tl.where(moved == 1, gap, weight_lo * stale)
        side = moved
        step += 1
    return lo.to(tl.int32), tl.sum((b_key > lo.to(tl.int32)).to(tl.int32))


@triton.jit
def _block_threshold(
    p_max, num_blocks, k, forced_below, forced_from, BT: tl.constexpr, BLOCK: tl.constexpr
):
    """(threshold, blocks above it) over block maxima, as :func:`_resident_threshold`."""
    lo = tl.full((), -2147483647, tl.int64)
    above = tl.full((), 0, tl.int32)
    threshold = tl.full((), 0, tl.int32)
    if num_blocks <= BT:
        # [BT]
        b_key = _load_block_keys(
            p_max, tl.arange(0, BT), num_blocks, forced_below, forced_from, BLOCK
        )
        threshold, above = _resident_threshold(b_key, -2147483647, num_blocks, k)
    else:
        hi = tl.full((), 2147483647, tl.int64)
        while lo < hi:
            middle = lo + ((hi - lo + 1) >> 1)
            count = tl.full((), 0, tl.int32)
            for i_t in range(0, num_blocks, BT):
                o_b = i_t + tl.arange(0, BT)
                b_key = _load_block_keys(p_max, o_b, num_blocks, forced_below, forced_from, BLOCK)
                count += tl.sum((b_key >= middle.to(tl.int32)).to(tl.int32))
            lo, hi = _narrow(lo, hi, middle, count, k)
        threshold = lo.to(tl.int32)
        for i_t in range(0, num_blocks, BT):
            o_b = i_t + tl.arange(0, BT)
            b_key = _load_block_keys(p_max, o_b, num_blocks, forced_below, forced_from, BLOCK)
            above += tl.sum((b_key > threshold).to(tl.int32))
    return threshold, above


@triton.jit
def _unit_threshold(
    p_scores,
    p_blocks,
    pruned,
    floor,
    num_blocks,
    n,
    k,
    forced_below,
    forced_from,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(threshold, units above it) over candidate units, as :func:`_resident_threshold`."""
    ROWS: tl.constexpr = BT // BLOCK
    above = tl.full((), 0, tl.int32)
    threshold = tl.full((), 0, tl.int32)
    if num_blocks <= ROWS:
        o_b = tl.arange(0, ROWS)
        # [ROWS, BLOCK]
        b_key, _ = _load_unit_keys(
            p_scores, p_blocks, pruned, o_b, num_blocks, n, forced_below, forced_from, BLOCK
        )
        threshold, above = _resident_threshold(b_key, floor, num_blocks * BLOCK, k)
    else:
        lo = floor.to(tl.int64)
        hi = tl.full((), 2147483647, tl.int64)
        while lo < hi:
            middle = lo + ((hi - lo + 1) >> 1)
            count = tl.full((), 0, tl.int32)
            for i_t in range(0, num_blocks, ROWS):
                o_b = i_t + tl.arange(0, ROWS)
                b_key, _ = _load_unit_keys(
                    p_scores, p_blocks, pruned, o_b, num_blocks, n, forced_below, forced_from, BLOCK
                )
                count += tl.sum((b_key >= middle.to(tl.int32)).to(tl.int32))
            lo, hi = _narrow(lo, hi, middle, count, k)
        threshold = lo.to(tl.int32)
        for i_t in range(0, num_blocks, ROWS):
            o_b = i_t + tl.arange(0, ROWS)
            b_key, _ = _load_unit_keys(
                p_scores, p_blocks, pruned, o_b, num_blocks, n, forced_below, forced_from, BLOCK
            )
            above += tl.sum((b_key > threshold).to(tl.int32))
    return threshold, above


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
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // H
    if tl.load(reselect + i_r) != 0:
        ROWS: tl.constexpr = BT // BLOCK
        tokens = tl.load(tail_start + i_r)
        n = tl.cdiv(tokens, UNIT)
        k = tl.minimum(tl.minimum(tl.load(k_units + i_r), n), capacity)
        i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
        tl.store(out_counts + i_l, k)
        if k > 0:
            forced_below = tl.cdiv(sink, UNIT)
            forced_from = tl.maximum(tokens - recent, 0) // UNIT
            # With nothing recent to force, the rounded-up last block must not look forced.
            forced_from = tl.where(forced_from < n, forced_from, 2147483647)
            p_scores = scores + i_rh * width
            p_max = block_max + i_rh * blocks
            p_blocks = block_list + i_rh * list_blocks
            p_out = out_indices + i_l * capacity
            num_blocks = tl.cdiv(n, BLOCK)
            pruned = num_blocks > k
            floor = tl.full((), -2147483647, tl.int32)
            if pruned:
                floor, above = _block_threshold(
                    p_max, num_blocks, k, forced_below, forced_from, BT, BLOCK
                )
                taken = tl.full((), 0, tl.int32)
                tied = tl.full((), 0, tl.int32)
                for i_t in range(0, num_blocks, BT):
                    o_b = i_t + tl.arange(0, BT)
                    # [BT]
                    b_key = _load_block_keys(
                        p_max, o_b, num_blocks, forced_below, forced_from, BLOCK
                    )
                    b_tie = (b_key == floor).to(tl.int32)
                    b_rank = above + tied + tl.cumsum(b_tie, 0)
                    b_win = (b_key > floor) | ((b_tie != 0) & (b_rank <= k))
                    o_w = taken + tl.cumsum(b_win.to(tl.int32), 0) - 1
                    tl.store(p_blocks + o_w, o_b, mask=b_win & (o_w < k))
                    taken += tl.sum(b_win.to(tl.int32))
                    tied += tl.sum(b_tie)
                num_blocks = k
                # The list is read back by other threads of this program.
                tl.debug_barrier()

            threshold, above = _unit_threshold(
                p_scores,
                p_blocks,
                pruned,
                floor,
                num_blocks,
                n,
                k,
                forced_below,
                forced_from,
                BT,
                BLOCK,
            )
            taken = tl.full((), 0, tl.int32)
            tied = tl.full((), 0, tl.int32)
            for i_t in range(0, num_blocks, ROWS):
                o_b = i_t + tl.arange(0, ROWS)
                # [ROWS, BLOCK]
                b_key, o_u = _load_unit_keys(
                    p_scores, p_blocks, pruned, o_b, num_blocks, n, forced_below, forced_from, BLOCK
                )
                b_tie = (b_key == threshold).to(tl.int32)
                b_ties = tl.sum(b_tie, 1)
                b_before = above + tied + tl.cumsum(b_ties, 0) - b_ties
                b_rank = b_before[:, None] + tl.cumsum(b_tie, 1)
                b_win = (b_key > threshold) | ((b_tie != 0) & (b_rank <= k))
                b_won = b_win.to(tl.int32)
                b_wins = tl.sum(b_won, 1)
                b_first = taken + tl.cumsum(b_wins, 0) - b_wins
                o_w = b_first[:, None] + tl.cumsum(b_won, 1) - 1
                tl.store(p_out + o_w, o_u, mask=b_win & (o_w < k))
                taken += tl.sum(b_wins)
                tied += tl.sum(b_ties)


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
    tile, warps = _tile_and_warps(width)
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
        BT=tile,
        BLOCK=BLOCK_UNITS,
        num_warps=warps,
    )
