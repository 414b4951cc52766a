# SPDX-License-Identifier: Apache-2.0
"""The device-side description of one decode batch."""

from dataclasses import dataclass, fields

import torch

DENSE_REQUEST = 2**31 - 2
"""``decode_start`` of a request that must stay dense: it never reaches its first sparse step."""

PPM = 1_000_000


def budget_row(floor: int, fraction: float) -> tuple[int, int]:
    """One row of :func:`plan_decode`'s ``budgets``.

    Args:
        floor: least budget, in tokens.
        fraction: budget as a fraction of the domain, in [0, 1], kept to one millionth.

    Raises:
        ValueError: a number is out of range.
    """
    if not 0 <= floor < 2**31:
        raise ValueError(f"floor={floor} must be in [0, 2**31)")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction={fraction} must be in [0, 1]")
    return floor, round(fraction * PPM)


@dataclass(frozen=True)
class DecodePlan:
    """Buffers that say, per row of a decode batch, what is selected and what is attended.

    All tensors are int32, live on the device and keep their address, so that a captured CUDA
    graph reads this step's values. R rows; lengths and positions in tokens.

    Attributes:
        page_table: [R, max_pages], physical page of each logical page. Only the first
            ``ceil(seq_lens / page_size)`` entries of a row are defined.
        seq_lens: [R], tokens of the request, the one being decoded included.
        tail_start: [R], selection covers positions [0, tail_start); [tail_start, seq_len) is
            always attended to. 0 for a dense row.
        k_units: [R], units to select per KV head; 0 for a dense row.
        reselect: [R], 1 where the lists are selected anew at this step; 0 for a dense row.
        refresh: [R], 1 where the channels are chosen anew at this step; 0 for a dense row.
        list_rows: [R], row of the state tensors (lists, counts, channels) of this request.
        update_start: [R], ``seq_lens - 1``: with ``seq_lens`` the range of positions whose planes
            this step adds.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    tail_start: torch.Tensor
    k_units: torch.Tensor
    reselect: torch.Tensor
    refresh: torch.Tensor
    list_rows: torch.Tensor
    update_start: torch.Tensor

    @classmethod
    def allocate(
        cls, max_rows: int, max_pages: int, device: torch.device | str = "cpu"
    ) -> "DecodePlan":
        """Zeroed buffers for up to ``max_rows`` rows of up to ``max_pages`` pages."""

        def per_row() -> torch.Tensor:
            return torch.zeros(max_rows, dtype=torch.int32, device=device)

        return cls(
            page_table=torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device),
            seq_lens=per_row(),
            tail_start=per_row(),
            k_units=per_row(),
            reselect=per_row(),
            refresh=per_row(),
            list_rows=per_row(),
            update_start=per_row(),
        )

    @property
    def num_rows(self) -> int:
        """Rows (R) of this plan."""
        return self.seq_lens.shape[0]

    def rows(self, batch_size: int) -> "DecodePlan":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        if batch_size > self.num_rows:
            raise ValueError(f"batch of {batch_size} rows does not fit a plan of {self.num_rows}")
        views = {field.name: getattr(self, field.name)[:batch_size] for field in fields(self)}
        return DecodePlan(**views)
