# SPDX-License-Identifier: Apache-2.0
"""The pool of frames: which block of KV lies in which frame, and what a lookup finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..common import PAGE_SIZES, Device, check_contiguous, check_dtype, check_shape
from ..plan import DecodePlan
from ..records import HEAD_DIMS, KVScales, KVView, Lists

if TYPE_CHECKING:
    from .device_ops import FoundArgs, PoolArgs

MISSING = -(2**31)
"""``frame_of`` of a block that is in no frame."""

COUNTERS = ("hits", "loads", "unserved", "stall_nanoseconds", "flushes")
"""What each entry of ``FramePool.counters`` counts, over layers and steps:

``hits``: blocks that a step looked up and that lay in a frame; ``loads``: blocks that it took from
host memory; ``unserved``: blocks for which no frame was free. The last stays 0 as long as no step
touches more than the pool's :class:`FrameDemand` says. A block counts once a step, however many
rows and units touch it. Pinned blocks do not count.

``stall_nanoseconds``: how long the loads took that a step waits for, each from the moment when the
first program begins to copy to the moment when the last one has copied. Meanwhile a step attends to
what is there, and does nothing else: so it is the longest that the step may have waited. Kernels
read the GPU's clock; PyTorch's copies are timed on the host. Lookups that miss nothing add nothing.

``flushes``: pinned blocks that were copied to host memory.
"""

TILE_ENTRIES = 256
"""Entries of a lookup that are counted together."""

NEVER = 2**63 - 1
"""When the first program of a load began, as long as none has."""


@dataclass(frozen=True)
class FrameDemand:
    """The most blocks that one decode step touches.

    Attributes:
        layers: layers whose KV lies in host memory.
        rows: of the largest batch.
        heads: KV heads of this rank.
        row_pages: the most pages of a row that a KV head attends to in one step: a page for each
            unit of a list, and those of the longest tail.
    """

    layers: int
    rows: int
    heads: int
    row_pages: int

    @property
    def blocks(self) -> int:
        """Frames that a pool needs: ``layers * rows * heads * row_pages``.

        With so many, each block that is missing finds a frame that this step does not use.
        """
        return self.layers * self.rows * self.heads * self.row_pages

    def check(self, frames: int) -> None:
        """Raise ValueError if ``frames`` frames are too few."""
        if min(self.layers, self.rows, self.heads, self.row_pages) < 1:
            raise ValueError(f"{self} must have positive sizes")
        if frames < self.blocks:
            raise ValueError(
                f"{frames} frames are fewer than the {self.blocks} blocks that one step of "
                f"{self.rows} rows may touch in {self.layers} layers of {self.heads} KV heads with "
                f"{self.row_pages} pages each"
            )


@dataclass(frozen=True)
class FramePool:
    """Frames for blocks of KV, shared by all layers, KV heads and requests (PSA, section 3.4).

    A *block* is one page of one layer and KV head: P keys and P values. Block (l, p, h) has number
    ``(l * pages + p) * H + h``. The first ``cached`` frames hold copies of blocks of host memory,
    replaced by recency. The frames behind them are *pinned*: they hold what the host does not have
    yet, for as long as :func:`sglang_sparse_kernels.frames.pin_pages` says.

    A frame's recency is the last step that used it. Frames of one step keep the order that they
    had before.

    Attributes:
        k: [frames * P, 1, D], contiguous, the keys of frame f from row ``f * P`` on.
        v: the same for values.
        page_size: P.
        frame_of: int32 [layers, pages, H], contiguous: the frame of each block, or
            :data:`MISSING`. Between the launches of a lookup, other negative numbers are claims.
        owner: int32 [cached], the block that was last put in each frame, -1 for none. The block is
            there only if ``frame_of`` agrees.
        stamp: int32 [cached], the clock when each frame was last used; only equality counts.
        order: int32 [cached], the frames, the least recently used first, as the step began.
        clock: int32 [1], the number of the step.
        cursor: int32 [1], frames of ``order`` before it are in use in this step.
        counters: int64 [len(COUNTERS)], see :data:`COUNTERS`.
        arriving: int32 [frames], 1 for frames whose block was looked up and is yet to be loaded.
            None where attention runs behind the load, and no launch waits for such a mark.
        timing: int64 [3], of a load that runs: when its first program began and when its last one
            ended, in nanoseconds, and how many have ended. Between loads ``(NEVER, 0, 0)``.
        demand: what the pool was made for.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_size: int
    frame_of: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    order: torch.Tensor
    clock: torch.Tensor
    cursor: torch.Tensor
    counters: torch.Tensor
    arriving: torch.Tensor | None
    timing: torch.Tensor
    demand: FrameDemand

    @classmethod
    def allocate(
        cls, demand: FrameDemand, *, pages: int, cached: int, pinned_pages: int, page_size: int,
        dim: int, dtype: torch.dtype, device: Device,
    ) -> FramePool:  # fmt: skip
        """An empty pool.

        Args:
            demand: the most that a step touches.
            pages: physical pages of host memory.
            cached: frames for blocks of host memory.
            pinned_pages: pages that can be pinned at once, in all layers and KV heads.
            page_size: P, one of 16, 32 and 64.
            dim: D, 64 or 128.
            dtype: of keys and values.
            device: where the pool lives.

        Raises:
            ValueError: a size is out of range, or ``cached`` is below ``demand.blocks``.
        """
        demand.check(cached)
        if page_size not in PAGE_SIZES or dim not in HEAD_DIMS:
            raise ValueError(
                f"page_size={page_size} must be one of {PAGE_SIZES}, and dim={dim} of {HEAD_DIMS}"
            )
        heads_of_all = demand.layers * demand.heads
        frames = cached + pinned_pages * heads_of_all
        if pages * heads_of_all >= 2**31 or frames * page_size >= 2**31:
            raise ValueError(f"{pages} pages and {frames} frames are more than 32 bits can number")

        def numbers(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        rows = (frames * page_size, 1, dim)
        return cls(
            k=torch.zeros(rows, dtype=dtype, device=device),
            v=torch.zeros(rows, dtype=dtype, device=device),
            page_size=page_size,
            frame_of=numbers(demand.layers, pages, demand.heads, fill=MISSING),
            owner=numbers(cached, fill=-1),
            stamp=numbers(cached, fill=-1),
            order=torch.arange(cached, dtype=torch.int32, device=device),
            clock=numbers(1),
            cursor=numbers(1),
            counters=torch.zeros(len(COUNTERS), dtype=torch.int64, device=device),
            arriving=numbers(frames),
            timing=torch.tensor([NEVER, 0, 0], device=device),
            demand=demand,
        )

    @property
    def cached(self) -> int:
        """Frames that hold copies of host memory."""
        return self.owner.shape[0]

    @property
    def heads(self) -> int:
        """KV heads (H)."""
        return self.frame_of.shape[2]

    @property
    def nbytes(self) -> int:
        """Device bytes of the frames and of all that is known of them."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))

    def args(self, layer: int) -> PoolArgs:
        """The pool for kernels that work on one layer."""
        from .device_ops import PoolArgs

        return PoolArgs(
            self.frame_of, self.owner, self.stamp, self.order, self.clock, self.cursor,
            self.counters, self.arriving, self.cached, layer * self.frame_of[0].numel(),
        )  # fmt: skip

    def check_host(self, host: torch.Tensor) -> None:
        """Raise ValueError unless ``host`` holds the blocks of this pool."""
        layers, pages, heads = self.frame_of.shape
        shape = (layers, pages, heads, 2, self.page_size, self.k.shape[2])
        check_shape("host", host, shape)
        check_dtype("host", host, self.k.dtype)
        check_contiguous("host", host)
        if self.k.is_cuda and not host.is_pinned():
            raise ValueError("host must be pinned memory")


def make_host_blocks(pool: FramePool) -> torch.Tensor:
    """Host memory for all blocks of ``pool``, uninitialised, pinned if the pool is on a GPU.

    Returns:
        [layers, pages, H, 2, P, D]: keys, then values of each block, in the order of their numbers.

    Raises:
        RuntimeError: so much memory cannot be allocated or pinned.
    """
    shape = (*pool.frame_of.shape, 2, pool.page_size, pool.k.shape[2])
    return torch.empty(shape, dtype=pool.k.dtype, pin_memory=pool.k.is_cuda)


@dataclass(frozen=True)
class FoundFrames:
    """What a lookup finds for a batch, and its scratch; layers may share it.

    Attention reads frames through it with one row for each row and KV head of the batch: row
    ``r * H + h`` has a page table of its own, and one KV head.

    Attributes:
        plan: of ``max_rows * H`` rows; its page table leads logical pages to frames, and its
            request slots are those of the batch times H, plus the KV head.
        list_rows: int32 [max_rows * H], which list each of them reads.
        pages: int32 [max_rows * H, list_units + tail_pages], the logical page of each entry that a
            row looks up, -1 for none: those of its listed units, then those of its tail.
        blocks: the same shape, the block of each entry.
        ranks: the same shape, how many blocks go before one that is missing, in its tile.
        before: int32 [tiles], how many are missing in the tiles of entries before each.
        counted: int32 [1], tiles that have been counted; 0 between lookups.
        missing: int32 [entries], blocks to load.
        victims: int32 [entries], the frame of each of them.
        num_missing: int32 [1], how many there are.
        tail_pages: the most pages of a row's tail.
    """

    plan: DecodePlan
    list_rows: torch.Tensor
    pages: torch.Tensor
    blocks: torch.Tensor
    ranks: torch.Tensor
    before: torch.Tensor
    counted: torch.Tensor
    missing: torch.Tensor
    victims: torch.Tensor
    num_missing: torch.Tensor
    tail_pages: int

    @classmethod
    def allocate(
        cls, pool: FramePool, *, max_rows: int, max_pages: int, list_units: int, tail_pages: int,
        row_pages: int | None = None,
    ) -> FoundFrames:  # fmt: skip
        """For batches of up to ``max_rows`` rows of ``max_pages`` pages.

        Args:
            pool: the frames.
            max_rows, max_pages: of a batch.
            list_units: units that a list holds.
            tail_pages: the most pages of ``[tail_start, seq_len)`` of a row.
            row_pages: the most pages that a row reads, where its longest list and its longest tail
                never come together; None if they may.

        Raises:
            ValueError: a batch could touch more than the pool's demand.
        """
        demand, device = pool.demand, pool.k.device
        row_pages = min(list_units + tail_pages, max_pages, row_pages or max_pages)
        if max_rows > demand.rows or row_pages > demand.row_pages:
            raise ValueError(f"{max_rows} rows that read {row_pages} pages are more than {demand}")
        return cls.of_rows(max_rows * pool.heads, max_pages, list_units, tail_pages, device)

    @classmethod
    def of_rows(
        cls, rows: int, max_pages: int, list_units: int, tail_pages: int, device: Device
    ) -> FoundFrames:
        """For so many rows and KV heads together; for the others see :meth:`allocate`.

        On the device "meta" it takes no memory, and ``nbytes`` says what it would take.
        """
        entries = list_units + tail_pages

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            plan=DecodePlan.allocate(rows, max_pages, device),
            list_rows=numbers(rows),
            pages=numbers(rows, entries),
            blocks=numbers(rows, entries),
            ranks=numbers(rows, entries),
            before=numbers(-(-rows * entries // TILE_ENTRIES)),
            counted=numbers(1),
            missing=numbers(rows * entries),
            victims=numbers(rows * entries),
            num_missing=numbers(1),
            tail_pages=tail_pages,
        )

    @property
    def list_units(self) -> int:
        """Units that a list holds."""
        return self.pages.shape[1] - self.tail_pages

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        held = (*vars(self).values(), *vars(self.plan).values())
        return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))

    @property
    def args(self) -> FoundArgs:
        """What kernels write."""
        from .device_ops import FoundArgs

        plan = self.plan
        return FoundArgs(
            plan.page_table, plan.seq_lens, plan.tail_start, plan.k_units, plan.request_slots,
            self.list_rows,
            self.pages, self.blocks, self.ranks, self.before, self.counted, self.missing,
            self.victims, self.num_missing, plan.page_table.stride(0),
        )  # fmt: skip

    def check(
        self, pool: FramePool, page_table: torch.Tensor, plan: DecodePlan, lists: Lists
    ) -> None:
        """Raise ValueError unless a batch of ``plan`` and ``lists`` fits."""
        rows, heads = plan.num_rows, pool.heads
        if rows * heads > self.plan.num_rows:
            raise ValueError(f"batch of {rows} rows does not fit {self.plan.num_rows // heads}")
        lists.check_read(rows, heads)
        if lists.windows is not None:
            raise ValueError("lists with windows cannot be looked up: streaming heads have no list")
        if lists.capacity != self.list_units:
            raise ValueError(f"lists of {lists.capacity} units must have {self.list_units}")
        if pool.page_size % lists.unit:
            raise ValueError(f"unit={lists.unit} must divide page_size={pool.page_size}")
        check_shape("page_table", page_table, (rows, -1))
        if page_table.shape[1] > self.plan.page_table.shape[1]:
            raise ValueError(
                f"rows of {page_table.shape[1]} pages do not fit {self.plan.page_table.shape[1]}"
            )

    def rows(self, pool: FramePool, rows: int) -> DecodePlan:
        """The plan that attention of a batch of ``rows`` rows takes."""
        return self.plan.rows(rows * pool.heads)

    def kv(self, pool: FramePool, rows: int, scales: KVScales) -> KVView:
        """The frames as attention of a batch of ``rows`` rows reads them."""
        table = self.rows(pool, rows).page_table
        return KVView(pool.k, pool.v, table, pool.page_size, scales, pool.arriving)

    def lists(self, pool: FramePool, rows: int, lists: Lists) -> Lists:
        """``lists`` as attention of a batch of ``rows`` rows reads them, a KV head a row."""
        single = lists.indices.view(-1, 1, lists.capacity)
        list_rows = self.list_rows[: rows * pool.heads]
        return Lists(single, lists.counts.view(-1, 1), list_rows, lists.unit)
