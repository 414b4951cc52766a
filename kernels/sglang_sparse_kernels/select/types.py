# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the top-k selection."""

from dataclasses import dataclass, replace

import torch

from ..common import Device, check_fits
from ..records import padded_blocks

STREAM_SPLITS = 32
"""Programs that share a row which does not fit in the registers of one program."""

MAX_SPLITS = 16
"""Most programs that share a row where the budget is small."""

MAX_CANDIDATES = 4096
"""Most units that each of those programs may list."""

MAX_PROGRAMS = 256
"""Most of those programs in a batch, over all rows."""

_STATE_COLUMNS = 8 + 4 * STREAM_SPLITS


def _candidates(max_rows: int, num_kv_heads: int) -> int:
    """Most entries that those programs may list in a batch, over all rows."""
    return MAX_CANDIDATES * min(MAX_PROGRAMS, max_rows * num_kv_heads * MAX_SPLITS)


@dataclass(frozen=True)
class TopkWorkspace:
    """Fixed-capacity scratch of :func:`sglang_sparse_kernels.select_topk`, R rows, H KV heads.

    Attributes:
        blocks: [R, H, min(capacity, blocks)] int32, the blocks that can hold a winner. For a row
            that is streamed it holds the bits of the scores near the k-th best, or units, if one
            program takes the row.
        state: [R, H, columns] int32, what the programs that share a row tell each other.
        candidate_scores: float32, flat, scores of the candidates that each split listed.
        candidate_units: int32, flat, the units of these scores.
    """

    blocks: torch.Tensor
    state: torch.Tensor
    candidate_scores: torch.Tensor
    candidate_units: torch.Tensor

    def rows(self, batch_size: int) -> "TopkWorkspace":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        check_fits(batch_size, self.blocks)
        return replace(
            self,
            blocks=self.blocks[:batch_size],
            state=self.state[:batch_size],
        )


def make_topk_workspace(
    max_rows: int, num_kv_heads: int, max_units: int, capacity_units: int, device: Device
) -> TopkWorkspace:
    """Scratch for batches of up to ``max_rows`` rows.

    Args:
        max_rows: largest batch (R).
        num_kv_heads: KV heads (H) of this rank.
        max_units: width of the score tensor.
        capacity_units: units a list holds.
        device: where it lives.
    """
    blocks = padded_blocks(max_units)
    shape = (max_rows, num_kv_heads)
    candidates = _candidates(max_rows, num_kv_heads)
    return TopkWorkspace(
        blocks=torch.zeros((*shape, min(blocks, capacity_units)), dtype=torch.int32, device=device),
        state=torch.zeros((*shape, _STATE_COLUMNS), dtype=torch.int32, device=device),
        candidate_scores=torch.zeros(candidates, dtype=torch.float32, device=device),
        candidate_units=torch.zeros(candidates, dtype=torch.int32, device=device),
    )
