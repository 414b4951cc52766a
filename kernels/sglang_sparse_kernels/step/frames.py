# SPDX-License-Identifier: Apache-2.0
"""The stages of a layer whose KV lies in host memory."""

from dataclasses import dataclass, replace

import torch

from ..attend import gathered_decode_attention
from ..frames import FoundFrames, FramePool, find_frames, load_blocks
from ..progressive import ROUNDS, Rounds, StopState, attend_round, begin_rounds
from ..records import Lists, ListSpan
from .stages import AttendUntil
from .types import StepContext


@dataclass(frozen=True)
class Fetch:
    """How a layer's blocks get to the device.

    Attributes:
        pool: frames of all layers.
        host: blocks of all layers.
        layer: of the pool's layers.
        found: scratch that layers may share.
    """

    pool: FramePool
    host: torch.Tensor
    layer: int
    found: FoundFrames

    def run(self, step: StepContext, lists: Lists, span: ListSpan | None = None) -> None:
        """Find frames for what the step reads of ``lists``, or of a part of them; load the rest."""
        if step.queries != 1:
            raise ValueError(f"queries={step.queries} must be 1 where KV is fetched from the host")
        find_frames(
            self.pool, self.layer, step.kv.page_table, step.plan, lists, found=self.found,
            impl=step.impl, span=span,
        )  # fmt: skip
        load_blocks(self.pool, self.host, self.found, impl=step.impl)

    def by_head(self, step: StepContext) -> StepContext:
        """The step with a row for each row and KV head, whose KV lies in frames.

        The lists are those of the step, as such rows read them.
        """
        pool, found, rows = self.pool, self.found, step.plan.num_rows
        shape = (rows * pool.heads, -1, step.q.shape[2])
        return replace(
            step, q=step.q.reshape(shape), kv=found.kv(pool, rows, step.kv.scales),
            plan=found.rows(pool, rows), lists=found.lists(pool, rows, step.lists),
            out=step.out.view(shape),
        )  # fmt: skip


@dataclass(frozen=True)
class AttendFrames:
    """Attention over the step's lists and the tail, whose KV is fetched from host memory.

    It is :class:`.Attend` with a row of its own for each row and KV head, since each KV head's
    pages lie in frames of their own. Tiles, splits and sums are the same, so where kernels run the
    output equals that over resident KV to the bit. Of the step's view of KV only the page table and
    the scales are read.

    Attributes:
        fetch: of this layer.
        workspace: as for :class:`.Attend`.
    """

    fetch: Fetch
    workspace: torch.Tensor | None

    def run(self, step: StepContext) -> None:
        """Fetch what is missing and write the step's output."""
        self.fetch.run(step, step.lists)
        each = self.fetch.by_head(step)
        gathered_decode_attention(
            each.q, each.kv, each.plan, each.lists, softmax=step.softmax, out=each.out,
            workspace=self.workspace, impl=step.impl,
        )  # fmt: skip


@dataclass(frozen=True)
class AttendFramesUntil:
    """Attention until a share of the mass is reached, whose KV is fetched round by round.

    PSA, sections 3.2 to 3.4: a round looks up and loads its part of each list, attends to it, and
    says where the rows that have not stopped go on. Nothing is loaded for those that have. What is
    written equals what :class:`.AttendUntil` writes over resident KV, to the bit.

    Attributes:
        fetch: of this layer.
        until: what would attend over resident KV.
        rounds: scratch that layers may share.
    """

    fetch: Fetch
    until: AttendUntil
    rounds: Rounds

    def run(self, step: StepContext) -> None:
        """Write the step's output and the counts of its lists."""
        rows, impl = step.plan.num_rows, step.impl
        ranking, stop, state = self.until.of(step)
        rounds = self.rounds.rows(rows)
        begin_rounds(step.plan, ranking, stop, state, rounds, impl=impl)
        assert state.expected is not None
        residual = stop.residual
        stop = replace(
            stop,
            epsilons=rounds.epsilons.view(-1),
            residual=None if residual is None else residual.flatten(0, 1).unsqueeze(1),
        )
        state = StopState(state.reached.view(-1, 1), state.expected.view(-1, 1), state.counters)
        for number in range(ROUNDS):
            part = rounds.round(number)
            self.fetch.run(step, ranking, part.span)
            each = self.fetch.by_head(replace(step, lists=ranking))
            attend_round(
                each.q, each.kv, each.plan, each.lists, stop, state, part.heads_as_rows(),
                softmax=step.softmax, out=each.out, impl=impl,
            )  # fmt: skip
