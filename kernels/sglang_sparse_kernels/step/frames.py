# SPDX-License-Identifier: Apache-2.0
"""The stage of a layer whose KV lies in host memory."""

from dataclasses import dataclass

import torch

from ..attend import gathered_decode_attention
from ..frames import FoundFrames, FramePool, find_frames, load_blocks
from .types import StepContext


@dataclass(frozen=True)
class AttendFrames:
    """Attention over the step's lists and the tail, whose KV is fetched from host memory.

    It is :class:`.Attend` with a row of its own for each row and KV head, since each KV head's
    pages lie in frames of their own. Tiles, splits and sums are the same, so where kernels run the
    output equals that over resident KV to the bit. Of the step's view of KV only the page table and
    the scales are read.

    Attributes:
        pool: frames of all layers.
        host: blocks of all layers.
        layer: of the pool's layers.
        found: scratch that layers may share.
        workspace: as for :class:`.Attend`.
    """

    pool: FramePool
    host: torch.Tensor
    layer: int
    found: FoundFrames
    workspace: torch.Tensor | None

    def run(self, step: StepContext) -> None:
        """Fetch what is missing and write the step's output."""
        if step.queries != 1:
            raise ValueError(f"queries={step.queries} must be 1 where KV is fetched from the host")
        pool, found, rows, impl = self.pool, self.found, step.plan.num_rows, step.impl
        find_frames(
            pool, self.layer, step.kv.page_table, step.plan, step.lists, found=found, impl=impl
        )
        load_blocks(pool, self.host, found, impl=impl)
        dim = step.q.shape[2]
        gathered_decode_attention(
            step.q.reshape(rows * pool.heads, -1, dim), found.kv(pool, rows, step.kv.scales),
            found.rows(pool, rows), found.lists(pool, rows, step.lists), softmax=step.softmax,
            out=step.out.view(rows * pool.heads, -1, dim), workspace=self.workspace, impl=impl,
        )  # fmt: skip
