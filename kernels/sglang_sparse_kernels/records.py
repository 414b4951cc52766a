# SPDX-License-Identifier: Apache-2.0
"""The records in which arguments travel: a view of KV, lists, scores, and settings of attention."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from .common import (
    FP8,
    PAGE_SIZES,
    Device,
    Index,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
    group_size,
    take,
)

if TYPE_CHECKING:
    from .plan import DecodePlan
    from .triton_ops import KVArgs, WindowArgs

BLOCK_UNITS = 8
"""Units in a block. The largest score of each block is kept, so that selection can skip blocks."""

_BLOCK_ALIGNMENT = 16
HEAD_DIMS = (64, 128)
MAX_GROUP = 16


class KVScales(NamedTuple):
    """What stored rows are multiplied by to give keys and values, above 0 (quantized KV).

    Attributes:
        k: factor of the keys; it goes into the scale of the logits.
        v: factor of the values; it goes into the output.
    """

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True)
class KVView:
    """The KV rows of one layer, and where the logical positions of a batch lie among them.

    A row of the batch finds position p in slot ``page_table[row, p // P] * P + p % P``. The device
    function for it is :func:`.triton_ops.slots_of`.

    Attributes:
        k: [slots, H, D], contiguous, in the queries' dtype or in fp8 e4m3.
        v: the same shape and dtype, contiguous.
        page_table: int32 [R, max_pages], physical page of each logical page of a row.
        page_size: tokens a physical page (P).
        scales: keys are ``k * scales.k``, values ``v * scales.v``.
        arriving: int32 [pages], not 0 for physical pages that the launch before may still be
            writing to, which is :func:`.frames.load_blocks`. Kernels that attend wait for those
            alone. None: all is there when that launch has ended.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    scales: KVScales = field(default_factory=KVScales)
    arriving: torch.Tensor | None = None

    @property
    def num_heads(self) -> int:
        """KV heads (H)."""
        return self.k.shape[1]

    @property
    def args(self) -> "KVArgs":
        """The view for kernels."""
        from .triton_ops import KVArgs

        table = self.page_table
        return KVArgs(self.k, self.v, table, table.stride(0), self.scales.v, self.arriving)

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """int64 slots of logical ``positions`` (int64, any shape) of a row of the batch."""
        pages = self.page_table[row].long()[positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def keys(self, at: Index, dtype: torch.dtype) -> torch.Tensor:
        """Keys [..., D] of slots, or of slots and heads, ``at``, in ``dtype``."""
        rows = take(self.k, at).to(dtype)
        return rows if self.scales.k == 1 else rows * self.scales.k

    def values(self, at: Index, dtype: torch.dtype) -> torch.Tensor:
        """Values [..., D] of slots, or of slots and heads, ``at``, in ``dtype``."""
        rows = take(self.v, at).to(dtype)
        return rows if self.scales.v == 1 else rows * self.scales.v

    def logits(self, softmax: "Softmax") -> "Softmax":
        """``softmax`` for products with rows as they are stored, and with planes of them."""
        return replace(softmax, scale=softmax.scale * self.scales.k)

    def group_of(self, q: torch.Tensor) -> int:
        """Query heads a KV head (G) of ``q`` [rows, H * G, D].

        Raises:
            ValueError: if shapes or the page size do not fit.
        """
        check_shape("q", q, (-1, -1, q.shape[-1]))
        check_shape("k", self.k, (-1, -1, q.shape[2]))
        check_shape("v", self.v, tuple(self.k.shape))
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={self.page_size} is not one of {PAGE_SIZES}")
        return group_size(q.shape[1], self.num_heads)

    def check_triton(self, q: torch.Tensor) -> None:
        """Raise ValueError unless kernels can read this view for the queries ``q``."""
        check_dtype("q", q, torch.bfloat16, torch.float16)
        check_dense_rows("q", q)
        for name, rows in {"k": self.k, "v": self.v}.items():
            check_dtype(name, rows, q.dtype, FP8)
            check_contiguous(name, rows)
        check_dtype("v", self.v, self.k.dtype)
        group = group_size(q.shape[1], self.num_heads)
        if q.shape[2] not in HEAD_DIMS or group > MAX_GROUP:
            raise ValueError(
                f"head_dim={q.shape[2]} must be one of {HEAD_DIMS}, and {group} query heads a KV "
                f"head at most {MAX_GROUP}"
            )


@dataclass(frozen=True)
class Softmax:
    """How products become logits.

    Attributes:
        scale: factor on q.k, usually 1 / sqrt(D).
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
    """

    scale: float
    logit_cap: float = 0.0

    @property
    def scale_log2(self) -> float:
        """The factor that makes logits exponents of 2."""
        return self.scale * 1.4426950408889634

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """Logits of ``products`` (q.k), in their dtype."""
        logits = products * self.scale
        return (
            self.logit_cap * torch.tanh(logits / self.logit_cap) if self.logit_cap > 0 else logits
        )


@dataclass(frozen=True)
class HeadWindows:
    """KV heads that attend to sinks and a local window in place of a list: streaming heads.

    DuoAttention (arXiv 2410.10819) and LServe (arXiv 2502.14866, section 3.3). In a row that
    selects (tail_start above 0), such a head attends to the positions below ``sink`` and to the
    last ``local`` ones. In a dense row it attends to everything.

    Attributes:
        streams: int32 [H], 1 for a streaming head and 0 for the others, which attend to lists.
        sink: leading tokens.
        local: last tokens of a row, the one being decoded included.
    """

    streams: torch.Tensor
    sink: int
    local: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.local < 0:
            raise ValueError(f"sink={self.sink} and local={self.local} must not be negative")

    @property
    def args(self) -> "WindowArgs":
        """The windows for kernels."""
        from .triton_ops import WindowArgs

        return WindowArgs(self.streams, self.sink, self.local)

    def check(self, heads: int) -> None:
        """Raise ValueError unless these are windows of ``heads`` KV heads."""
        check_shape("streams", self.streams, (heads,))
        check_dtype("streams", self.streams, torch.int32)

    def positions(self, length: int, queries: int = 1) -> torch.Tensor:
        """int64, ascending: what a streaming head of a row of ``length`` tokens attends to.

        With several queries, of which the first one is the last of these tokens, what any of them
        attends to.
        """
        start = max(length - self.local, min(self.sink, length))
        device = self.streams.device
        sinks = torch.arange(min(self.sink, length), device=device)
        return torch.cat((sinks, torch.arange(start, length + queries - 1, device=device)))


@dataclass(frozen=True)
class Always:
    """Tokens that are always selected, whatever their scores.

    Attributes:
        sink: leading tokens.
        recent: tokens at the domain's end.
    """

    sink: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise ValueError(f"sink={self.sink} and recent={self.recent} must not be negative")


@dataclass(frozen=True)
class Lists:
    """Lists of selected units, and which of them each row of a batch writes or reads.

    Attributes:
        indices: int32 [list rows, lists, capacity], contiguous, logical units, distinct within a
            list; entries past a list's count are undefined. Each KV head has a list. With a
            ``head_map`` there may be any number of lists.
        counts: int32 [list rows, lists], contiguous.
        rows: int32 [R], the list row of each row of the batch.
        unit: tokens a unit.
        head_map: int32 [H], the list that each KV head reads; its own if None.
        windows: KV heads that read none, and what they attend to instead; None if all read one.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    unit: int = 1
    head_map: torch.Tensor | None = None
    windows: HeadWindows | None = None

    @property
    def capacity(self) -> int:
        """Units that a list holds."""
        return self.indices.shape[2]

    @property
    def window_args(self) -> "WindowArgs | None":
        """The windows for kernels."""
        return None if self.windows is None else self.windows.args

    def first(self, rows: int) -> "Lists":
        """A view of the first ``rows`` list rows, for lists with a row for each row of a batch."""
        return Lists(self.indices[:rows], self.counts[:rows], self.rows[:rows], self.unit)

    def check_written(self, rows: int) -> None:
        """Raise ValueError unless lists of a batch of ``rows`` rows can be written."""
        check_shape("indices", self.indices, (-1, -1, -1))
        check_shape("counts", self.counts, tuple(self.indices.shape[:2]))
        check_shape("rows of lists", self.rows, (rows,))
        if self.unit < 1:
            raise ValueError(f"unit={self.unit} must be at least 1")
        words = {"indices": self.indices, "counts": self.counts, "rows of lists": self.rows}
        for name, tensor in words.items():
            check_dtype(name, tensor, torch.int32)
            check_contiguous(name, tensor)

    def check_read(self, rows: int, heads: int) -> None:
        """Raise ValueError unless ``heads`` KV heads of ``rows`` rows can read their lists."""
        self.check_written(rows)
        if self.head_map is None:
            check_shape("indices", self.indices, (-1, heads, -1))
        else:
            check_shape("head_map", self.head_map, (heads,))
            check_dtype("head_map", self.head_map, torch.int32)
        if self.windows is not None:
            self.windows.check(heads)


@dataclass(frozen=True)
class Scores:
    """Scores of the units of a batch, and the largest of each block of them.

    A score operator writes both: NaN as -inf, +inf as the largest finite number. Scores from
    elsewhere go through :func:`sglang_sparse_kernels.find_block_max` first. "cpu" and
    "torch" need and write no block maxima.

    Attributes:
        values: float32 [R, lists, max_units] ("torch" also float64), contiguous.
        block_max: float32 [R, lists, padded_blocks(max_units)], contiguous, the largest score of
            every :data:`BLOCK_UNITS` units.
        unread: int32 [lists], 1 for a list that no head attends to: its units are not scored, and
            it is not selected. None if every list is read.
    """

    values: torch.Tensor
    block_max: torch.Tensor
    unread: torch.Tensor | None = None

    def rows(self, batch_size: int) -> "Scores":
        """A view of the first ``batch_size`` rows."""
        return Scores(self.values[:batch_size], self.block_max[:batch_size], self.unread)

    def check(self, rows: int, lists: int) -> None:
        """Raise ValueError unless these are scores of ``rows`` rows of so many lists."""
        check_shape("scores", self.values, (rows, lists, -1))
        if self.unread is not None:
            check_shape("unread", self.unread, (lists,))
            check_dtype("unread", self.unread, torch.int32)

    @property
    def read(self) -> torch.Tensor:
        """int64, which lists are scored and selected, ascending."""
        lists = torch.arange(self.values.shape[1], device=self.values.device)
        return lists if self.unread is None else lists[self.unread == 0]

    def write(self, row: int, scores: torch.Tensor, start: int = 0) -> None:
        """Store ``scores`` [lists, n] of a row from unit ``start`` on, of lists that are read."""
        units = slice(start, start + scores.shape[1])
        if self.unread is None:
            self.values[row, :, units] = scores
        else:
            read = self.read
            self.values[row, read, units] = scores[read].to(self.values.dtype)

    def check_triton(self) -> None:
        """Raise ValueError unless kernels can read and write these."""
        blocks = padded_blocks(self.values.shape[2])
        check_shape("block_max", self.block_max, (*self.values.shape[:2], blocks))
        for name, tensor in {"scores": self.values, "block_max": self.block_max}.items():
            check_dtype(name, tensor, torch.float32)
            check_contiguous(name, tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.values.nbytes + self.block_max.nbytes


def padded_blocks(max_units: int) -> int:
    """Width of a row of block maxima, padded so that rows are aligned and load in wide accesses."""
    return -(-max_units // (BLOCK_UNITS * _BLOCK_ALIGNMENT)) * _BLOCK_ALIGNMENT


def make_scores(rows: int, lists: int, max_units: int, device: Device) -> Scores:
    """Scores of up to ``rows`` rows, uninitialised, with room for their block maxima."""
    return Scores(
        torch.empty((rows, lists, max_units), device=device),
        torch.zeros((rows, lists, padded_blocks(max_units)), device=device),
    )


def scored_rows(plan: "DecodePlan") -> list[int]:
    """Rows of the batch that select anew at this step, on the host."""
    return ((plan.reselect != 0) & (plan.k_units > 0)).nonzero().squeeze(1).tolist()


@dataclass(frozen=True)
class ListSpan:
    """A part of each list of R rows and H KV heads, where lists are read in several parts.

    Attributes:
        first, last: int32 [R, H], contiguous: the places ``[first, last)`` of a list.
        tails: whether the rows' tails belong to it, too.
    """

    first: torch.Tensor
    last: torch.Tensor
    tails: bool = True

    @classmethod
    def allocate(cls, rows: int, heads: int, device: Device) -> "ListSpan":
        """Empty parts."""
        first, last = (
            torch.zeros((rows, heads), dtype=torch.int32, device=device) for _ in range(2)
        )
        return cls(first, last)

    def rows(self, count: int) -> "ListSpan":
        """A view of the first ``count`` rows."""
        return ListSpan(self.first[:count], self.last[:count], self.tails)

    def heads_as_rows(self) -> "ListSpan":
        """A view with a row for each row and KV head."""
        return ListSpan(self.first.view(-1, 1), self.last.view(-1, 1), self.tails)

    def check(self, rows: int, heads: int) -> None:
        """Raise ValueError unless it has a part for each of ``rows`` rows and ``heads`` heads."""
        for name, tensor in {"first": self.first, "last": self.last}.items():
            check_shape(name, tensor, (rows, heads))
            check_dtype(name, tensor, torch.int32)
            check_contiguous(name, tensor)
