# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of progressive attention, its limits, and what it counts."""

from dataclasses import dataclass, fields

import torch

from ..device import programs_to_fill

MICROBATCHES = (16, 32, 64, 128)
"""Tokens that may be attended to between two looks at the share: one tile of the kernel."""

MAX_RANKED_UNITS = 4096
"""Units that a list may rank: every one is compared with every other."""

COUNTERS = ("pairs", "blocks", "domain_blocks", "share_millionths", "cap_hits")
"""What is added up on the device, a sparse row and KV head at a time: how many there were, units
attended to, units there were, the estimated share, and lists that ended before their share was
reached."""

CTAS_PER_SM = 2
# Programs that start when others are done find their row finished, or help a long one.
OVERSUBSCRIPTION = 2
MAX_SPLITS = 64


def num_programs(rows: int, num_kv_heads: int, device: torch.device) -> tuple[int, int]:
    """(programs of a row and KV head, those that run at once); fixed by the shapes."""
    resident = programs_to_fill(device, CTAS_PER_SM) // (rows * num_kv_heads)
    resident = max(1, min(resident, MAX_SPLITS))
    return min(resident * OVERSUBSCRIPTION, MAX_SPLITS), resident


def num_items(capacity_units: int, unit: int, microbatch: int) -> int:
    """Most pieces of work of one row and KV head: the prologue's parts, then microbatches."""
    return MAX_SPLITS + -(-capacity_units * unit // microbatch)


@dataclass(frozen=True)
class ProgressiveWorkspace:
    """Fixed-capacity scratch, R rows, H KV heads, G query heads each, I pieces of work.

    Attributes:
        partial: float32 [R, H, I, G, D], attention over one piece.
        lse: float32 [R, H, I, G], its log2 of the sum of exponentials; NaN until it is there.
        least: float32 [R, H, I, G], log2 of its smallest block mass; NaN until it is there.
        tickets: int32 [R, H], the next microbatch that nobody has taken.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    least: torch.Tensor
    tickets: torch.Tensor

    def rows(self, batch_size: int) -> "ProgressiveWorkspace":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        if batch_size > self.lse.shape[0]:
            raise ValueError(
                f"batch of {batch_size} rows does not fit a workspace of {self.lse.shape[0]}"
            )
        return ProgressiveWorkspace(
            **{field.name: getattr(self, field.name)[:batch_size] for field in fields(self)}
        )

    def nbytes(self) -> int:
        """Device bytes of all tensors."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def progressive_row_bytes(num_heads: int, num_kv_heads: int, head_dim: int, items: int) -> int:
    """Bytes of one row of :func:`make_progressive_workspace`."""
    return 4 * (items * num_heads * (head_dim + 2) + num_kv_heads)


def make_progressive_workspace(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    items: int,
    device: torch.device | str,
) -> ProgressiveWorkspace:
    """Scratch for batches of up to ``max_rows`` rows.

    Args:
        max_rows: largest batch (R).
        num_heads: query heads (H * G) of this rank.
        num_kv_heads: KV heads (H) of this rank.
        head_dim: D.
        items: from :func:`num_items`.
        device: where it lives.
    """
    shape = (max_rows, num_kv_heads, items, num_heads // num_kv_heads)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    return ProgressiveWorkspace(
        partial=zeros(*shape, head_dim),
        lse=zeros(*shape),
        least=zeros(*shape),
        tickets=torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
    )
