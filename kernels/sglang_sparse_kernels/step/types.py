# SPDX-License-Identifier: Apache-2.0
"""What the stages of a decode step share, and how they run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..common import Impl
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax

MOST_SELECTING = 16
"""Query heads that select a list together."""


@dataclass(frozen=True)
class StepContext:
    """One layer of a decode step, for rows that are taken together.

    Attributes:
        q: [R * queries, H * G, D], after RoPE.
        kv: this layer's KV rows, those of this step's tokens included.
        plan: R rows, of the first query of each.
        lists: what this layer writes, if it selects, and what it attends to.
        softmax: scale and cap of the logits.
        out: [R * queries, H * G, D] in q's dtype, contiguous; written by a stage that attends.
        impl: "triton", "cpu" or "torch".
        queries: of each row: consecutive tokens of its request, which share its lists.
        rows: which rows of the batch these are, for state that follows the whole batch.
    """

    q: torch.Tensor
    kv: KVView
    plan: DecodePlan
    lists: Lists
    softmax: Softmax
    out: torch.Tensor
    impl: Impl
    queries: int = 1
    rows: slice = field(default_factory=lambda: slice(None))

    @property
    def first_q(self) -> torch.Tensor:
        """[R, H * G, D], the first query of each row."""
        return self.q[:: self.queries]

    @property
    def selecting_q(self) -> torch.Tensor:
        """[R, H * n * G, D]: the query heads of n queries of each row, as one group a KV head.

        They share a list, so they select it together. ``n`` is that of :func:`selecting_queries`.
        """
        if self.queries == 1:
            return self.q
        rows, heads = self.plan.num_rows, self.kv.num_heads
        # [R, queries, H, G, D]
        each = self.q.view(rows, self.queries, heads, -1, self.q.shape[-1])
        chosen = selecting_queries(self.queries, each.shape[3])
        return torch.stack([each[:, i] for i in chosen], 2).reshape(rows, -1, self.q.shape[-1])


def selecting_queries(queries: int, group: int) -> list[int]:
    """Which of a row's queries select, so that scores get at most :data:`MOST_SELECTING` heads.

    All of them, or evenly spaced ones from the first on. ``group`` is G.
    """
    count = max(1, min(queries, MOST_SELECTING // group))
    return [i * (queries - 1) // max(1, count - 1) for i in range(count)]


class Stage(Protocol):
    """A part of a decode step that holds its buffers; later stages read what it wrote to them."""

    def run(self, step: StepContext) -> None:
        """Do this part for the rows of ``step``."""


def decode_step(stages: Sequence[Stage], step: StepContext) -> None:
    """Run ``stages`` in their order. Nothing waits for the device, so a CUDA graph may hold it.

    ``[score, Select, Attend]`` is a layer that selects, ``[score, Select]`` one that selects for
    later layers alone, ``[Attend]`` one that reuses a selection, and ``[score, Rank, AttendUntil]``
    one that attends until a share of the mass is reached.
    """
    for stage in stages:
        stage.run(step)
