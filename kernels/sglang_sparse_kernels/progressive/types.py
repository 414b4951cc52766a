# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of progressive attention, its limits, and what it counts."""

from dataclasses import dataclass, fields

import torch

MICROBATCHES = (16, 32, 64, 128)
"""Tokens that may be attended to between two looks at the share."""

MAX_RANKED_UNITS = 4096
"""Units that a list may rank: they are sorted in the registers of one program."""

COUNTERS = ("pairs", "blocks", "domain_blocks", "share_millionths", "cap_hits")
"""What is added up on the device, a sparse row and KV head at a time: how many there were, units
attended to, units there were, the estimated share, and lists that ended before their share was
reached."""

MAX_PARTS = 32
"""Parts that what precedes the first microbatch is cut into at most; a dense row's is long."""


def num_items(capacity_units: int, unit: int, microbatch: int) -> int:
    """Most pieces of work of one row and KV head: the prologue's parts, then microbatches."""
    return MAX_PARTS + -(-capacity_units * unit // microbatch)


@dataclass(frozen=True)
class ProgressiveWorkspace:
    """Fixed-capacity scratch, R rows, H KV heads, G query heads each, I pieces of work.

    Attributes:
        partial: float32 [R, H, I, G, D], attention over one piece.
        lse: float32 [R, H, G, I], its log2 of the sum of exponentials.
        least: float32 [R, H, G, I], log2 of its smallest block mass.
        there: int32 [R, H], pieces that were attended to as expected.
        until: int32 [R, H], pieces up to which more is attended to; ``there`` if that is enough.
        stop: int32 [R, H], pieces up to the stop, more than ``there`` if it lies behind those.
        listed: int32 [R, H], units that may be attended to.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    least: torch.Tensor
    there: torch.Tensor
    until: torch.Tensor
    stop: torch.Tensor
    listed: torch.Tensor

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
    return 4 * (items * num_heads * (head_dim + 2) + 4 * num_kv_heads)


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
    group = num_heads // num_kv_heads
    looks = (max_rows, num_kv_heads, group, items)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ProgressiveWorkspace(
        partial=zeros(max_rows, num_kv_heads, items, group, head_dim),
        lse=zeros(*looks),
        least=zeros(*looks),
        there=zeros(max_rows, num_kv_heads, dtype=torch.int32),
        until=zeros(max_rows, num_kv_heads, dtype=torch.int32),
        stop=zeros(max_rows, num_kv_heads, dtype=torch.int32),
        listed=zeros(max_rows, num_kv_heads, dtype=torch.int32),
    )
