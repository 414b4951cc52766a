# SPDX-License-Identifier: Apache-2.0
"""The device-side description of one decode batch."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..triton_ops import PlanArgs

from ..common import PAGE_SIZES, Device, check_contiguous, check_dtype, check_shape

DENSE_REQUEST = 2**31 - 2
"""``decode_start`` of a request that must stay dense: it never reaches its first sparse step."""

PPM = 1_000_000


def budget_row(floor: int, fraction: float) -> tuple[int, int]:
    """One row of :func:`plan_decode`'s ``budgets``.

    Args:
        floor: smallest budget, in tokens.
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
class TokenTable:
    """Where the tokens of a batch of R rows lie in SGLang's KV pool.

    Attributes:
        req_to_token: int32 [request slots, max context], KV slot of each position.
        request_slots: int32 or int64 [R], request slot of each row.
        seq_lens: int32 or int64 [R], tokens of each row, the one being decoded included.
    """

    req_to_token: torch.Tensor
    request_slots: torch.Tensor
    seq_lens: torch.Tensor

    def check(self, page_size: int, page_table: torch.Tensor) -> None:
        """Raise ValueError unless pages of these tokens can be copied to ``page_table``."""
        rows = self.seq_lens.shape[0]
        check_shape("req_to_token", self.req_to_token, (-1, -1))
        check_dtype("req_to_token", self.req_to_token, torch.int32)
        check_dtype("request_slots", self.request_slots, torch.int32, torch.int64)
        check_dtype("seq_lens", self.seq_lens, torch.int32, torch.int64)
        check_shape("request_slots", self.request_slots, (rows,))
        check_shape("page_table", page_table, (rows, -1))
        check_dtype("page_table", page_table, torch.int32)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={page_size} is not one of {PAGE_SIZES}")


@dataclass(frozen=True)
class RequestState:
    """State of requests that planning reads, indexed by request slot.

    Attributes:
        decode_start: int32 [request slots], tokens a request had when its last prefill ended;
            :data:`DENSE_REQUEST` keeps a request dense.
        budgets: int32 [request slots, 2], contiguous: floor in tokens and fraction in millionths
            of each request (:func:`budget_row`).
    """

    decode_start: torch.Tensor
    budgets: torch.Tensor

    def __post_init__(self) -> None:
        check_dtype("decode_start", self.decode_start, torch.int32)
        check_dtype("budgets", self.budgets, torch.int32)
        check_shape("budgets", self.budgets, (self.decode_start.shape[0], 2))
        check_contiguous("budgets", self.budgets)


@dataclass(frozen=True)
class PlanRules:
    """Settings of planning, the same for every row and step of a server.

    Attributes:
        page_size: tokens a physical page: 16, 32 or 64.
        unit: tokens a selection unit (1: tokens; 16: logical pages); divides ``page_size``.
        capacity_units: units a list holds.
        min_sparse_tokens: rows shorter than this are dense.
        reselect_every: steps between selections (C), at least 1.
        refresh_every: steps between channel refreshes (U), at least 1.
    """

    page_size: int
    unit: int
    capacity_units: int
    min_sparse_tokens: int
    reselect_every: int = 1
    refresh_every: int = 1

    def __post_init__(self) -> None:
        if self.unit < 1 or self.page_size % self.unit:
            raise ValueError(f"unit={self.unit} must divide page_size={self.page_size}")
        for name in ("capacity_units", "reselect_every", "refresh_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.min_sparse_tokens < 0:
            raise ValueError(f"min_sparse_tokens={self.min_sparse_tokens} must not be negative")


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
        request_slots: [R], row of this request in tensors that hold state per request (channels,
            lists that outlive their step); 0 for a padding row.
        update_start: [R], ``seq_lens - 1``. This step updates the planes of the positions
            [update_start, seq_lens).
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    tail_start: torch.Tensor
    k_units: torch.Tensor
    reselect: torch.Tensor
    refresh: torch.Tensor
    request_slots: torch.Tensor
    update_start: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, max_pages: int, device: Device = "cpu") -> "DecodePlan":
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
            request_slots=per_row(),
            update_start=per_row(),
        )

    @property
    def args(self) -> "PlanArgs":
        """Columns for kernels."""
        from ..triton_ops import PlanArgs

        return PlanArgs(self.seq_lens, self.tail_start, self.k_units, self.reselect)

    @property
    def num_rows(self) -> int:
        """Number of rows (R) of this plan."""
        return self.seq_lens.shape[0]

    def rows(self, batch_size: int) -> "DecodePlan":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        if batch_size > self.num_rows:
            raise ValueError(f"batch of {batch_size} rows does not fit a plan of {self.num_rows}")
        return self.part(slice(0, batch_size))

    def dense(self) -> "DecodePlan":
        """The same rows, none of which selects: all attend to everything."""
        none = torch.zeros_like(self.seq_lens)
        return replace(self, tail_start=none, k_units=none, reselect=none, refresh=none)

    def part(self, rows: slice) -> "DecodePlan":
        """A view of the rows in ``rows``."""
        return DecodePlan(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})
