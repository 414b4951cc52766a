# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of exact top-k: prune whole blocks, then search the others.

The k best units lie in the k blocks with the largest maxima. So where k is small beside the
context, only the block maxima and k blocks are read. Both searches hold their scores in the
registers of one program, and interpolate to find the score that k of them reach. Of equal scores
the lower index wins. ``stream.py`` takes rows that do not fit in registers, and ``split.py`` takes
batches of few rows.
"""

import triton
import triton.language as tl

from ..common import next_power_of_2
from ..plan import DecodePlan
from ..records import BLOCK_UNITS, Always, Lists, Scores
from ..triton_ops import begin, constants, finite_scores, overlapping, selects_anew
from .one_program import is_streamed
from .search import (
    Domain,
    Held,
    forced_of,
    free_range,
    load_units,
    rankable,
    row_budget,
    search_winners,
    store_in_order,
)
from .split import num_splits, split_topk_triton
from .stream import stream_topk_triton
from .types import TopkWorkspace

# Contexts of 262,144 tokens; longer ones take the launches of ``stream.py`` too. These sizes, and
# the warps of ``_tiles``, were measured on one H200.
MAX_BLOCKS = 32768
MIN_UNITS, MAX_UNITS = 16384, 32768
MAX_WARPS = 16
BLOCK_MAX_TILE = 4096


def _tiles(width: int, capacity: int) -> tuple[int, int, int]:
    """(block maxima, units, warps): what one program holds in registers at a time."""
    blocks = next_power_of_2(triton.cdiv(width, BLOCK_UNITS))
    wanted = max(MIN_UNITS, next_power_of_2(capacity) * BLOCK_UNITS)
    units = min(wanted, MAX_UNITS, max(1024, next_power_of_2(width)))
    return min(max(blocks, 1024), MAX_BLOCKS), units, max(4, min(MAX_WARPS, units // 512))


@triton.jit
def block_max_kernel(
    scores, block_max, plan, width, blocks, H: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // H
    if selects_anew(plan, i_r):
        n = tl.cdiv(tl.load(plan.tail_start + i_r), UNIT)
        o_b = tl.program_id(1) * (BT // BLOCK) + tl.arange(0, BT // BLOCK)
        o_u = o_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        # [BT / BLOCK, BLOCK]
        b_s = tl.load(scores + i_rh * width + o_u, mask=o_u < n, other=float("-inf"))
        b_s = finite_scores(b_s)
        tl.store(scores + i_rh * width + o_u, b_s, mask=o_u < n)
        tl.store(block_max + i_rh * blocks + o_b, tl.max(b_s, 1), mask=o_b * BLOCK < n)


@triton.jit
def _prune(p_max, p_blocks, n, k, free, BT: tl.constexpr, BLOCK: tl.constexpr):
    """List the k blocks that hold the k best units; returns a score that at least k units reach."""
    num_blocks = tl.cdiv(n, BLOCK)
    C: tl.constexpr = 16
    o_r = tl.arange(0, BT // C)
    o_b = o_r[:, None] * C + tl.arange(0, C)[None, :]
    # [BT / C, C]; rows are padded, so that they load whole.
    b_s = tl.load(p_max + o_b, mask=(o_r * C < num_blocks)[:, None], other=float("-inf"))
    o_u = o_b * BLOCK
    # Without recent units that are always selected, nothing in the last block is forced.
    first, last = free
    last = tl.where(last < n, last // BLOCK, num_blocks)
    b_s = rankable(b_s, o_u, (first, last * BLOCK), n)
    forced = forced_of((tl.cdiv(first, BLOCK), last), num_blocks)
    b_win, threshold = search_winners(b_s, o_b, float("-inf"), forced, num_blocks - 1, k, BT)
    store_in_order(p_blocks, b_win, tl.arange(0, BT // C) * C, k, BT // C, C)
    return threshold


@triton.jit
def _take(
    p_scores,
    p_blocks,
    p_out,
    pruned,
    threshold,
    num_blocks,
    n,
    k,
    free,
    BT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the k best units of the listed blocks, or of all blocks if not ``pruned``."""
    o_b = tl.arange(0, BT // BLOCK)
    m_b = o_b < num_blocks
    b_block = tl.load(p_blocks + o_b, mask=m_b & pruned, other=0)
    b_block = tl.where(pruned & m_b, b_block, tl.where(m_b, o_b, tl.cdiv(n, BLOCK)))
    # [BT / BLOCK, BLOCK]
    b_s, o_u = load_units(p_scores, b_block, m_b, n, free, BLOCK, WHOLE)
    forced = forced_of(free, n)
    b_win, _ = search_winners(b_s, o_u, threshold, forced, n - 1, k, BT)
    b_base = tl.gather(b_block * BLOCK, o_b, 0)
    store_in_order(p_out, b_win, b_base, k, BT // BLOCK, BLOCK)


@triton.jit
def select_topk_kernel(
    scores,
    block_max,
    block_list,
    domain,
    list_rows,
    out_indices,
    out_counts,
    width,
    blocks,
    list_blocks,
    S: tl.constexpr,
):
    begin()
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // S.H
    # All that is needed of the row's plan is loaded at once, so that no load waits for another.
    reselected, tokens, n, k = row_budget(domain, S)
    i_l = tl.load(list_rows + i_r).to(tl.int64) * S.H + i_rh % S.H
    if reselected:
        tl.store(out_counts + i_l, k)
        if k > 0:
            free = free_range(domain, tokens, n, S.UNIT)
            p_scores = scores + i_rh * width
            p_max = block_max + i_rh * blocks
            p_blocks = block_list + i_rh * list_blocks
            p_out = out_indices + i_l * domain.capacity
            num_blocks = tl.cdiv(n, S.BLOCK)
            # Part of the tile is enough for short rows, at part of the work.
            MOST: tl.constexpr = S.BLOCKS // 2 if S.BLOCKS > 16384 else S.BLOCKS
            FEW: tl.constexpr = MOST // 4
            if n <= S.UNITS // 4:
                _take(
                    p_scores, p_blocks, p_out, False, float("-inf"), num_blocks, n, k,
                    free, S.UNITS // 4, S.BLOCK, S.WHOLE,
                )  # fmt: skip
            elif n <= S.UNITS // 2:
                _take(
                    p_scores, p_blocks, p_out, False, float("-inf"), num_blocks, n, k,
                    free, S.UNITS // 2, S.BLOCK, S.WHOLE,
                )  # fmt: skip
            elif not is_streamed(n, k, S):
                pruned = n > S.UNITS
                threshold = tl.full((), float("-inf"), tl.float32)
                if pruned:
                    if num_blocks <= FEW:
                        threshold = _prune(p_max, p_blocks, n, k, free, FEW, S.BLOCK)
                    elif num_blocks <= MOST:
                        threshold = _prune(p_max, p_blocks, n, k, free, MOST, S.BLOCK)
                    elif MOST < S.BLOCKS:
                        threshold = _prune(p_max, p_blocks, n, k, free, S.BLOCKS, S.BLOCK)
                    num_blocks = k
                    # The list is read back by other threads of this program.
                    tl.debug_barrier()
                _take(
                    p_scores, p_blocks, p_out, pruned, threshold, num_blocks, n, k,
                    free, S.UNITS, S.BLOCK, S.WHOLE,
                )  # fmt: skip


def find_block_max_triton(scores: Scores, plan: DecodePlan, *, unit: int) -> None:
    """Launch :func:`block_max_kernel`, one program a tile of a row and KV head."""
    rows, heads, width = scores.values.shape
    block_max_kernel[(rows * heads, triton.cdiv(width, BLOCK_MAX_TILE))](
        scores.values, scores.block_max, plan.args, width, scores.block_max.shape[2],
        H=heads, UNIT=unit, BT=BLOCK_MAX_TILE, BLOCK=BLOCK_UNITS,
    )  # fmt: skip


def select_topk_triton(
    scores: Scores, plan: DecodePlan, lists: Lists, *, always: Always, workspace: TopkWorkspace
) -> None:
    """Launch :func:`select_topk_kernel`, one program a row and KV head.

    In a batch of few rows several programs share each row instead. Where shapes allow rows that do
    not fit in registers, :func:`stream_topk_kernel` follows for those.
    """
    rows, heads, width = scores.values.shape
    count, capacity = rows * heads, lists.capacity
    domain = Domain(
        plan.tail_start, plan.k_units, plan.reselect, always.sink, always.recent, capacity,
        scores.unread,
    )  # fmt: skip
    tile_blocks, tile_units, warps = _tiles(width, capacity)
    held = Held(
        H=heads, UNIT=lists.unit, BLOCK=BLOCK_UNITS, WHOLE=width % BLOCK_UNITS == 0,
        COLUMNS=workspace.state.shape[2], BLOCKS=tile_blocks, UNITS=tile_units,
    )  # fmt: skip
    splits = num_splits(count, width, capacity, scores.values.device)
    if splits:
        split_topk_triton(scores, lists, domain, held, workspace, splits)
        return
    select_topk_kernel[(count,)](
        scores.values, scores.block_max, workspace.blocks, domain, lists.rows,
        lists.indices, lists.counts, width, scores.block_max.shape[2], workspace.blocks.shape[2],
        S=constants(held), num_warps=warps, **overlapping(count),
    )  # fmt: skip
    if width > tile_units and (
        capacity * BLOCK_UNITS > tile_units or triton.cdiv(width, BLOCK_UNITS) > tile_blocks
    ):
        stream_topk_triton(scores, lists, domain, held, workspace)
