# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""The row plan: what a row and KV head attends to, cut into tiles and chunks; attention over those.

The tokens of a row and KV head lie in the order tail, units that are always selected, ranked units.
They are cut into tiles of BN. The tiles of the prologue, those before the first stop check, make up
at most MAX_PROLOGUE chunks. After them every BATCH_TILES tiles, a microbatch, are one chunk. Where
tiles and chunks lie follows from the plan alone, and one program attends to a chunk: its result
does not depend on which program that is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton_ops import (
    KVArgs,
    WindowArgs,
    cast,
    dot,
    halved,
    head_tail,
    row_table,
    scaled_logits,
    slots_of,
    tail_positions,
    wait_for_pages,
    widened,
)
from .rank_kernel import forced_range, prologue_units


class Layout(NamedTuple):
    """Constants of all kernels: shapes, and how rows are cut. D is the head dimension."""

    H: int
    G: int
    D: int
    UNIT: int
    BN: int
    BATCH_TILES: int
    MAX_PROLOGUE: int
    OUTPUT: bool


class Tiles(NamedTuple):
    """Constants of the kernels that attend. A turn to another row counts for ROW_COST tiles."""

    BG: int
    BR: int
    PAGE: int
    HAS_CAP: bool
    STAGES: int
    ROW_COST: int


class Rows(NamedTuple):
    """What the batch's plan says of its rows, and the tokens that are always selected."""

    seq_lens: torch.Tensor
    tail_start: torch.Tensor
    list_rows: torch.Tensor
    sink: int
    recent: int


class Queries(NamedTuple):
    """Queries, and the factors of their logits."""

    q: torch.Tensor
    stride: int
    scale_log2: float
    logit_cap: float


class Ranking(NamedTuple):
    """Ranked units of all lists, ``capacity`` a list."""

    indices: torch.Tensor
    capacity: int


class Chunks(NamedTuple):
    """Results of chunks, ``held`` a row and KV head (:class:`ProgressiveWorkspace`)."""

    partial: torch.Tensor
    lse: torch.Tensor
    min_block: torch.Tensor
    held: int


class Work(NamedTuple):
    """What is attended to, and where results go. ``windows`` may be None."""

    queries: Queries
    kv: KVArgs
    rows: Rows
    windows: WindowArgs | None
    ranking: Ranking
    out: Chunks


@triton.jit
def candidate_units(k_units, list_rows, ranked, windows, i_rh, capacity, H: tl.constexpr):
    """Units that may be attended to, for each of a vector of rows and KV heads."""
    i_l = tl.load(list_rows + i_rh // H).to(tl.int64) * H + i_rh % H
    k = tl.minimum(tl.load(k_units + i_rh // H), capacity)
    if windows is not None:
        k = tl.where(tl.load(windows.streams + i_rh % H) != 0, 0, k)
    # A dense row's count is whatever the row's former owner left.
    return tl.where(k > 0, tl.minimum(tl.load(ranked + i_l), k), 0)


@triton.jit
def row_plan(rows, windows, i_rh, candidates, L: tl.constexpr):
    """The row plan of a row and KV head ``i_rh`` with ``candidates`` units, or of a vector of them.

    To a streaming head its window is the tail, and there is nothing else.

    Returns (tail start, tokens of the tail, tokens of the prologue, all tokens, units of the
    domain, units of the prologue, how many units are always selected).
    """
    planned = tl.load(rows.tail_start + i_rh // L.H)
    seq_len = tl.load(rows.seq_lens + i_rh // L.H)
    tail, tail_tokens = planned, seq_len - planned
    if windows is not None:
        streams = (tl.load(windows.streams + i_rh % L.H) != 0) & (planned > 0)
        tail, sinks = head_tail(windows, streams, seq_len, planned)
        tail_tokens = seq_len - tail + sinks
    _, _, forced = forced_range(planned, rows.sink, rows.recent, L.UNIT)
    first_units = tl.minimum(prologue_units(forced, L.BN * L.BATCH_TILES // L.UNIT), candidates)
    prologue = tail_tokens + first_units * L.UNIT
    total = tail_tokens + candidates * L.UNIT
    return tail, tail_tokens, prologue, total, tl.cdiv(planned, L.UNIT), first_units, forced


@triton.jit
def chunk_plan(prologue, total, L: tl.constexpr):
    """(tiles of the prologue, tiles a chunk of it, chunks of it, microbatches, all tiles)."""
    first_tiles = tl.cdiv(prologue, L.BN)
    chunk_tiles = tl.maximum(tl.cdiv(first_tiles, L.MAX_PROLOGUE), 1)
    ranked_tiles = tl.cdiv(total - prologue, L.BN)
    first_chunks, batches = tl.cdiv(first_tiles, chunk_tiles), tl.cdiv(ranked_tiles, L.BATCH_TILES)
    return first_tiles, chunk_tiles, first_chunks, batches, first_tiles + ranked_tiles


@triton.jit
def _next_chunk(tile, first_tiles, chunk_tiles, tiles, BATCH_TILES: tl.constexpr):
    """The first tile from ``tile`` on that begins a chunk; ``tiles`` if none does."""
    in_prologue = tl.minimum(tl.cdiv(tile, chunk_tiles) * chunk_tiles, first_tiles)
    after = first_tiles + tl.cdiv(tile - first_tiles, BATCH_TILES) * BATCH_TILES
    return tl.where(tile < first_tiles, in_prologue, tl.minimum(after, tiles))


@triton.jit
def _tile_slots(
    p_list,
    p_table,
    tile,
    first_tiles,
    tail,
    tail_tokens,
    seq_len,
    prologue,
    total,
    L: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """(KV slots, whether there is a token, how many tokens) of a tile; the former two [BN]."""
    first = tl.where(tile < first_tiles, tile * L.BN, prologue + (tile - first_tiles) * L.BN)
    last = tl.minimum(tl.where(tile < first_tiles, prologue, total), first + L.BN)
    o_t = first + tl.arange(0, L.BN)
    m_tail, m_n = o_t < tail_tokens, o_t < last
    o_l = o_t - tail_tokens
    b_unit = tl.load(p_list + o_l // L.UNIT, mask=m_n & ~m_tail, other=0)
    b_tail = tail_positions(tail, o_t, seq_len, WINDOWS)
    b_pos = tl.where(m_tail, b_tail, b_unit * L.UNIT + o_l % L.UNIT)
    m_n &= m_tail | ((b_pos >= 0) & (b_pos < tail))
    return slots_of(p_table, b_pos, m_n, PAGE), m_n, last - first


@triton.jit
def _attend_tiles(
    work,
    i_rh,
    i_l,
    tile_first,
    tile_last,
    tail,
    tail_tokens,
    seq_len,
    prologue,
    total,
    forced,
    L: tl.constexpr,
    T: tl.constexpr,
):
    """Attend to whole chunks, the tiles [tile_first, tile_last), and store each one's result."""
    queries, kv, ranking, out = work.queries, work.kv, work.ranking, work.out
    i_r, i_h = i_rh // L.H, i_rh % L.H
    first_tiles, chunk_tiles, first_chunks, _, tiles = chunk_plan(prologue, total, L)
    o_g, o_d = tl.arange(0, T.BG), tl.arange(0, L.D)
    m_g = o_g < L.G
    # [BG, D]
    o_q = (i_h * L.G + o_g)[:, None] * L.D
    p_q = queries.q + i_r.to(tl.int64) * queries.stride + o_q + o_d[None, :]
    b_q = tl.load(p_q, mask=m_g[:, None], other=0.0)
    p_table = row_table(kv, i_r)
    p_list = ranking.indices + i_l * ranking.capacity
    base = i_rh.to(tl.int64) * out.held
    # Two halves, so that what is written at once leaves room for a third program.
    HALF: tl.constexpr = L.D // 2
    o_h = tl.arange(0, HALF)
    b_left = tl.zeros((T.BG, HALF), tl.float32)
    b_right = tl.zeros((T.BG, HALF), tl.float32)
    b_max = tl.full((T.BG,), float("-inf"), tl.float32)
    b_sum = tl.zeros((T.BG,), tl.float32)
    b_min = tl.full((T.BG,), float("inf"), tl.float32)
    # The first tile begins a chunk; ``at`` counts the tiles of a chunk.
    batch = (tile_first - first_tiles) // L.BATCH_TILES
    chunk = tl.where(tile_first < first_tiles, tile_first // chunk_tiles, first_chunks + batch)
    at = 0
    if kv.arriving is not None:
        for tile in range(tile_first, tile_last):
            b_slot, m_kv, tokens = _tile_slots(
                p_list, p_table, tile, first_tiles, tail, tail_tokens, seq_len, prologue, total, L,
                T.PAGE, work.windows is not None,
            )  # fmt: skip
            wait_for_pages(kv.arriving, b_slot // T.PAGE)
    for tile in tl.range(tile_first, tile_last, num_stages=T.STAGES):
        b_slot, m_kv, tokens = _tile_slots(
            p_list, p_table, tile, first_tiles, tail, tail_tokens, seq_len, prologue, total, L,
            T.PAGE, work.windows is not None,
        )  # fmt: skip
        o_kv = (b_slot.to(tl.int64) * L.H + i_h) * L.D
        n_blocks, goes_on = tl.cdiv(tokens, L.UNIT), at > 0
        # [BN, D]
        b_k = tl.load(kv.k + o_kv[:, None] + o_d[None, :], mask=m_kv[:, None], other=0.0)
        b_k = widened(b_k, b_q.dtype)
        # [BG, BN], for exp2
        b_s = dot(b_q, tl.trans(b_k), tl.zeros((T.BG, L.BN), tl.float32))
        b_s = scaled_logits(b_s, queries.scale_log2, queries.logit_cap, T.HAS_CAP)
        b_s = tl.where(m_kv[None, :], b_s, float("-inf"))
        b_before = tl.where(goes_on, b_max, float("-inf"))
        b_max = tl.maximum(b_before, tl.max(b_s, 1))
        # A tile whose rows are all masked must not turn -inf - -inf into NaN.
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_before - b_shift)
        # [BG, BN // UNIT]
        b_block = b_p
        if L.UNIT > 1:
            b_block = tl.sum(tl.reshape(b_p, (T.BG, L.BN // L.UNIT, L.UNIT)), 2)
        b_sum = tl.where(goes_on, b_sum * b_alpha, 0.0) + tl.sum(b_block, 1)
        # Forced units have no rank; the last of them may lie behind the prologue.
        o_b = tl.arange(0, L.BN // L.UNIT)
        rank = (prologue - tail_tokens + (tile - first_tiles) * L.BN) // L.UNIT + o_b
        m_block = (o_b < n_blocks) & (tile >= first_tiles) & (rank >= forced)
        b_tile_min = tl.min(tl.where(m_block[None, :], b_block, float("inf")), 1)
        b_tile_min = tl.where(b_tile_min > 0, tl.log2(b_tile_min), float("-inf")) + b_shift
        b_min = tl.minimum(tl.where(goes_on, b_min, float("inf")), b_tile_min)
        if L.OUTPUT:
            # [BN, HALF]
            p_v = kv.v + o_kv[:, None] + o_h[None, :]
            b_v = tl.load(p_v, mask=m_kv[:, None], other=0.0)
            b_v = halved(b_v, b_q.dtype)
            b_w = tl.load(p_v + HALF, mask=m_kv[:, None], other=0.0)
            b_w = halved(b_w, b_q.dtype)
            b_weight = cast(b_p, b_v.dtype)
            b_left = tl.where(goes_on, b_left * b_alpha[:, None], 0.0)
            b_left = dot(b_weight, b_v, b_left)
            b_right = tl.where(goes_on, b_right * b_alpha[:, None], 0.0)
            b_right = dot(b_weight, b_w, b_right)

        at, after = at + 1, tile + 1
        ends = at == tl.where(tile < first_tiles, chunk_tiles, L.BATCH_TILES)
        ends = ends | (after == first_tiles) | (after == tiles)
        m_o = m_g & ends
        o_o = (base + chunk) * L.G + o_g
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_some), float("-inf"))
        # NaN stays NaN, so that no stop check counts on it.
        b_lse = tl.where(b_sum == b_sum, b_lse, b_sum)
        if L.OUTPUT:
            p_o = out.partial + o_o[:, None] * L.D + o_h[None, :]
            # One division a query head: they take long, and each tile waits for its last one.
            b_scale = (kv.v_scale / b_some)[:, None]
            tl.store(p_o, b_left * b_scale, mask=m_o[:, None])
            tl.store(p_o + HALF, b_right * b_scale, mask=m_o[:, None])
        o_l = base * L.G + o_g * out.held + chunk
        tl.store(out.lse + o_l, b_lse, mask=m_o)
        tl.store(out.min_block + o_l, b_min, mask=m_o)
        chunk += ends.to(tl.int32)
        at = tl.where(ends, 0, at)


@triton.jit
def _add_five(a_0, a_1, a_2, a_3, a_4, b_0, b_1, b_2, b_3, b_4):
    return a_0 + b_0, a_1 + b_1, a_2 + b_2, a_3 + b_3, a_4 + b_4


@triton.jit
def attend_split(b_tiles, b_candidates, b_attended, work, L: tl.constexpr, T: tl.constexpr):
    """Attend to this program's split of ``b_tiles`` tiles [rows and KV heads], one after another.

    The tiles of a row and KV head with ``b_candidates`` units begin after ``b_attended`` chunks.
    Each row counts for ROW_COST tiles more: a program with parts of two rows attends to fewer.
    """
    rows, windows = work.rows, work.windows
    programs, i_p = tl.num_programs(0), tl.program_id(0)
    b_cost = tl.where(b_tiles > 0, b_tiles + T.ROW_COST, 0)
    cost = tl.sum(b_cost)
    split = cost // programs
    more = cost - split * programs
    at = i_p * split + tl.minimum(i_p, more)
    end = at + split + (i_p < more).to(tl.int32)
    if at < end:
        b_end = tl.cumsum(b_cost, 0)
        b_first = b_end - b_cost
        o_r = tl.arange(0, b_tiles.shape[0])
        while at < end:
            m_at = (b_first <= at) & (at < b_end)
            i_rh, row_first, row_end, candidates, attended = tl.reduce(
                (
                    tl.where(m_at, o_r, 0),
                    tl.where(m_at, b_first, 0),
                    tl.where(m_at, b_end, 0),
                    tl.where(m_at, b_candidates, 0),
                    tl.where(m_at, b_attended, 0),
                ),
                0,
                _add_five,
            )
            stop_at = tl.minimum(end, row_end)
            i_l = tl.load(rows.list_rows + i_rh // L.H).to(tl.int64) * L.H + i_rh % L.H
            tail, tail_tokens, prologue, total, _units, _first_units, forced = row_plan(
                rows, windows, i_rh, candidates, L
            )
            seq_len = tl.load(rows.seq_lens + i_rh // L.H)
            first_tiles, chunk_tiles, first_chunks, _, tiles = chunk_plan(prologue, total, L)
            later = first_tiles + (attended - first_chunks) * L.BATCH_TILES
            begin = tl.where(attended > 0, later, 0)
            first = begin + tl.maximum(at - row_first - T.ROW_COST, 0)
            last = begin + tl.maximum(stop_at - row_first - T.ROW_COST, 0)
            if first < last:
                first = _next_chunk(first, first_tiles, chunk_tiles, tiles, L.BATCH_TILES)
                last = _next_chunk(last, first_tiles, chunk_tiles, tiles, L.BATCH_TILES)
                _attend_tiles(
                    work, i_rh, i_l, first, last, tail, tail_tokens, seq_len, prologue, total,
                    forced, L, T,
                )  # fmt: skip
            at = stop_at
