# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of ranked lists, and of bounds of the mass that such a list leaves out."""

import math

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..plan import DecodePlan
from ..records import Always, Lists, Scores
from ..triton_ops import is_read, selects_anew
from .reference import BOUND_FLOOR, BOUND_MARGIN
from .types import ResidualRule

# Measured on one H200.
RANK_WARPS = 4
BOUNDS_TILE = 256


@triton.jit
def rankable(b_s, forced, valid):
    """Scores as ``select_topk`` ranks them: NaN is -inf; forced units, and no others, are +inf."""
    b_s = tl.where(b_s == b_s, b_s, float("-inf"))
    b_s = tl.minimum(b_s, 3.4028234663852886e38) + 0.0
    return tl.where(valid, tl.where(forced, float("inf"), b_s), float("-inf"))


@triton.jit
def forced_range(tokens, sink, recent, UNIT: tl.constexpr):
    """(first unit after the sinks, first recent unit, how many units are always selected)."""
    units = tl.cdiv(tokens, UNIT)
    below = tl.cdiv(sink, UNIT)
    start = tl.maximum(tokens - recent, 0) // UNIT
    forced = tl.minimum(below, units) + tl.maximum(units - tl.maximum(start, below), 0)
    return below, start, forced


@triton.jit
def prologue_units(forced, BATCH_UNITS: tl.constexpr):
    """See :func:`.reference.prologue_units`."""
    whole = (forced + 1) // BATCH_UNITS * BATCH_UNITS
    return tl.where(forced + 1 >= BATCH_UNITS, whole - 1, forced)


@triton.jit
def _load_scores(p_scores, b_unit, m_unit, below, start):
    b_s = tl.load(p_scores + b_unit, mask=m_unit, other=float("-inf"))
    return rankable(b_s, (b_unit < below) | (b_unit >= start), m_unit)


@triton.jit
def _bit(n_dims: tl.constexpr, at: tl.constexpr):
    """0 and 1 along one axis of a hypercube, the ``at``-th from the last."""
    shape: tl.constexpr = [1] * (n_dims - 1 - at) + [2] + [1] * at
    return tl.reshape(tl.arange(0, 2), shape)


@triton.jit
def _exchange(b_x, n_dims: tl.constexpr, stage: tl.constexpr, at: tl.constexpr):
    """Order the pairs along axis ``at``; in every other block of 2 ** stage they descend."""
    # The pair's other number; sums wrap around and back.
    b_y = tl.sum(b_x, n_dims - 1 - at, keep_dims=True) - b_x
    b_swap = (b_x > b_y) != (_bit(n_dims, at) != 0)
    if stage < n_dims:
        b_swap = b_swap != (_bit(n_dims, stage) != 0)
    return tl.where(b_swap, b_y, b_x)


@triton.jit
def _ascending(b_key, n_dims: tl.constexpr):
    """The 2 ** n_dims distinct integers of a vector in ascending order: a bitonic sort."""
    b_x = tl.reshape(b_key, [2] * n_dims)
    for stage in tl.static_range(1, n_dims + 1):
        for step in tl.static_range(stage):
            b_x = _exchange(b_x, n_dims, stage, stage - 1 - step)
    return tl.reshape(b_x, [2**n_dims])


@triton.jit
def rank_units_kernel(
    scores,
    selected,
    tail_start,
    k_units,
    reselect,
    unread,
    list_rows,
    out_indices,
    out_counts,
    width,
    capacity,
    sink,
    recent,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    BC: tl.constexpr,
    DIMS: tl.constexpr,
):
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // H
    o_c = tl.arange(0, BC)
    if (tl.load(reselect + i_r) != 0) & is_read(unread, tl.program_id(0) % H):
        tokens = tl.load(tail_start + i_r)
        k = tl.minimum(tl.load(k_units + i_r), tl.minimum(tl.cdiv(tokens, UNIT), capacity))
        i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
        tl.store(out_counts + i_l, k)
        below, start, _ = forced_range(tokens, sink, recent, UNIT)
        p_selected = selected + i_rh * capacity
        m_c = o_c < k
        # [BC]
        b_unit = tl.load(p_selected + o_c, mask=m_c, other=0)
        b_s = _load_scores(scores + i_rh * width, b_unit, m_c, below, start)
        # Integers that ascend as the scores fall; lists ascend, so of equal scores the place in
        # the list decides, and what is past the list comes last.
        b_bits = b_s.to(tl.int32, bitcast=True)
        b_bits = tl.where(b_bits < 0, b_bits & 0x7FFFFFFF, -1 - b_bits)
        b_key = (b_bits.to(tl.int64) << 32) | o_c.to(tl.int64)
        b_place = (_ascending(b_key, DIMS) & 0xFFFFFFFF).to(tl.int32)
        b_out = tl.load(p_selected + b_place, mask=m_c, other=0)
        tl.store(out_indices + i_l * capacity + o_c, b_out, mask=m_c)


@triton.jit
def _bound_logs(
    p_bounds,
    heads,
    b_unit,
    m_unit,
    tokens,
    logits,
    UNIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """log2 of the mass that bounds allow each unit for each query head, [units, heads].

    ``heads`` holds the heads, a mask of those that exist, and the distance between their bounds.
    ``logits`` holds the factors of logits.
    """
    o_g, m_g, width = heads
    scale_log2, logit_cap = logits
    m = m_unit[:, None] & m_g[None, :]
    b_s = tl.load(p_bounds + o_g[None, :] * width + b_unit[:, None], mask=m, other=0.0)
    b_s *= scale_log2
    if HAS_CAP:
        b_s = logit_cap * (1.0 - 2.0 / (tl.exp2(2.0 * b_s / logit_cap) + 1.0))
        b_s *= 1.4426950408889634
    b_size = tl.minimum(tokens - b_unit * UNIT, UNIT).to(tl.float32)
    b_s += tl.log2(tl.maximum(b_size, 1.0))[:, None]
    return tl.where(m, b_s, float("-inf"))


@triton.jit
def residual_bounds_kernel(
    bounds,
    scores,
    plan,
    unread,
    list_rows,
    indices,
    counts,
    out,
    width,
    capacity,
    checks_held,
    sink,
    recent,
    scale_log2,
    logit_cap,
    floor,
    margin,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, UNIT: tl.constexpr,
    BATCH_UNITS: tl.constexpr, BT: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    i_rh, i_r = tl.program_id(0).to(tl.int64), tl.program_id(0) // H
    if selects_anew(plan, i_r) & is_read(unread, tl.program_id(0) % H):
        tokens = tl.load(plan.tail_start + i_r)
        units = tl.cdiv(tokens, UNIT)
        i_l = tl.load(list_rows + i_r).to(tl.int64) * H + i_rh % H
        kept = tl.load(counts + i_l)
        below, start, forced = forced_range(tokens, sink, recent, UNIT)
        first = tl.minimum(prologue_units(forced, BATCH_UNITS), kept)
        o_g = tl.arange(0, BG)
        m_g = o_g < G
        p_scores = scores + i_rh * width
        p_bounds = bounds + i_rh * (G * width)
        p_list = indices + i_l * capacity
        heads, logits = (o_g, m_g, width), (scale_log2, logit_cap)
        # The worst of a list decides who is in it.
        last = tl.load(p_list + kept - 1)
        worst = rankable(tl.load(p_scores + last), (last < below) | (last >= start), last >= 0)

        b_top = tl.full((BG,), float("-inf"), tl.float32)
        for i_u in tl.range(0, units, BT):
            o_u = i_u + tl.arange(0, BT)
            b_s = _bound_logs(p_bounds, heads, o_u, o_u < units, tokens, logits, UNIT, HAS_CAP)
            b_top = tl.maximum(b_top, tl.max(b_s, 0))
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)

        b_residual = tl.zeros((BG,), tl.float32)
        for i_u in tl.range(0, units, BT):
            o_u = i_u + tl.arange(0, BT)
            m_u = o_u < units
            b_s = _load_scores(p_scores, o_u, m_u, below, start)
            m_u &= (b_s < worst) | ((b_s == worst) & (o_u > last))
            b_s = _bound_logs(p_bounds, heads, o_u, m_u, tokens, logits, UNIT, HAS_CAP)
            b_residual += tl.sum(tl.exp2(b_s - b_top[None, :]), 0)

        # Stop checks from the last to the first, a tile of units at a time.
        BC: tl.constexpr = BT // BATCH_UNITS
        checks = tl.cdiv(kept - first, BATCH_UNITS)
        p_out = out + (i_rh * G + o_g)[None, :] * checks_held
        for i_t in tl.range(0, checks + 1, BC):
            o_t = checks - i_t - tl.arange(0, BC)
            o_n = first + o_t[:, None] * BATCH_UNITS + tl.arange(0, BATCH_UNITS)[None, :]
            o_n = tl.reshape(o_n, (BT,))
            m_n = (o_n >= first) & (o_n < kept)
            b_unit = tl.load(p_list + o_n, mask=m_n, other=0)
            b_s = _bound_logs(p_bounds, heads, b_unit, m_n, tokens, logits, UNIT, HAS_CAP)
            # [BC, BG]: mass of the microbatch after each check, then of all after it.
            b_m = tl.sum(tl.reshape(tl.exp2(b_s - b_top[None, :]), (BC, BATCH_UNITS, BG)), 1)
            b_after = b_residual[None, :] + tl.cumsum(b_m, 0)
            b_out = tl.log2((b_after + floor) * margin) + b_top[None, :]
            b_left = units - tl.minimum(first + o_t * BATCH_UNITS, kept)
            b_out = tl.where((b_left > 0)[:, None], b_out, float("-inf"))
            tl.store(p_out + o_t[:, None], b_out, mask=(o_t >= 0)[:, None] & m_g[None, :])
            b_residual += tl.sum(b_m, 0)


def rank_units_triton(
    scores: Scores,
    plan: DecodePlan,
    selected: torch.Tensor,
    ranking: Lists,
    *,
    always: Always,
) -> None:
    """Launch :func:`rank_units_kernel`, one program a row and KV head."""
    rows, heads, width = scores.values.shape
    tile = max(2, next_power_of_2(ranking.capacity))
    rank_units_kernel[(rows * heads,)](
        scores.values, selected, plan.tail_start, plan.k_units, plan.reselect, scores.unread,
        ranking.rows, ranking.indices, ranking.counts, width, ranking.capacity, always.sink,
        always.recent,
        H=heads, UNIT=ranking.unit, BC=tile, DIMS=tile.bit_length() - 1,
        num_warps=RANK_WARPS if tile <= 1024 else 8,
    )  # fmt: skip


def residual_bounds_triton(
    bounds: torch.Tensor, scores: Scores, plan: DecodePlan, ranking: Lists, rule: ResidualRule,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Launch :func:`residual_bounds_kernel`, one program a row and KV head."""
    rows, heads, group, width = bounds.shape
    always, softmax, microbatch = rule.always, rule.softmax, rule.microbatch
    residual_bounds_kernel[(rows * heads,)](
        bounds, scores.values, plan.args, scores.unread, ranking.rows, ranking.indices,
        ranking.counts, out, width, ranking.capacity, out.shape[3], always.sink, always.recent,
        softmax.scale_log2, softmax.logit_cap, BOUND_FLOOR,
        (1 + BOUND_MARGIN) * math.exp(-rule.margin),
        H=heads, G=group, BG=next_power_of_2(group), UNIT=ranking.unit,
        BATCH_UNITS=microbatch // ranking.unit, BT=BOUNDS_TILE, HAS_CAP=softmax.logit_cap > 0,
        num_warps=4,
    )  # fmt: skip
