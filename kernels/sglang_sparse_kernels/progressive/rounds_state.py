# SPDX-License-Identifier: Apache-2.0
"""State of progressive attention in rounds."""

from dataclasses import dataclass, replace

import torch

from ..common import Device, check_contiguous, check_dtype, check_shape
from ..records import ListSpan
from .types import ProgressiveWorkspace


@dataclass(frozen=True)
class Rounds:
    """State of attention in rounds, R rows and H KV heads.

    Attributes:
        span: what this round attends to.
        epsilons: float32 [R, H], contiguous: the share that each KV head is to reach, for rounds
            with a row for each row and KV head.
        workspace: at least R rows. Needed by "triton".
        number: of this round, from 0 on.
    """

    span: ListSpan
    epsilons: torch.Tensor
    workspace: ProgressiveWorkspace | None
    number: int = 0

    @classmethod
    def allocate(
        cls, max_rows: int, num_kv_heads: int, device: Device,
        workspace: ProgressiveWorkspace | None,
    ) -> "Rounds":  # fmt: skip
        """For batches of up to ``max_rows`` rows."""
        epsilons = torch.zeros((max_rows, num_kv_heads), device=device)
        return cls(ListSpan.allocate(max_rows, num_kv_heads, device), epsilons, workspace)

    def rows(self, batch_size: int) -> "Rounds":
        """A view of the first ``batch_size`` rows."""
        held = None if self.workspace is None else self.workspace.rows(batch_size)
        epsilons = self.epsilons[:batch_size]
        return Rounds(self.span.rows(batch_size), epsilons, held, self.number)

    def round(self, number: int) -> "Rounds":
        """The same in another round."""
        return replace(self, number=number, span=replace(self.span, tails=number == 0))

    def heads_as_rows(self) -> "Rounds":
        """A view with a row for each row and KV head."""
        held = None if self.workspace is None else self.workspace.heads_as_rows()
        epsilons = self.epsilons.view(-1, 1)
        return Rounds(self.span.heads_as_rows(), epsilons, held, self.number)

    def check(self, rows: int, heads: int) -> None:
        """Raise ValueError unless this is for ``rows`` rows of ``heads`` KV heads."""
        self.span.check(rows, heads)
        check_shape("epsilons", self.epsilons, (rows, heads))
        check_dtype("epsilons", self.epsilons, torch.float32)
        check_contiguous("epsilons", self.epsilons)
