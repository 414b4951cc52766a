# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the top-k selection."""

from dataclasses import dataclass, replace

import torch

BLOCK_UNITS = 8
"""Units whose largest score is kept, so that selection can skip blocks that cannot win."""

STREAM_SPLITS = 32
"""Programs that share a row which does not fit in the registers of one."""

MAX_PARTS = 16
"""Programs that share a row of a short list, at most."""

FOUND_UNITS = 4096
"""Units that each of those may list."""

MAX_PROGRAMS = 256
"""Programs that share rows, of all rows together."""

_STATE_COLUMNS = 8 + 4 * STREAM_SPLITS
_ALIGN = 16


def padded_blocks(max_units: int) -> int:
    """Width of a row of block maxima: rows start aligned, so that they load in wide accesses."""
    return -(-max_units // (BLOCK_UNITS * _ALIGN)) * _ALIGN


def _found_units(max_rows: int, num_kv_heads: int) -> int:
    """Programs that share rows, at most, times what each may list."""
    return FOUND_UNITS * min(MAX_PROGRAMS, max_rows * num_kv_heads * MAX_PARTS)


@dataclass(frozen=True)
class TopkWorkspace:
    """Fixed-capacity scratch of :func:`sglang_sparse_kernels.select_topk`, R rows, H KV heads.

    Attributes:
        block_max: [R, H, padded_blocks(max_units)] float32, largest score of every 8 units.
        blocks: [R, H, min(capacity, blocks)] int32, the blocks that can hold a winner; of a row
            that is streamed, the bits of the scores near the k-th best, or units, where one
            program takes it.
        state: [R, H, columns] int32, what the programs that share a row tell each other.
        found_scores: float32, flat, scores of the units that may win, listed by each of the
            programs that share a row of a short list.
        found_units: int32, flat, which units they are.
    """

    block_max: torch.Tensor
    blocks: torch.Tensor
    state: torch.Tensor
    found_scores: torch.Tensor
    found_units: torch.Tensor

    def rows(self, batch_size: int) -> "TopkWorkspace":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        if batch_size > self.block_max.shape[0]:
            raise ValueError(
                f"batch of {batch_size} rows does not fit a workspace of {self.block_max.shape[0]}"
            )
        return replace(
            self,
            block_max=self.block_max[:batch_size],
            blocks=self.blocks[:batch_size],
            state=self.state[:batch_size],
        )


def topk_workspace_bytes(
    max_rows: int, num_kv_heads: int, max_units: int, capacity_units: int
) -> int:
    """Bytes that :func:`make_topk_workspace` allocates."""
    blocks = padded_blocks(max_units)
    columns = blocks + min(blocks, capacity_units) + _STATE_COLUMNS
    return 4 * (max_rows * num_kv_heads * columns + 2 * _found_units(max_rows, num_kv_heads))


def make_topk_workspace(
    max_rows: int,
    num_kv_heads: int,
    max_units: int,
    capacity_units: int,
    device: torch.device | str,
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
    found = _found_units(max_rows, num_kv_heads)
    return TopkWorkspace(
        block_max=torch.zeros((*shape, blocks), dtype=torch.float32, device=device),
        blocks=torch.zeros((*shape, min(blocks, capacity_units)), dtype=torch.int32, device=device),
        state=torch.zeros((*shape, _STATE_COLUMNS), dtype=torch.int32, device=device),
        found_scores=torch.zeros(found, dtype=torch.float32, device=device),
        found_units=torch.zeros(found, dtype=torch.int32, device=device),
    )
