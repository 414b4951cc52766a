# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of progressive attention in rounds."""

import torch

from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from .reference import RankedRow, forced_units, prologue_units, stop_at
from .rounds_state import Rounds
from .types import ROUNDS, MassStop, StopState


def begin_rounds_reference(
    plan: DecodePlan, ranking: Lists, stop: MassStop, state: StopState, rounds: Rounds
) -> None:
    """See :func:`sglang_sparse_kernels.progressive.begin_rounds`."""
    assert state.expected is not None
    span, following = rounds.span, rounds.following
    step = stop.microbatch // ranking.unit
    for row in range(plan.num_rows):
        kept = min(int(plan.k_units[row]), ranking.capacity)
        counts = ranking.counts[int(ranking.rows[row])].clamp(0, kept)
        taken = state.expected[int(plan.request_slots[row])].clamp(min=1)
        first = _first_units(plan, ranking, stop, row)
        span.first[row] = 0
        span.last[row] = torch.minimum(counts, first + taken * step)
        if following is not None:
            following.first[row] = span.last[row]
            following.last[row] = _twice(span.last[row], first, counts)


def _first_units(plan: DecodePlan, ranking: Lists, stop: MassStop, row: int) -> int:
    forced = forced_units(int(plan.tail_start[row]), ranking.unit, stop.always)
    return prologue_units(forced, stop.microbatch // ranking.unit)


def _twice(last: torch.Tensor, first: int, counts: torch.Tensor) -> torch.Tensor:
    """Where lists of ``counts`` units are twice as many microbatches further than at ``last``."""
    return torch.minimum(2 * last - torch.clamp(counts, max=first), counts)


def attend_round_reference(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, rounds: Rounds, *, softmax: Softmax, out: torch.Tensor,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.progressive.attend_round`."""
    assert state.expected is not None
    heads, span, number = kv.num_heads, rounds.span, rounds.number
    last_round, ahead = number == ROUNDS - 1, rounds.round(number + 1).following
    for row in range(plan.num_rows):
        held = span.last[row].long()
        goes = (held > span.first[row]) | (number == 0)
        if not goes.any():
            continue
        epsilon, target = float(stop.epsilons[row]), int(ranking.rows[row])
        slot = int(plan.request_slots[row])
        ranked = RankedRow(q, kv, plan, ranking, row, softmax, held)
        at, got, stopped = torch.zeros_like(held), torch.zeros_like(held), goes
        if ranked.num_ranked:
            attended, missing = ranked.checks(stop)
            at_held = (attended <= held[:, None]).sum(1) - 1
            at = stop_at(missing, epsilon)
            if last_round:
                at = torch.minimum(at, at_held)
            stopped = goes & (at <= at_held)
            latest = (at + 1).clamp(max=missing.shape[1] - 1)
            if number < ROUNDS - 2:
                latest = torch.minimum(latest, 2 * at_held)
            got = attended.gather(1, at[:, None])[:, 0]
            following = attended.gather(1, latest[:, None])[:, 0].where(goes & ~stopped, held)
            span.first[row], span.last[row] = held.int(), following.int()
            if ahead is not None:
                twice = _twice(following, _first_units(plan, ranking, stop, row), ranked.counts)
                ahead.first[row] = following
                ahead.last[row] = twice.where(goes & ~stopped, following)
            if state.counters is not None and stopped.any():
                final = missing.gather(1, at[:, None])[:, 0]
                ranked.count(stopped, got, final, epsilon, state.counters)
        for numbers, fresh in ((state.expected[slot], at), (state.reached[target], got)):
            numbers.copy_(fresh.int().where(stopped, numbers))
        if stopped.any():
            mine = out[row].unflatten(0, (heads, -1))
            fresh = ranked.output(got).to(out.dtype).unflatten(0, (heads, -1))
            mine.copy_(fresh.where(stopped[:, None, None], mine))
