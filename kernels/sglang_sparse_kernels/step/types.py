# SPDX-License-Identifier: Apache-2.0
"""What the stages of a decode step share, and how they run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..common import Impl
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax


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
        """[R, H * G, D], the first query of each row, which selects for the others too."""
        return self.q[:: self.queries]


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
