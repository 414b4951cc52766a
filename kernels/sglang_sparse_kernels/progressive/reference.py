# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of ranked lists, of bounds of what is left, and of stopping."""

import math

import torch

from ..common import accumulate_dtype, rankable
from ..plan import DecodePlan
from ..records import Always, KVView, Lists, Scores, Softmax, scored_rows
from .types import MassStop, ResidualRule, StopState

BOUND_MARGIN = 2.0**-8
"""Bounds of the residual mass are raised by this part, so that rounding never makes them small."""

BOUND_FLOOR = 2.0**-100
"""They are raised by at least this part of the largest bound: smaller sums may underflow."""


def forced_units(tokens: int, unit: int, always: Always) -> int:
    """How many units of a domain of ``tokens`` tokens are always selected (``select_topk``)."""
    units, below = -(-tokens // unit), -(-always.sink // unit)
    return min(below, units) + max(0, units - max(max(0, tokens - always.recent) // unit, below))


def prologue_units(forced: int, step: int) -> int:
    """How many forced units are attended to before the first microbatch of ``step`` units.

    If they are few, all of them. If they are more, as many as fill whole microbatches, with room
    for one unit of the tail. The units left over would take as long as a microbatch of their own,
    so they are part of the first one.
    """
    return (forced + 1) // step * step - 1 if forced + 1 >= step else forced


def rank_units_reference(
    scores: Scores,
    plan: DecodePlan,
    selected: torch.Tensor,
    ranking: Lists,
    *,
    always: Always,
) -> None:
    """See :func:`sglang_sparse_kernels.rank_units`."""
    values, read, unit = scores.values, scores.read, ranking.unit
    for row in plan.reselect.nonzero().squeeze(1).tolist():
        tokens = int(plan.tail_start[row])
        kept = min(int(plan.k_units[row]), -(-tokens // unit), ranking.capacity)
        target = int(ranking.rows[row])
        ranking.counts[target, read] = kept
        units = selected[row, read, :kept].long()
        recent = max(0, tokens - always.recent) // unit
        forced = (units < -(-always.sink // unit)) | (units >= recent)
        ranked = rankable(values[row, read].gather(1, units), values.dtype)
        ranked = ranked.masked_fill(forced, torch.inf)
        # Forced units rank first; stable sorts keep the lower index, lists ascend.
        by_score = ranked.sort(dim=-1, descending=True, stable=True).indices
        by_force = forced.gather(1, by_score).int()
        order = by_score.gather(1, by_force.sort(dim=-1, descending=True, stable=True).indices)
        ranking.indices[target, read, :kept] = units.gather(1, order).int()


def residual_bounds_reference(
    bounds: torch.Tensor, scores: Scores, plan: DecodePlan, ranking: Lists, rule: ResidualRule,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.residual_bounds`."""
    unit, read = ranking.unit, scores.read
    step, always, margin = rule.microbatch // unit, rule.always, rule.margin
    for row in scored_rows(plan) if len(read) else ():
        tokens, target = int(plan.tail_start[row]), int(ranking.rows[row])
        units = -(-tokens // unit)
        kept = int(ranking.counts[target, read].max())  # a row's lists are equally long
        first = min(prologue_units(forced_units(tokens, unit, always), step), kept)
        sizes = (tokens - torch.arange(units, device=bounds.device) * unit).clamp(max=unit)
        logs = rule.softmax.logits(bounds[row, read, :, :units]) + sizes.log()
        top = logs.amax(-1, keepdim=True)
        mass = (logs - top).exp()
        order = ranking.indices[target, read, None, :kept].long().expand(*mass.shape[:2], kept)
        ranked = mass.gather(-1, order)
        unranked = mass.scatter(-1, order, 0).sum(-1, keepdim=True)
        # after[..., i]: the ranked units from the i-th on, and those that are not ranked.
        after = ranked.flip(-1).cumsum(-1).flip(-1)
        after = torch.cat((after, torch.zeros_like(unranked)), -1) + unranked
        steps = torch.arange(out.shape[-1], device=bounds.device)
        attended = (first + steps * step).clamp(max=kept)
        left = (after[..., attended] + BOUND_FLOOR) * (1 + BOUND_MARGIN)
        left = left.where(attended < units, 0)
        out[row, read] = ((left.log() + top - margin) / math.log(2)).to(out.dtype)


def progressive_decode_attention_reference(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, *, softmax: Softmax, out: torch.Tensor | None,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.progressive_decode_attention`."""
    heads, group, unit = kv.num_heads, kv.group_of(q), ranking.unit
    windows = ranking.windows
    acc = accumulate_dtype(q.dtype)
    device, step = q.device, stop.microbatch // unit
    head = torch.arange(heads, device=device)[:, None]
    within = torch.arange(unit, device=device)
    for row in range(plan.num_rows):
        seq_len, tail_start = int(plan.seq_lens[row]), int(plan.tail_start[row])
        list_row, epsilon = int(ranking.rows[row]), float(stop.epsilons[row])
        units = -(-tail_start // unit)
        num_ranked = min(int(plan.k_units[row]), ranking.capacity)
        counts = ranking.counts[list_row].clamp(max=num_ranked).long()
        tail = torch.arange(tail_start, seq_len, device=device).expand(heads, -1)
        in_tail = torch.ones_like(tail, dtype=torch.bool)
        reads = torch.ones(heads, dtype=torch.bool, device=device)
        if windows is not None and tail_start > 0:
            # To a streaming head its window is the tail, and it has no list.
            reads = windows.streams == 0
            counts = counts.where(reads, 0)
            window = windows.positions(seq_len).expand(heads, -1)
            in_tail = reads[:, None].expand_as(tail)
            in_tail = torch.cat((in_tail, ~reads[:, None].expand_as(window)), 1)
            tail = torch.cat((tail, window), 1)
        num_ranked = int(counts.max()) if num_ranked else 0
        in_list = torch.arange(num_ranked, device=device) < counts[:, None]
        blocks = ranking.indices[list_row, :, :num_ranked].long().where(in_list, 0)
        selected = (blocks[..., None] * unit + within).flatten(1)
        visible = in_list.repeat_interleave(unit, 1) & (selected < tail_start)
        positions = torch.cat((selected.where(visible, 0), tail), 1)
        visible = torch.cat((visible, in_tail), 1)
        slots = kv.slots(row, positions)
        keys = kv.keys((slots, head), acc).where(visible[..., None], 0)
        query = q[row].view(heads, group, -1).to(acc)
        logits = softmax.logits(torch.einsum("hgd,hnd->hgn", query, keys))
        logits = logits.masked_fill(~visible[:, None], float("-inf"))
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp()
        got = torch.zeros_like(counts)
        if num_ranked:
            mass = weights[..., : num_ranked * unit].unflatten(-1, (num_ranked, unit)).sum(-1)
            before = weights[..., num_ranked * unit :].sum(-1, keepdim=True)
            forced = forced_units(tail_start, unit, stop.always)
            first = min(prologue_units(forced, step), num_ranked)
            # One entry a stop check, j microbatches after the prologue.
            checks = torch.arange(-(-(num_ranked - first) // step) + 1, device=device)
            place = (first + checks * step).clamp(max=num_ranked)
            sums = torch.cat((before, before + mass.cumsum(-1)), -1)[..., place]
            smallest = mass.masked_fill(
                torch.arange(num_ranked, device=device) < forced, float("inf")
            )
            smallest = smallest.cummin(-1).values[..., (place - 1).clamp(min=0)]
            attended = place.minimum(counts[:, None])  # [heads, checks]
            left = (units - attended)[:, None]
            if stop.residual is None:
                residual = smallest * left
            else:
                bound = stop.residual[row, ..., : len(checks)].to(acc) * math.log(2)
                residual = (bound - top).exp()
            missing = (residual / (sums + residual)).where(left > 0, 0).nan_to_num(1.0)
            missing = missing.amax(1) if stop.share == "min" else missing.mean(1)
            enough = (missing <= 1 - epsilon) & (epsilon < 1) & (checks > 0)
            at = torch.where(enough.any(1), enough.int().argmax(1), len(checks) - 1)
            got = attended.gather(1, at[:, None]).squeeze(1)
            kept = torch.arange(num_ranked, device=device) < got[:, None]
            weights[..., : num_ranked * unit] *= kept.repeat_interleave(unit, 1)[:, None]
            if state.counters is not None:
                final = missing.gather(1, at[:, None]).squeeze(1)[reads]
                capped = (final > 1 - epsilon) & (got[reads] < units)
                share_ppm = ((1 - final) * 1e6).round()
                lists = int(reads.sum())
                sums_of = (got.sum(), lists * units, share_ppm.sum(), capped.sum())
                state.counters.add_(torch.tensor([lists, *map(int, sums_of)], device=device))
        state.reached[list_row] = got.int()
        if out is not None:
            values = kv.values((slots, head), acc).where(visible[..., None], 0)
            weights /= weights.sum(-1, keepdim=True)
            result = torch.einsum("hgn,hnd->hgd", weights, values)
            out[row] = result.reshape(heads * group, -1).to(out.dtype)
