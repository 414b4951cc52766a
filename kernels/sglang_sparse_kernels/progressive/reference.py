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


class RankedRow:
    """What a row may attend to: its ranked units, then its tail, or what a head has in its place.

    Attributes:
        units: of the row's domain.
        counts: int64 [H], ranked units of each list.
        num_ranked: the largest of them.
        reads: bool [H], KV heads that have a list.
    """

    def __init__(
        self, q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, row: int,
        softmax: Softmax, held: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute the logits; ``held``, int64 [H], says how many units of each list can be read."""
        heads, unit, acc = kv.num_heads, ranking.unit, accumulate_dtype(q.dtype)
        device, windows = q.device, ranking.windows
        seq_len, tail_start = int(plan.seq_lens[row]), int(plan.tail_start[row])
        list_row = int(ranking.rows[row])
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
        place = torch.arange(num_ranked, device=device)
        in_list = place < counts[:, None]
        blocks = ranking.indices[list_row, :, :num_ranked].long().where(in_list, 0)
        selected = (blocks[..., None] * unit + torch.arange(unit, device=device)).flatten(1)
        if held is not None:
            in_list = place < held[:, None]
        visible = in_list.repeat_interleave(unit, 1) & (selected < tail_start)
        positions = torch.cat((selected.where(visible, 0), tail), 1)
        self._visible = torch.cat((visible, in_tail), 1)
        self._at = kv.slots(row, positions), torch.arange(heads, device=device)[:, None]
        self._kv, self._acc = kv, acc
        keys = kv.keys(self._at, acc).where(self._visible[..., None], 0)
        query = q[row].unflatten(0, (heads, -1)).to(acc)
        logits = softmax.logits(torch.einsum("hgd,hnd->hgn", query, keys))
        self._logits = logits.masked_fill(~self._visible[:, None], float("-inf"))
        self._tokens, self._unit, self._row = tail_start, unit, row
        self._place, self._held = place, counts if held is None else held
        self.units, self.counts = -(-tail_start // unit), counts
        self.num_ranked, self.reads = num_ranked, reads

    def checks(self, stop: MassStop) -> tuple[torch.Tensor, torch.Tensor]:
        """Stop checks in their order: one before the first microbatch, one after each.

        A check depends on nothing that is attended to after it, to the bit. One after the last unit
        that can be read sees no more mass.

        Returns:
            int64 [H, checks], units that are attended to by then; float64 [H, checks], the share
            that is missing by then, as is estimated.
        """
        step, count, place = stop.microbatch // self._unit, self.num_ranked, self._place
        logits = self._logits.double()
        # Every head attends to its tail, whatever follows.
        shift = logits[..., count * self._unit :].amax(-1, keepdim=True)
        weights = (logits - shift).exp()
        mass = weights[..., : count * self._unit].unflatten(-1, (count, self._unit)).sum(-1)
        before = weights[..., count * self._unit :].sum(-1, keepdim=True)
        forced = forced_units(self._tokens, self._unit, stop.always)
        first = min(prologue_units(forced, step), count)
        checks = torch.arange(-(-(count - first) // step) + 1, device=place.device)
        after = (first + checks * step).clamp(max=count)
        sums = torch.cat((before, before + mass.cumsum(-1)), -1)[..., after]
        no_rank = (place < forced) | (place >= self._held[:, None])
        smallest = mass.masked_fill(no_rank[:, None], float("inf"))
        smallest = smallest.cummin(-1).values[..., (after - 1).clamp(min=0)]
        attended = after.minimum(self.counts[:, None])
        left = (self.units - attended)[:, None]
        if stop.residual is None:
            residual = smallest * left
        else:
            bound = stop.residual[self._row, ..., : len(checks)].double() * math.log(2)
            residual = (bound - shift).exp()
        missing = (residual / (sums + residual)).where(left > 0, 0).nan_to_num(1.0)
        return attended, missing.amax(1) if stop.share == "min" else missing.mean(1)

    def output(self, got: torch.Tensor) -> torch.Tensor:
        """Attention to ``got`` (int64 [H]) units of each list, and to the tail: [H * G, D]."""
        kept = (self._place < got[:, None]).repeat_interleave(self._unit, 1)
        kept = torch.nn.functional.pad(
            kept, (0, self._visible.shape[1] - kept.shape[1]), value=True
        )
        kept &= self._visible
        weights = self._logits.masked_fill(~kept[:, None], float("-inf")).softmax(-1)
        values = self._kv.values(self._at, self._acc).where(kept[..., None], 0)
        return torch.einsum("hgn,hnd->hgd", weights, values).flatten(0, 1)

    def count(
        self, heads: torch.Tensor, got: torch.Tensor, missing: torch.Tensor, epsilon: float,
        counters: torch.Tensor,
    ) -> None:  # fmt: skip
        """Add stops of ``heads``, and the shares missing there (all [H]), to the counters."""
        got, missing = got[heads], missing[heads]
        capped = (missing > 1 - epsilon) & (got < self.units)
        share_ppm = ((1 - missing) * 1e6).round()
        lists, attended = len(got), int(got.sum())
        added = [lists, attended, lists * self.units, int(share_ppm.sum()), int(capped.sum())]
        counters.add_(torch.tensor(added, device=counters.device))


def stop_at(missing: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The first check (int64 [H]) at which no more than 1 - epsilon is missing; else the last."""
    enough = (missing <= 1 - epsilon) & (epsilon < 1)
    enough[:, 0] = False
    return torch.where(enough.any(1), enough.int().argmax(1), missing.shape[1] - 1)


def progressive_decode_attention_reference(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, *, softmax: Softmax, out: torch.Tensor | None,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.progressive_decode_attention`."""
    for row in range(plan.num_rows):
        epsilon = float(stop.epsilons[row])
        ranked = RankedRow(q, kv, plan, ranking, row, softmax)
        got = torch.zeros_like(ranked.counts)
        if ranked.num_ranked:
            attended, missing = ranked.checks(stop)
            at = stop_at(missing, epsilon)[:, None]
            got = attended.gather(1, at)[:, 0]
            if state.counters is not None:
                final = missing.gather(1, at)[:, 0]
                ranked.count(ranked.reads, got, final, epsilon, state.counters)
        state.reached[int(ranking.rows[row])] = got.int()
        if out is not None:
            out[row] = ranked.output(got).to(out.dtype)
