# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention in rounds: tiles, checks and merges are those of all at once.

A chunk has the same result in whichever round it is attended to, and a merge takes the chunks up to
the stop in one go, after the last round. So the result is that of all at once, to the bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..plan import DecodePlan
from ..records import KVView, Lists, ListSpan, Softmax
from ..triton_ops import begin, begin_beside, constants, end_after, overlapping
from .finish_kernel import SLICES, check_stop, merge_chunks
from .kernel import (
    CHANNELS,
    check_arguments,
    layout_of,
    make_launch,
    num_programs,
    progress_of,
)
from .rounds_state import Rounds
from .types import MORE_TOKENS, ROUNDS, MassStop, StopState
from .work_kernel import Rows, attend_split, candidate_units, chunk_plan, row_plan

# Not measured on a GPU yet.
TILE_ROWS = 64


class Span(NamedTuple):
    """A :class:`.records.ListSpan` as kernels write it."""

    first: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def of(span: ListSpan) -> "Span":
        """The tensors of ``span``."""
        return Span(span.first, span.last)


@triton.jit
def _units(chunks, first_chunks, first_units, candidates, L: tl.constexpr):
    """Units of a list that lie in its first ``chunks`` chunks, of which some are the prologue's."""
    step: tl.constexpr = L.BN * L.BATCH_TILES // L.UNIT
    return tl.minimum(first_units + (chunks - first_chunks) * step, candidates)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=[*SLICES, "epsilons", "shares"]
)
def begin_rounds_kernel(
    rows, k_units, ranked, expected, request_slots, epsilons, shares, span, progress, windows,
    capacity, count, MORE: tl.constexpr, L: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BT + tl.arange(0, BT)
    m_r = o_r < count
    i_rh = tl.where(m_r, o_r, 0)
    i_e = tl.load(request_slots + i_rh // L.H).to(tl.int64) * L.H + i_rh % L.H
    b_expected = tl.maximum(tl.load(expected + i_e), 1) + MORE
    b_candidates = candidate_units(k_units, rows.list_rows, ranked, windows, i_rh, capacity, L.H)
    _, _, b_prologue, b_total, _, b_first_units, _ = row_plan(rows, windows, i_rh, b_candidates, L)
    _, _, b_first_chunks, b_batches, _ = chunk_plan(b_prologue, b_total, L)
    b_chunks = b_first_chunks + tl.minimum(b_expected, b_batches)
    b_last = _units(b_chunks, b_first_chunks, b_first_units, b_candidates, L)
    tl.store(progress.attended + o_r, tl.zeros_like(b_chunks), mask=m_r)
    tl.store(progress.extended + o_r, b_chunks, mask=m_r)
    tl.store(progress.candidates + o_r, b_candidates, mask=m_r)
    tl.store(span.first + o_r, tl.zeros_like(b_last), mask=m_r)
    tl.store(span.last + o_r, b_last, mask=m_r)
    tl.store(shares + o_r, tl.load(epsilons + i_rh // L.H), mask=m_r)


@triton.jit(do_not_specialize=["count"])
def attend_round_kernel(work, progress, count, L: tl.constexpr, T: tl.constexpr):
    if work.kv.arriving is None:
        begin()
    else:
        begin_beside()
    rows, windows = work.rows, work.windows
    o_r = tl.arange(0, T.BR)
    m_r = o_r < count
    i_r = tl.where(m_r, o_r, 0)
    b_attended = tl.load(progress.attended + i_r)
    b_extended = tl.load(progress.extended + i_r)
    b_candidates = tl.load(progress.candidates + i_r)
    _, _, b_prologue, b_total, _, _, _ = row_plan(rows, windows, i_r, b_candidates, L)
    b_first_tiles, _, b_first_chunks, _, b_all = chunk_plan(b_prologue, b_total, L)
    b_end = tl.minimum(b_first_tiles + (b_extended - b_first_chunks) * L.BATCH_TILES, b_all)
    b_begin = b_first_tiles + (b_attended - b_first_chunks) * L.BATCH_TILES
    b_tiles = b_end - tl.where(b_attended > 0, b_begin, 0)
    b_tiles = tl.where(m_r & (b_extended > b_attended), b_tiles, 0)
    attend_split(b_tiles, b_candidates, b_attended, work, L, T)
    if work.kv.arriving is not None:
        end_after()


@triton.jit(do_not_specialize_on_alignment=SLICES)
def finish_round_kernel(
    rows, windows, chunks, progress, reached, expected, request_slots, epsilons, residual,
    checks_held, out, counters, span, L: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Find where a row and KV head stops, or the part that the next round attends to.

    In the LAST round all stop, and their chunks up to the stop are merged.
    """
    i_rh, i_d = tl.program_id(0), tl.program_id(1)
    attended, extended = tl.load(progress.attended + i_rh), tl.load(progress.extended + i_rh)
    if LAST:
        stop = tl.load(progress.stop + i_rh)
        if extended > attended:
            stop, _chunks = check_stop(
                rows, windows, chunks, reached, expected, request_slots, epsilons, residual,
                checks_held, progress.candidates, counters, i_rh, extended, i_d == 0, L, C, True,
            )  # fmt: skip
        merge_chunks(chunks, out, i_rh, i_d, stop, L, C)
    else:
        if extended > attended:
            stop, most = check_stop(
                rows, windows, chunks, reached, expected, request_slots, epsilons, residual,
                checks_held, progress.candidates, counters, i_rh, extended, True, L, C, False,
            )  # fmt: skip
            candidates = tl.load(progress.candidates + i_rh)
            _tail, _tokens, prologue, total, _domain, first_units, _forced = row_plan(
                rows, windows, i_rh, candidates, L
            )
            _tiles, _chunk_tiles, first_chunks, _batches, _all = chunk_plan(prologue, total, L)
            # One chunk more: sums that are rounded elsewhere may stop one later.
            latest = tl.minimum(stop + 1, most)
            following = tl.where(stop > extended, latest, extended)
            tl.store(progress.attended + i_rh, extended)
            tl.store(progress.extended + i_rh, following)
            tl.store(progress.stop + i_rh, stop)
            first = _units(extended, first_chunks, first_units, candidates, L)
            last = _units(following, first_chunks, first_units, candidates, L)
            tl.store(span.first + i_rh, first)
            tl.store(span.last + i_rh, last)


def begin_rounds_triton(
    plan: DecodePlan, ranking: Lists, stop: MassStop, state: StopState, rounds: Rounds
) -> None:
    """Launch :func:`begin_rounds_kernel`."""
    assert rounds.workspace is not None
    count, always = plan.num_rows * ranking.indices.shape[1], stop.always
    rows = Rows(plan.seq_lens, plan.tail_start, ranking.rows, always.sink, always.recent)
    begin_rounds_kernel[(triton.cdiv(count, TILE_ROWS),)](
        rows, plan.k_units, ranking.counts, state.expected, plan.request_slots, stop.epsilons,
        rounds.epsilons, Span.of(rounds.span), progress_of(rounds.workspace), ranking.window_args,
        ranking.capacity, count, MORE=MORE_TOKENS // stop.microbatch,
        L=constants(layout_of(ranking, stop, 1, 1, output=True)), BT=TILE_ROWS,
    )  # fmt: skip


def attend_round_triton(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, rounds: Rounds, *, softmax: Softmax, out: torch.Tensor,
) -> None:  # fmt: skip
    """Launch the two kernels of a round."""
    assert rounds.workspace is not None
    made = make_launch(
        q, kv, plan, ranking, stop, softmax=softmax, output=True, workspace=rounds.workspace
    )
    last = rounds.number == ROUNDS - 1
    attend_round_kernel[(num_programs(q.device),)](
        made.work, made.progress, made.row_heads, **made.attend, **overlapping(0)
    )
    finish_round_kernel[(made.row_heads, q.shape[2] // CHANNELS if last else 1)](
        *check_arguments(made, plan, stop, state, out), Span.of(rounds.span),
        LAST=last, **made.finish,
    )  # fmt: skip
