# SPDX-License-Identifier: Apache-2.0
"""The stages of a layer whose KV lies in host memory."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from ..frames import FoundFrames, FramePool, find_frames, load_blocks
from ..progressive import ROUNDS, Rounds, StopState, attend_round, begin_rounds
from ..records import Lists, ListSpan
from .stages import Attend, AttendUntil
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

    def run(
        self, step: StepContext, lists: Lists, span: ListSpan | None = None, *, timed: bool = True
    ) -> None:
        """Find frames for what the step reads of ``lists``, or of a part of them; load the rest.

        ``timed``: the step waits for it, so its time counts as a stall.
        """
        if step.queries != 1:
            raise ValueError(f"queries={step.queries} must be 1 where KV is fetched from the host")
        find_frames(
            self.pool, self.layer, step.kv.page_table, step.plan, lists, found=self.found,
            impl=step.impl, span=span,
        )  # fmt: skip
        load_blocks(self.pool, self.host, self.found, impl=step.impl, timed=timed)

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


def _beside(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """A context of ``stream``, behind what the current one was given; of nothing if None."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


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
        Attend(self.workspace).run(self.fetch.by_head(step))


@dataclass(frozen=True)
class Ahead:
    """A layer that reuses the lists of the one before it that selected.

    Attributes:
        fetch: of this layer, with a ``found`` of its own.
        head_map: int32 [H], the list that each KV head reads; its own if None.
        there: after which it is fetched; None on a CPU.
    """

    fetch: Fetch
    head_map: torch.Tensor | None
    there: torch.cuda.Event | None


@dataclass(frozen=True)
class FetchAhead:
    """Fetches what the layers behind this one will read, since its lists are theirs, too.

    On a GPU a second stream does it, beside everything up to their attention. It follows what is
    already in the step's stream, and each layer waits for its own part (:class:`AttendAhead`), so
    no two lookups run at once. A graph holds both streams.

    Attributes:
        layers: in their order.
        beside: the second stream; None on a CPU.
    """

    layers: tuple[Ahead, ...]
    beside: torch.cuda.Stream | None

    def run(self, step: StepContext) -> None:
        """Fetch for one layer after the other."""
        with _beside(self.beside):
            for ahead in self.layers:
                lists = replace(step.lists, head_map=ahead.head_map)
                ahead.fetch.run(step, lists, timed=False)
                if ahead.there is not None:
                    ahead.there.record()


@dataclass(frozen=True)
class AttendAhead:
    """:class:`AttendFrames` of a layer for which :class:`FetchAhead` has fetched.

    Attributes:
        ahead: of this layer.
        workspace: as for :class:`.Attend`.
    """

    ahead: Ahead
    workspace: torch.Tensor | None

    def run(self, step: StepContext) -> None:
        """Wait for what is fetched, and write the step's output."""
        if self.ahead.there is not None:
            self.ahead.there.wait()
        each = self.ahead.fetch.by_head(step)
        # All pages are there, so the launch waits for the one before it as others do.
        Attend(self.workspace).run(replace(each, kv=replace(each.kv, arriving=None)))


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
        impl, rounds = step.impl, self.rounds.rows(step.plan.num_rows)
        ranking, stop, state = self.until.of(step)
        begin_rounds(step.plan, ranking, stop, state, rounds, impl=impl)
        assert state.expected is not None
        residual = stop.residual
        stop = replace(
            stop,
            epsilons=rounds.epsilons.view(-1),
            residual=None if residual is None else residual.flatten(0, 1).unsqueeze(1),
        )
        state = StopState(state.reached.view(-1, 1), state.expected.view(-1, 1), state.counters)
        # Once, since queries that are not contiguous are copied for it.
        each = self.fetch.by_head(replace(step, lists=ranking))
        for number in range(ROUNDS):
            part = rounds.round(number)
            self.fetch.run(step, ranking, part.span)
            attend_round(
                each.q, each.kv, each.plan, each.lists, stop, state, part.heads_as_rows(),
                softmax=step.softmax, out=each.out, impl=impl,
            )  # fmt: skip
