# SPDX-License-Identifier: Apache-2.0
"""The stages of a decode step: score, select, rank, attend, attend until a share is reached.

Buffers have room for the largest number of rows that are taken together. A stage uses their first
rows.
"""

from dataclasses import dataclass, replace

import torch

from ..attend import gathered_decode_attention
from ..common import Reduce
from ..exact import ExactWorkspace, Pool, exact_score
from ..planes import KeySketch, PageCuboids
from ..progressive import (
    MassStop,
    ProgressiveWorkspace,
    StopState,
    progressive_decode_attention,
    rank_units,
    residual_bounds,
)
from ..records import Always, Lists, Scores
from ..score import page_bounds, page_minmax_score, sketch_score
from ..select import TopkWorkspace, select_topk
from .types import StepContext


@dataclass(frozen=True)
class PageScore:
    """Largest q.k over a cuboid of each logical page: its bounds, or its cuboid-mean digest.

    Units of the step's lists may be several logical pages.

    Attributes:
        pages: cuboids of this layer's logical pages.
        reduce: how the query heads of a group are joined.
        scores: written.
    """

    pages: PageCuboids
    reduce: Reduce
    scores: Scores

    def run(self, step: StepContext) -> None:
        """Score the rows that select anew."""
        out = self.scores.rows(step.plan.num_rows)
        page_minmax_score(
            step.selecting_q, self.pages, step.plan, unit=step.lists.unit, reduce=self.reduce,
            out=out, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class SketchScore:
    """Partial q.k over the channels where the group's queries are largest (SparCas section 3.4).

    Attributes:
        sketch: this layer's.
        channels: int32 [request slots, H, D_b], what each request reads until its next refresh.
        reduce: how the query heads of a group are joined.
        scores: written.
    """

    sketch: KeySketch
    channels: torch.Tensor
    reduce: Reduce
    scores: Scores

    def run(self, step: StepContext) -> None:
        """Choose the channels that are due, and score the rows that select anew."""
        out = self.scores.rows(step.plan.num_rows)
        sketch_score(
            step.selecting_q, self.channels, self.sketch, step.plan, reduce=self.reduce, out=out,
            choose_channels=True, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class ExactScore:
    """Attention probability, pooled after the softmax (Kascade section 3.4).

    Attributes:
        pool: the query heads that share a list.
        scores: written.
        workspace: scratch that layers may share; None for the PyTorch implementation.
    """

    pool: Pool
    scores: Scores
    workspace: ExactWorkspace | None

    def run(self, step: StepContext) -> None:
        """Score the rows that select anew."""
        exact_score(
            step.selecting_q, step.kv, step.plan, softmax=step.softmax, pool=self.pool,
            out=self.scores.rows(step.plan.num_rows), workspace=self.workspace, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class Select:
    """Top-k of the scores, into the step's lists."""

    scores: Scores
    always: Always
    workspace: TopkWorkspace | None

    def run(self, step: StepContext) -> None:
        """Write the lists of the rows that select anew."""
        select_topk(
            self.scores.rows(step.plan.num_rows), step.plan, step.lists, always=self.always,
            workspace=self.workspace, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """Top-k of the scores in the order of their rank, into the indices of the step's lists.

    Attributes:
        scores, always, workspace: as for :class:`Select`.
        selected: scratch lists, a row a row of the batch.
        ranked: int32, as the counts of the step's lists: how many units each list ranks.
    """

    scores: Scores
    always: Always
    workspace: TopkWorkspace | None
    selected: Lists
    ranked: torch.Tensor

    def run(self, step: StepContext) -> None:
        """Write the rankings of the rows that select anew."""
        plan, impl = step.plan, step.impl
        scores, selected = self.scores.rows(plan.num_rows), self.selected.first(plan.num_rows)
        select_topk(scores, plan, selected, always=self.always, workspace=self.workspace, impl=impl)
        ranking = replace(step.lists, counts=self.ranked)
        rank_units(scores, plan, selected.indices, ranking, always=self.always, impl=impl)


@dataclass(frozen=True)
class BoundResidual:
    """Bounds, or an estimate, of the residual mass at each stop check.

    Attributes:
        pages: cuboids of this layer's logical pages that bound their keys.
        scores: what was ranked.
        margin: nats to take off for an estimate, 0 for bounds.
        ranked: as for :class:`Rank`.
        bounds: float32 [R, H, G, max_units], scratch.
        stop: its ``residual`` is written.
    """

    pages: PageCuboids
    scores: Scores
    margin: float
    ranked: torch.Tensor
    bounds: torch.Tensor
    stop: MassStop

    def run(self, step: StepContext) -> None:
        """Bound the residual mass of the rows that select anew."""
        rows, stop = step.plan.num_rows, self.stop
        bounds = self.bounds[:rows]
        assert stop.residual is not None
        page_bounds(
            step.q, self.pages, step.plan, unit=step.lists.unit, out=bounds,
            unread=self.scores.unread, impl=step.impl,
        )  # fmt: skip
        residual_bounds(
            bounds, self.scores.rows(rows), step.plan, replace(step.lists, counts=self.ranked),
            always=stop.always, microbatch=stop.microbatch, softmax=step.kv.logits(step.softmax),
            margin=self.margin, out=stop.residual[:rows], impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class Attend:
    """Attention over the step's lists and the tail; ``workspace`` may be shared by layers."""

    workspace: torch.Tensor | None

    def run(self, step: StepContext) -> None:
        """Write the step's output."""
        gathered_decode_attention(
            step.q, step.kv, step.plan, step.lists, softmax=step.softmax, out=step.out,
            workspace=self.workspace, queries=step.queries, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class AttendUntil:
    """Attention in the order of rank until a share of the mass is reached.

    The numbers of units that were attended to become the counts of the step's lists. So layers that
    reuse the selection read it as any other list.

    Attributes:
        stop: its epsilons are in the order of the whole batch.
        ranked: as for :class:`Rank`.
        expected: int32 [request slots, H] of this layer (:class:`StopState`).
        counters: int64, this layer's.
        workspace: scratch that layers may share; None for the PyTorch implementation.
    """

    stop: MassStop
    ranked: torch.Tensor
    expected: torch.Tensor | None
    counters: torch.Tensor | None
    workspace: ProgressiveWorkspace | None

    def run(self, step: StepContext) -> None:
        """Write the step's output and the counts of its lists."""
        self._run(step, step.out)

    def of(self, step: StepContext) -> tuple[Lists, MassStop, StopState]:
        """The ranking, when its rows stop, and where that is written."""
        rows, residual = step.plan.num_rows, self.stop.residual
        stop = replace(
            self.stop,
            epsilons=self.stop.epsilons[step.rows][:rows],
            residual=None if residual is None else residual[:rows],
        )
        state = StopState(step.lists.counts, self.expected, self.counters)
        return replace(step.lists, counts=self.ranked), stop, state

    def _run(self, step: StepContext, out: torch.Tensor | None) -> None:
        ranking, stop, state = self.of(step)
        progressive_decode_attention(
            step.q, step.kv, step.plan, ranking, stop, state, softmax=step.softmax, out=out,
            workspace=self.workspace, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class FindStop(AttendUntil):
    """The counts that :class:`AttendUntil` would write, without attention: no V is read.

    For a layer that attends to everything and selects for later ones.
    """

    def run(self, step: StepContext) -> None:
        """Write the counts of the step's lists."""
        self._run(step, None)
