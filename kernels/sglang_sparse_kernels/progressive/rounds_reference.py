# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of progressive attention in rounds."""

import torch

from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from .reference import RankedRow, forced_units, prologue_units, stop_at
from .rounds_state import Rounds
from .types import MORE_TOKENS, ROUNDS, MassStop, StopState


def begin_rounds_reference(
    plan: DecodePlan, ranking: Lists, stop: MassStop, state: StopState, rounds: Rounds
) -> None:
    """See :func:`sglang_sparse_kernels.progressive.begin_rounds`."""
    assert state.expected is not None
    span, step = rounds.span, stop.microbatch // ranking.unit
    for row in range(plan.num_rows):
        kept = min(int(plan.k_units[row]), ranking.capacity)
        counts = ranking.counts[int(ranking.rows[row])].clamp(0, kept)
        taken = state.expected[int(plan.request_slots[row])].clamp(min=1)
        taken = taken + MORE_TOKENS // stop.microbatch
        forced = forced_units(int(plan.tail_start[row]), ranking.unit, stop.always)
        first = prologue_units(forced, step)
        span.first[row] = 0
        span.last[row] = torch.minimum(counts, first + taken * step)


def attend_round_reference(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, rounds: Rounds, *, softmax: Softmax, out: torch.Tensor,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.progressive.attend_round`."""
    assert state.expected is not None
    heads, span, number = kv.num_heads, rounds.span, rounds.number
    last_round = number == ROUNDS - 1
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
            got = attended.gather(1, at[:, None])[:, 0]
            following = attended.gather(1, latest[:, None])[:, 0].where(goes & ~stopped, held)
            span.first[row], span.last[row] = held.int(), following.int()
            if state.counters is not None and stopped.any():
                final = missing.gather(1, at[:, None])[:, 0]
                ranked.count(stopped, got, final, epsilon, state.counters)
        for numbers, fresh in ((state.expected[slot], at), (state.reached[target], got)):
            numbers.copy_(fresh.int().where(stopped, numbers))
        if stopped.any():
            mine = out[row].unflatten(0, (heads, -1))
            fresh = ranked.output(got).to(out.dtype).unflatten(0, (heads, -1))
            mine.copy_(fresh.where(stopped[:, None, None], mine))
