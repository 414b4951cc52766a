# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of ranked lists, of bounds of what is left, and of stopping."""

import math

import torch

from ..common import accumulate_dtype, group_size, rankable
from ..plan import DecodePlan

BOUND_MARGIN = 2.0**-8
"""What bounds of the remaining mass are raised by, so that no rounding makes them too small."""

BOUND_FLOOR = 2.0**-100
"""What they are raised by at least, as a part of the largest bound: sums below it may underflow."""


def forced_units(tokens: int, unit: int, sink: int, recent: int) -> int:
    """How many units of a domain of ``tokens`` tokens are always selected (``select_topk``)."""
    units, below = -(-tokens // unit), -(-sink // unit)
    return min(below, units) + max(0, units - max(max(0, tokens - recent) // unit, below))


def prologue_units(forced: int, step: int) -> int:
    """Units attended to before the first microbatch of ``step`` units, of those that are forced.

    All of them, if they are few. Of more, as many as fill whole microbatches with a unit of room
    for the tail: what is left over would take as long as a microbatch, and goes with the first.
    """
    return (forced + 1) // step * step - 1 if forced + 1 >= step else forced


def rank_units_reference(
    scores: torch.Tensor,
    plan: DecodePlan,
    picked: torch.Tensor,
    *,
    unit: int,
    sink: int,
    recent: int,
    out_indices: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.rank_units`."""
    for row in plan.reselect.nonzero().squeeze(1).tolist():
        tokens = int(plan.tail_start[row])
        kept = min(int(plan.k_units[row]), -(-tokens // unit), out_indices.shape[2])
        target = int(plan.list_rows[row])
        out_counts[target] = kept
        units = picked[row, :, :kept].long()
        forced = (units < -(-sink // unit)) | (units >= max(0, tokens - recent) // unit)
        ranked = rankable(scores[row].gather(1, units), scores.dtype)
        ranked = ranked.masked_fill(forced, torch.inf)
        # Forced units rank first; stable sorts keep the lower index, lists ascend.
        by_score = ranked.sort(dim=-1, descending=True, stable=True).indices
        by_force = forced.gather(1, by_score).int()
        order = by_score.gather(1, by_force.sort(dim=-1, descending=True, stable=True).indices)
        out_indices[target, :, :kept] = units.gather(1, order).int()


def _capped(logits: torch.Tensor, logit_cap: float) -> torch.Tensor:
    return logit_cap * torch.tanh(logits / logit_cap) if logit_cap > 0 else logits


def remaining_bounds_reference(
    bounds: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    unit: int,
    sink: int,
    recent: int,
    microbatch: int,
    sm_scale: float,
    logit_cap: float,
    lowered: float,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.remaining_bounds`."""
    step = microbatch // unit
    for row in (plan.reselect * plan.k_units).nonzero().squeeze(1).tolist():
        tokens, target = int(plan.tail_start[row]), int(plan.list_rows[row])
        units = -(-tokens // unit)
        kept = int(counts[target].max())  # a row's lists are equally long
        first = min(prologue_units(forced_units(tokens, unit, sink, recent), step), kept)
        sizes = (tokens - torch.arange(units, device=bounds.device) * unit).clamp(max=unit)
        logs = _capped(bounds[row, :, :, :units] * sm_scale, logit_cap) + sizes.log()
        top = logs.amax(-1, keepdim=True)
        mass = (logs - top).exp()
        order = indices[target, :, None, :kept].long().expand(*mass.shape[:2], kept)
        listed = mass.gather(-1, order)
        rest = mass.scatter(-1, order, 0).sum(-1, keepdim=True)
        # after[..., i]: of the listed ones from the i-th on, and of those that are not listed.
        after = torch.cat((listed.flip(-1).cumsum(-1).flip(-1), torch.zeros_like(rest)), -1) + rest
        steps = torch.arange(out.shape[-1], device=bounds.device)
        attended = (first + steps * step).clamp(max=kept)
        left = (after[..., attended] + BOUND_FLOOR) * (1 + BOUND_MARGIN)
        left = left.where(attended < units, 0)
        out[row] = ((left.log() + top - lowered) / math.log(2)).to(out.dtype)


def progressive_decode_attention_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    ranked: torch.Tensor,
    reached: torch.Tensor,
    *,
    unit: int,
    page_size: int,
    sink: int,
    recent: int,
    microbatch: int,
    epsilons: torch.Tensor,
    share: str,
    rest_bounds: torch.Tensor | None,
    sm_scale: float,
    logit_cap: float,
    out: torch.Tensor,
    counters: torch.Tensor | None,
) -> None:
    """See :func:`sglang_sparse_kernels.progressive_decode_attention`."""
    heads = k_buffer.shape[1]
    group = group_size(q.shape[1], heads)
    acc = accumulate_dtype(q.dtype)
    device, step = q.device, microbatch // unit
    head = torch.arange(heads, device=device)[:, None]
    within = torch.arange(unit, device=device)
    for row in range(plan.num_rows):
        seq_len, tail_start = int(plan.seq_lens[row]), int(plan.tail_start[row])
        state, epsilon = int(plan.list_rows[row]), float(epsilons[row])
        units = -(-tail_start // unit)
        listed = min(int(plan.k_units[row]), indices.shape[2])
        counts = ranked[state].clamp(max=listed).long() if listed else ranked[state].long() * 0
        listed = int(counts.max()) if listed else 0
        in_list = torch.arange(listed, device=device) < counts[:, None]
        blocks = indices[state, :, :listed].long().where(in_list, 0)
        selected = (blocks[..., None] * unit + within).flatten(1)
        visible = in_list.repeat_interleave(unit, 1) & (selected < tail_start)
        tail = torch.arange(tail_start, seq_len, device=device).expand(heads, -1)
        positions = torch.cat((selected.where(visible, 0), tail), 1)
        visible = torch.cat((visible, torch.ones_like(tail, dtype=torch.bool)), 1)
        pages = plan.page_table[row].long()[positions // page_size]
        slots = pages * page_size + positions % page_size
        keys = k_buffer[slots, head].to(acc).where(visible[..., None], 0)
        values = v_buffer[slots, head].to(acc).where(visible[..., None], 0)
        query = q[row].view(heads, group, -1).to(acc)
        logits = _capped(torch.einsum("hgd,hnd->hgn", query, keys) * sm_scale, logit_cap)
        logits = logits.masked_fill(~visible[:, None], float("-inf"))
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp()
        if listed:
            mass = weights[..., : listed * unit].unflatten(-1, (listed, unit)).sum(-1)
            before = weights[..., listed * unit :].sum(-1, keepdim=True)
            forced = forced_units(tail_start, unit, sink, recent)
            first = min(prologue_units(forced, step), listed)
            # One entry a look at the share, j microbatches after the prologue.
            looks = torch.arange(-(-(listed - first) // step) + 1, device=device)
            place = (first + looks * step).clamp(max=listed)
            sums = torch.cat((before, before + mass.cumsum(-1)), -1)[..., place]
            least = mass.masked_fill(torch.arange(listed, device=device) < forced, float("inf"))
            least = least.cummin(-1).values[..., (place - 1).clamp(min=0)]
            attended = place.minimum(counts[:, None])  # [heads, looks]
            left = (units - attended)[:, None]
            if rest_bounds is None:
                rest = least * left
            else:
                bound = rest_bounds[row, ..., : len(looks)].to(acc) * math.log(2)
                rest = (bound - top).exp()
            missing = (rest / (sums + rest)).where(left > 0, 0).nan_to_num(1.0)
            missing = missing.amax(1) if share == "min" else missing.mean(1)
            done = (missing <= 1 - epsilon) & (epsilon < 1) & (looks > 0)
            at = torch.where(done.any(1), done.int().argmax(1), len(looks) - 1)
            got = attended.gather(1, at[:, None]).squeeze(1)
            reached[state] = got.int()
            kept = torch.arange(listed, device=device) < got[:, None]
            weights[..., : listed * unit] *= kept.repeat_interleave(unit, 1)[:, None]
            if counters is not None:
                final = missing.gather(1, at[:, None]).squeeze(1)
                capped = (final > 1 - epsilon) & (got < units)
                sums_of = (
                    got.sum(),
                    heads * units,
                    ((1 - final) * 1e6).round().sum(),
                    capped.sum(),
                )
                counters += torch.tensor([heads, *map(int, sums_of)], device=device)
        else:
            reached[state] = 0
        result = torch.einsum("hgn,hnd->hgd", weights / weights.sum(-1, keepdim=True), values)
        out[row] = result.reshape(heads * group, -1).to(out.dtype)
