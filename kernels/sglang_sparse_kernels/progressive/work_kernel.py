# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""What a row and KV head has to attend to, cut into tiles and pieces, and attention over those.

Its tokens in the order tail, units that are always selected, ranked units are cut into tiles of
BN. The first ``front`` tiles, before any look at the share, make up at most PARTS pieces; after
them every TILES tiles, a microbatch, are one. Where tiles and pieces lie follows from the plan
alone, and a piece is attended to by one program: what it comes to does not depend on whose it is.
"""

import triton
import triton.language as tl

from ..triton_ops import cast, dot, scaled_logits, slots_of
from .rank_kernel import forced_range, prologue_units


@triton.jit
def listed_units(k_units, list_rows, ranked, i_rh, capacity, H: tl.constexpr):
    """Units that may be attended to, of each of a vector of rows and KV heads."""
    i_l = tl.load(list_rows + i_rh // H).to(tl.int64) * H + i_rh % H
    k = tl.minimum(tl.load(k_units + i_rh // H), capacity)
    # A dense row's count is whatever its owner before left there.
    return tl.where(k > 0, tl.minimum(tl.load(ranked + i_l), k), 0)


@triton.jit
def work(
    seq_lens,
    tail_start,
    i_r,
    listed,
    sink,
    recent,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Of a row whose KV head has ``listed`` units, or of a vector of those: (tail start, tokens of
    the tail, tokens before the first microbatch, all tokens, units of the domain, units before the
    first microbatch, forced)."""
    tail = tl.load(tail_start + i_r)
    tail_tokens = tl.load(seq_lens + i_r) - tail
    _, _, forced = forced_range(tail, sink, recent, UNIT)
    before = tl.minimum(prologue_units(forced, STEP), listed)
    prologue = tail_tokens + before * UNIT
    total = tail_tokens + listed * UNIT
    return tail, tail_tokens, prologue, total, tl.cdiv(tail, UNIT), before, forced


@triton.jit
def cuts(prologue, total, BN: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr):
    """(tiles before any look, tiles a part of those, parts, microbatches, all tiles)."""
    front = tl.cdiv(prologue, BN)
    part = tl.maximum(tl.cdiv(front, PARTS), 1)
    ranked_tiles = tl.cdiv(total - prologue, BN)
    return front, part, tl.cdiv(front, part), tl.cdiv(ranked_tiles, TILES), front + ranked_tiles


@triton.jit
def next_piece(tile, front, part, tiles, TILES: tl.constexpr):
    """The first tile from ``tile`` on that begins a piece; ``tiles`` if there is none."""
    in_front = tl.minimum(tl.cdiv(tile, part) * part, front)
    after = tl.minimum(front + tl.cdiv(tile - front, TILES) * TILES, tiles)
    return tl.where(tile < front, in_front, after)


@triton.jit
def _slots(
    p_list,
    p_table,
    tile,
    front,
    tail,
    tail_tokens,
    prologue,
    total,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(KV rows, whether there is a token, how many tokens) of a tile; the former two [BN]."""
    first = tl.where(tile < front, tile * BN, prologue + (tile - front) * BN)
    last = tl.minimum(tl.where(tile < front, prologue, total), first + BN)
    o_t = first + tl.arange(0, BN)
    m_tail, m_n = o_t < tail_tokens, o_t < last
    o_l = o_t - tail_tokens
    b_unit = tl.load(p_list + o_l // UNIT, mask=m_n & ~m_tail, other=0)
    b_pos = tl.where(m_tail, tail + o_t, b_unit * UNIT + o_l % UNIT)
    m_n &= m_tail | ((b_pos >= 0) & (b_pos < tail))
    return slots_of(p_table, b_pos, m_n, PAGE), m_n, last - first


@triton.jit
def attend_tiles(
    q,
    k_buffer,
    v_buffer,
    page_table,
    indices,
    partial,
    lse,
    least,
    i_rh,
    i_l,
    tile_first,
    tile_last,
    tail,
    tail_tokens,
    prologue,
    total,
    forced,
    stride_q,
    stride_table,
    capacity,
    pieces,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    OUTPUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to whole pieces, the tiles [tile_first, tile_last), and leave what each came to."""
    i_r, i_h = i_rh // H, i_rh % H
    front, part, parts, _, tiles = cuts(prologue, total, BN, TILES, PARTS)
    o_g, o_d = tl.arange(0, BG), tl.arange(0, D)
    m_g = o_g < G
    # [BG, D]
    p_q = q + i_r.to(tl.int64) * stride_q + (i_h * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=m_g[:, None], other=0.0)
    p_table = page_table + i_r.to(tl.int64) * stride_table
    p_list = indices + i_l * capacity
    base = i_rh.to(tl.int64) * pieces
    # Two halves, so that what is written at once leaves room for a third program.
    HALF: tl.constexpr = D // 2
    o_h = tl.arange(0, HALF)
    b_left = tl.zeros((BG, HALF), tl.float32)
    b_right = tl.zeros((BG, HALF), tl.float32)
    b_max = tl.full((BG,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BG,), tl.float32)
    b_low = tl.full((BG,), float("inf"), tl.float32)
    # The first one begins a piece; ``at`` counts the tiles of a piece.
    piece = tl.where(tile_first < front, tile_first // part, parts + (tile_first - front) // TILES)
    at = 0
    for tile in tl.range(tile_first, tile_last, num_stages=STAGES):
        b_row, m_kv, tokens = _slots(
            p_list, p_table, tile, front, tail, tail_tokens, prologue, total, BN, UNIT, PAGE
        )
        o_kv = (b_row.to(tl.int64) * H + i_h) * D
        n_blocks, goes_on = tl.cdiv(tokens, UNIT), at > 0
        # [BN, D]
        b_k = tl.load(k_buffer + o_kv[:, None] + o_d[None, :], mask=m_kv[:, None], other=0.0)
        # [BG, BN], for exp2
        b_s = dot(b_q, tl.trans(b_k), tl.zeros((BG, BN), tl.float32))
        b_s = scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP)
        b_s = tl.where(m_kv[None, :], b_s, float("-inf"))
        b_before = tl.where(goes_on, b_max, float("-inf"))
        b_max = tl.maximum(b_before, tl.max(b_s, 1))
        # A tile whose rows are all masked must not turn -inf - -inf into NaN.
        b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_before - b_shift)
        # [BG, BN // UNIT]
        b_block = b_p
        if UNIT > 1:
            b_block = tl.sum(tl.reshape(b_p, (BG, BN // UNIT, UNIT)), 2)
        b_sum = tl.where(goes_on, b_sum * b_alpha, 0.0) + tl.sum(b_block, 1)
        # Forced units are of no rank; the last ones may lie behind the prologue.
        o_b = tl.arange(0, BN // UNIT)
        rank = (prologue - tail_tokens + (tile - front) * BN) // UNIT + o_b
        m_block = (o_b < n_blocks) & (tile >= front) & (rank >= forced)
        b_least = tl.min(tl.where(m_block[None, :], b_block, float("inf")), 1)
        b_least = tl.where(b_least > 0, tl.log2(b_least), float("-inf")) + b_shift
        b_low = tl.minimum(tl.where(goes_on, b_low, float("inf")), b_least)
        if OUTPUT:
            # [BN, HALF]
            p_v = v_buffer + o_kv[:, None] + o_h[None, :]
            b_v = tl.load(p_v, mask=m_kv[:, None], other=0.0)
            b_w = tl.load(p_v + HALF, mask=m_kv[:, None], other=0.0)
            b_weight = cast(b_p, b_v.dtype)
            b_left = tl.where(goes_on, b_left * b_alpha[:, None], 0.0)
            b_left = dot(b_weight, b_v, b_left)
            b_right = tl.where(goes_on, b_right * b_alpha[:, None], 0.0)
            b_right = dot(b_weight, b_w, b_right)

        at, after = at + 1, tile + 1
        ends = (at == tl.where(tile < front, part, TILES)) | (after == front) | (after == tiles)
        m_o = m_g & ends
        o_o = (base + piece) * G + o_g
        b_some = tl.where(b_sum > 0, b_sum, 1.0)
        b_lse = tl.where(b_sum > 0, b_max + tl.log2(b_some), float("-inf"))
        # NaN stays NaN, so that nobody counts on it.
        b_lse = tl.where(b_sum == b_sum, b_lse, b_sum)
        if OUTPUT:
            p_o = partial + o_o[:, None] * D + o_h[None, :]
            # One division a query head: they take long, and each tile waits for its last one.
            b_scale = (1.0 / b_some)[:, None]
            tl.store(p_o, b_left * b_scale, mask=m_o[:, None])
            tl.store(p_o + HALF, b_right * b_scale, mask=m_o[:, None])
        o_l = base * G + o_g * pieces + piece
        tl.store(lse + o_l, b_lse, mask=m_o)
        tl.store(least + o_l, b_low, mask=m_o)
        piece += ends.to(tl.int32)
        at = tl.where(ends, 0, at)


@triton.jit
def _add_five(a_0, a_1, a_2, a_3, a_4, b_0, b_1, b_2, b_3, b_4):
    return a_0 + b_0, a_1 + b_1, a_2 + b_2, a_3 + b_3, a_4 + b_4


@triton.jit
def attend_shares(
    b_amount,
    b_listed,
    b_there,
    q,
    k_buffer,
    v_buffer,
    page_table,
    seq_lens,
    tail_start,
    list_rows,
    indices,
    partial,
    lse,
    least,
    stride_q,
    stride_table,
    capacity,
    pieces,
    sink,
    recent,
    scale_log2,
    logit_cap,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    OUTPUT: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_COST: tl.constexpr,
):
    """Attend to this program's share of ``b_amount`` tiles [rows and KV heads], all of them in one
    sequence. Those of a row and KV head with ``b_listed`` units begin after ``b_there`` pieces.

    Each row counts for ROW_COST tiles more: a program that has parts of two attends to fewer.
    """
    programs, i_p = tl.num_programs(0), tl.program_id(0)
    b_cost = tl.where(b_amount > 0, b_amount + ROW_COST, 0)
    amount = tl.sum(b_cost)
    share = amount // programs
    more = amount - share * programs
    at = i_p * share + tl.minimum(i_p, more)
    end = at + share + (i_p < more).to(tl.int32)
    if at < end:
        b_end = tl.cumsum(b_cost, 0)
        b_first = b_end - b_cost
        o_r = tl.arange(0, b_amount.shape[0])
        while at < end:
            m_at = (b_first <= at) & (at < b_end)
            i_rh, row_first, row_end, listed, there = tl.reduce(
                (
                    tl.where(m_at, o_r, 0),
                    tl.where(m_at, b_first, 0),
                    tl.where(m_at, b_end, 0),
                    tl.where(m_at, b_listed, 0),
                    tl.where(m_at, b_there, 0),
                ),
                0,
                _add_five,
            )
            until = tl.minimum(end, row_end)
            i_l = tl.load(list_rows + i_rh // H).to(tl.int64) * H + i_rh % H
            tail, tail_tokens, prologue, total, _units, _before, forced = work(
                seq_lens, tail_start, i_rh // H, listed, sink, recent, UNIT, BN * TILES // UNIT
            )
            front, part, parts, _most, tiles = cuts(prologue, total, BN, TILES, PARTS)
            begin = tl.where(there > 0, front + (there - parts) * TILES, 0)
            first = begin + tl.maximum(at - row_first - ROW_COST, 0)
            last = begin + tl.maximum(until - row_first - ROW_COST, 0)
            if first < last:
                attend_tiles(
                    q, k_buffer, v_buffer, page_table, indices, partial, lse, least, i_rh, i_l,
                    next_piece(first, front, part, tiles, TILES),
                    next_piece(last, front, part, tiles, TILES), tail, tail_tokens, prologue, total,
                    forced, stride_q, stride_table, capacity, pieces, scale_log2, logit_cap, H, G,
                    BG, D, PAGE, UNIT, BN, TILES, PARTS, HAS_CAP, OUTPUT, STAGES,
                )  # fmt: skip
            at = until
