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
        q: [R, H * G, D], after RoPE.
        kv: this layer's KV rows, the ones of this step's tokens written.
        plan: R rows.
        lists: what this layer writes, if it selects, and what it attends to.
        softmax: scale and cap of the logits.
        out: [R, H * G, D] in q's dtype, contiguous; written by a stage that attends.
        impl: "triton", "cpu" or "torch".
        rows: which rows of the batch these are, for state that follows the whole batch.
    """

    q: torch.Tensor
    kv: KVView
    plan: DecodePlan
    lists: Lists
    softmax: Softmax
    out: torch.Tensor
    impl: Impl
    rows: slice = field(default_factory=lambda: slice(None))


class Stage(Protocol):
    """A part of a decode step, its buffers bound; one that comes later reads what it left there."""

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
