# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of the lookup: claim what is missing, find frames for it, settle.

1. Every entry bids for its block with the negative of its number, by an atomic maximum. A block
   that is in a frame keeps the frame's number. A missing one keeps the bid of its first entry.
2. Programs count the first entries of their tiles. The last one to end adds them up and finds as
   many frames.
3. Every entry reads its frame. First entries put their block there, for :mod:`.load_kernel`.

Maxima and sums of integers do not depend on the order of programs, so the result repeats.
"""

import torch
import triton
import triton.language as tl

from ..plan import DecodePlan
from ..records import Lists, ListSpan
from ..triton_ops import begin, overlapping
from .types import MISSING, TILE_ENTRIES, FoundFrames, FramePool

# Not measured on a GPU yet.
VICTIMS_TILE = 1024
NOWHERE = tl.constexpr(MISSING)


@triton.jit
def bid_kernel(
    plan, page_table, request_slots, list_rows, indices, counts, head_map, first, last, pool, found,
    stride_table, capacity, entries, H: tl.constexpr, LISTS: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    begin()
    i_rh = tl.program_id(0)
    i_r, i_h = i_rh // H, i_rh % H
    o_t = tl.program_id(1) * BT + tl.arange(0, BT)
    i_list = i_h
    if head_map is not None:
        i_list = tl.load(head_map + i_h)
    i_l = tl.load(list_rows + i_r) * LISTS + i_list
    tail, seq_len = tl.load(plan.tail_start + i_r), tl.load(plan.seq_lens + i_r)
    k_units = tl.load(plan.k_units + i_r)
    listed = tl.minimum(tl.minimum(k_units, capacity), tl.load(counts + i_l))
    m_list = o_t < listed
    if first is not None:
        m_list &= (o_t >= tl.load(first + i_rh)) & (o_t < tl.load(last + i_rh))
    b_unit = tl.load(indices + i_l.to(tl.int64) * capacity + o_t, mask=m_list, other=0)
    m_list &= (b_unit >= 0) & (b_unit < tl.cdiv(tail, UNIT))
    b_tail = tail // PAGE + o_t - capacity
    m_tail = (o_t >= capacity) & (o_t < entries) & (b_tail < tl.cdiv(seq_len, PAGE))
    b_page = tl.where(m_tail, b_tail, b_unit * UNIT // PAGE)
    m_t = m_list | m_tail

    p_table = page_table + i_r.to(tl.int64) * stride_table
    b_block = tl.load(p_table + b_page, mask=m_t, other=0) * H + i_h + pool.first_block
    o_e = i_rh * entries + o_t
    b_frame = tl.atomic_max(pool.frame_of + b_block, -1 - o_e, mask=m_t, sem="relaxed")
    m_hit = m_t & (b_frame >= 0) & (b_frame < pool.cached)
    b_frame = tl.where(m_hit, b_frame, 0)
    now = tl.load(pool.clock)
    b_now = tl.zeros((BT,), tl.int32) + now
    # One of the entries that share a frame finds an older stamp.
    b_before = tl.atomic_xchg(pool.stamp + b_frame, b_now, mask=m_hit, sem="relaxed")
    hits = tl.sum((m_hit & (b_before != now)).to(tl.int64), 0)
    tl.atomic_add(pool.counters, hits, sem="relaxed")
    tl.store(found.pages + o_e, tl.where(m_t, b_page, -1), mask=o_t < entries)
    tl.store(found.blocks + o_e, tl.where(m_t, b_block, -1), mask=o_t < entries)
    if tl.program_id(1) == 0:
        tl.store(found.list_rows + i_rh, i_l)
        tl.store(found.request_slots + i_rh, tl.load(request_slots + i_r) * H + i_h)
        tl.store(found.seq_lens + i_rh, seq_len)
        tl.store(found.tail_start + i_rh, tail)
        tl.store(found.k_units + i_rh, k_units)


@triton.jit
def claim_kernel(pool, found, total, BT: tl.constexpr, BV: tl.constexpr):
    begin()
    i_t, tiles = tl.program_id(0), tl.num_programs(0)
    o_e = i_t * BT + tl.arange(0, BT)
    b_block = tl.load(found.blocks + o_e, mask=o_e < total, other=-1)
    m_e = b_block >= 0
    b_bid = tl.load(pool.frame_of + b_block, mask=m_e, other=0)
    b_first = (m_e & (b_bid == -1 - o_e)).to(tl.int32)
    tl.store(found.ranks + o_e, tl.cumsum(b_first, 0) - b_first, mask=b_first > 0)
    tl.store(found.before + i_t, tl.sum(b_first, 0))
    tl.debug_barrier()
    if tl.atomic_add(found.counted, 1) == tiles - 1:
        tl.debug_barrier()
        tl.store(found.counted, 0)
        missing = 0
        for i_v in range(0, tiles, BV):
            o_v = i_v + tl.arange(0, BV)
            # Past the first-level cache, which does not see what other programs stored.
            b_count = tl.load(found.before + o_v, mask=o_v < tiles, other=0, cache_modifier=".cg")
            tl.store(
                found.before + o_v, missing + tl.cumsum(b_count, 0) - b_count, mask=o_v < tiles
            )
            missing += tl.sum(b_count, 0)
        _find_victims(pool, found, missing, BV)


@triton.jit
def _find_victims(pool, found, missing, BV: tl.constexpr):
    """The least recently used frames for so many blocks, and what the counters say of them."""
    now, cursor, served = tl.load(pool.clock), tl.load(pool.cursor), 0
    while (served < missing) & (cursor < pool.cached):
        o_f = cursor + tl.arange(0, BV)
        b_frame = tl.load(pool.order + o_f, mask=o_f < pool.cached, other=-1)
        m_f = b_frame >= 0
        m_f &= tl.load(pool.stamp + b_frame, mask=m_f, other=0) != now
        b_rank = served + tl.cumsum(m_f.to(tl.int32), 0) - 1
        m_f &= b_rank < missing
        tl.store(found.victims + b_rank, b_frame, mask=m_f)
        served += tl.sum(m_f.to(tl.int32), 0)
        # The next search begins behind the last frame that was taken; the frames before are in use.
        after = tl.max(tl.where(m_f, o_f + 1, 0), 0)
        cursor = tl.where(served < missing, cursor + BV, after)
    tl.store(pool.cursor, cursor)
    tl.store(found.num_missing, served)
    tl.store(pool.counters + 1, tl.load(pool.counters + 1) + served)
    tl.store(pool.counters + 2, tl.load(pool.counters + 2) + missing - served)


@triton.jit
def settle_kernel(pool, found, total, entries, BT: tl.constexpr):
    begin()
    o_e = tl.program_id(0) * BT + tl.arange(0, BT)
    b_page = tl.load(found.pages + o_e, mask=o_e < total, other=-1)
    m_e = b_page >= 0
    b_block = tl.load(found.blocks + o_e, mask=m_e, other=0)
    # The entry is a bid, or the frame that is already assigned; both give the same frame.
    b_bid = tl.load(pool.frame_of + b_block, mask=m_e, other=0)
    m_bid = (b_bid < 0) & (b_bid != NOWHERE)
    b_rank = tl.load(found.ranks - 1 - b_bid, mask=m_bid, other=0)
    b_rank += tl.load(found.before + (-1 - b_bid) // BT, mask=m_bid, other=0)
    m_served = m_bid & (b_rank < tl.load(found.num_missing))
    b_frame = tl.load(found.victims + b_rank, mask=m_served, other=0)
    m_first = m_bid & (b_bid == -1 - o_e)
    m_own = m_first & m_served
    b_old = tl.load(pool.owner + b_frame, mask=m_own, other=-1)
    # What was released or pinned since is not in this frame any more.
    b_held = tl.load(pool.frame_of + b_old, mask=m_own & (b_old >= 0), other=NOWHERE)
    tl.store(pool.frame_of + b_old, NOWHERE, mask=m_own & (b_held == b_frame))
    tl.store(pool.owner + b_frame, b_block, mask=m_own)
    if pool.arriving is not None:
        tl.store(pool.arriving + b_frame, tl.full((BT,), 1, tl.int32), mask=m_own)
    tl.store(found.missing + b_rank, b_block, mask=m_own)
    tl.store(pool.stamp + b_frame, tl.zeros((BT,), tl.int32) + tl.load(pool.clock), mask=m_own)
    tl.store(pool.frame_of + b_block, tl.where(m_served, b_frame, NOWHERE), mask=m_first)
    p_table = found.page_table + (o_e // entries).to(tl.int64) * found.stride_table
    tl.store(p_table + b_page, tl.where(m_bid, b_frame, tl.maximum(b_bid, 0)), mask=m_e)


def find_frames_triton(
    pool: FramePool,
    layer: int,
    page_table: torch.Tensor,
    plan: DecodePlan,
    lists: Lists,
    found: FoundFrames,
    span: ListSpan | None,
) -> None:
    """Launch the three kernels of a lookup."""
    rows, heads = plan.num_rows, pool.heads
    tails = span is None or span.tails
    entries = lists.capacity + (found.tail_pages if tails else 0)
    # All three are small, so each comes up while the one before ends, in batches of any size.
    overlap = overlapping(0)
    first, last = (None, None) if span is None else (span.first, span.last)
    pool_args, found_args, total = pool.args(layer), found.args, rows * heads * entries
    bid_kernel[(rows * heads, triton.cdiv(entries, TILE_ENTRIES))](
        plan.args, page_table, plan.request_slots, lists.rows, lists.indices, lists.counts,
        lists.head_map, first, last, pool_args, found_args, page_table.stride(0), lists.capacity,
        entries,
        H=heads, LISTS=lists.indices.shape[1], PAGE=pool.page_size, UNIT=lists.unit,
        BT=TILE_ENTRIES, **overlap,
    )  # fmt: skip
    tiles = triton.cdiv(total, TILE_ENTRIES)
    claim_kernel[(tiles,)](
        pool_args, found_args, total, BT=TILE_ENTRIES, BV=VICTIMS_TILE, **overlap
    )
    settle_kernel[(tiles,)](pool_args, found_args, total, entries, BT=TILE_ENTRIES, **overlap)
