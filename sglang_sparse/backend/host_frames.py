# SPDX-License-Identifier: Apache-2.0
"""Frames of a server whose KV lies in host memory: how many there are, what a step does to them.

A page that a request writes to is pinned at the place of its request slot. When it is full it goes
to the host, at the end of the step that filled it: SGLang may put it in the tree before the
request's next step. All of it runs on the device, in fixed shapes, so that decode graphs hold it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang_sparse.backend.counters import DeviceSums
from sglang_sparse.backend.host_frame_sizes import FrameNeeds
from sglang_sparse.backend.host_prompts import HostPrompts, Span
from sglang_sparse.choices.build import Build, tensor_bytes
from sglang_sparse_kernels.frames import (
    COUNTERS,
    FoundFrames,
    FramePool,
    begin_step,
    fill_pages,
    flush_pages,
    pin_pages,
    release_pages,
    store_tokens,
)
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.progressive import Rounds
from sglang_sparse_kernels.step import (
    Ahead,
    AttendAhead,
    AttendFrames,
    AttendFramesUntil,
    AttendUntil,
    Fetch,
    FetchAhead,
    Stage,
)
from sglang_sparse_radix.host_kv import HostKVPool, StagedPlanes


class HostFrames:
    """The frames of a server, see the module.

    Attributes:
        frames: the pool of frames.
        prompts: the copies that prompts attend to.
    """

    def __init__(
        self, pool: HostKVPool, build: Build, needs: FrameNeeds, cached: int, prompts: HostPrompts
    ) -> None:
        """Make the frames.

        Args:
            pool: keys and values in host memory.
            build: what layers share.
            needs: of this server.
            cached: frames for blocks of the host.
            prompts: the copies that prompts attend to.
        """
        self._pool, self.prompts, self._impl = pool, prompts, build.impl
        device, page = build.device, pool.page_size
        self.frames = frames = FramePool.allocate(
            needs.demand, pages=pool.num_pages, cached=cached, pinned_pages=needs.demand.rows,
            page_size=page, dim=pool.head_dim, dtype=pool.dtype, device=device,
        )  # fmt: skip
        self._rows_a_pass, self._needs = build.limits.rows_a_pass, needs
        self._found = self._find()
        # For each layer behind one that selects.
        self._found_ahead: list[FoundFrames] = []
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._workspace = build.attention
        self._rounds = Rounds.allocate(build.limits.rows_a_pass, pool.head_num, device, None)
        self._sums = DeviceSums(COUNTERS, frames.counters)
        # Keys of pages that are being written, as the planes' kernels read them.
        rows, heads = needs.demand.rows, (pool.head_num, pool.head_dim)
        layers = len(pool.plane_layers)
        self._keys = torch.zeros((layers, rows * page, *heads), dtype=pool.dtype, device=device)
        self._planes = StagedPlanes(pool, list(self._keys))
        local = [layer - pool.start_layer for layer in pool.plane_layers]
        self._plane_layers = torch.tensor(local, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the frames."""
        return self.frames.k, self.frames.v

    def stage(self, layer: int) -> Stage:
        """Attention of a layer, a global id, over frames."""
        return AttendFrames(self._fetch(layer), self._workspace)

    def until(self, layer: int, stage: AttendUntil) -> Stage:
        """`stage` of a layer, a global id, over frames that are loaded as far as it goes."""
        rounds = replace(self._rounds, workspace=stage.workspace)
        return AttendFramesUntil(self._fetch(layer), stage, rounds)

    def ahead(
        self, layers: Sequence[int], head_maps: Sequence[torch.Tensor | None]
    ) -> tuple[list[Stage], list[Stage]]:
        """What fetches for `layers`, global ids, and a stage for each that attends.

        Where a batch takes several passes, each layer fetches for itself: a pass would overwrite
        what was found for the one before.
        """
        if not layers or self._rows_a_pass < self._needs.demand.rows:
            return [], list(map(self.stage, layers))
        while len(self._found_ahead) < len(layers):
            self._found_ahead.append(self._find())
        aheads = tuple(
            Ahead(
                self._fetch(layer, found),
                head_map,
                None if self._beside is None else torch.cuda.Event(),
            )
            for layer, head_map, found in zip(layers, head_maps, self._found_ahead, strict=False)
        )
        fetching = FetchAhead(aheads, self._beside)
        return [fetching], [AttendAhead(ahead, self._workspace) for ahead in aheads]

    def _fetch(self, layer: int, found: FoundFrames | None = None) -> Fetch:
        local = layer - self._pool.start_layer
        return Fetch(self.frames, self._pool.host, local, found or self._found)

    def _find(self) -> FoundFrames:
        needs = self._needs
        return FoundFrames.allocate(
            self.frames, max_rows=self._rows_a_pass, max_pages=needs.columns,
            list_units=needs.list_units, tail_pages=needs.tail_pages,
            row_pages=needs.demand.row_pages,
        )  # fmt: skip

    # A decode step.

    def begin(self, plan: DecodePlan) -> None:
        """Begin a step, and pin the pages that it writes to."""
        self._sums.offer()
        begin_step(self.frames, impl=self._impl)
        pin_pages(self.frames, self._current(plan), plan.request_slots)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values of a step's tokens.

        Args:
            layer: global id.
            k, v: [rows, heads * head_dim] or [rows, heads, head_dim].
            slots: int64 [rows], their KV slots.
        """
        shape = (-1, self._pool.head_num, self._pool.head_dim)
        k, v = (rows.view(shape).to(self._pool.dtype) for rows in (k, v))
        store_tokens(self.frames, layer - self._pool.start_layer, k, v, slots, impl=self._impl)

    def end(self, plan: DecodePlan) -> None:
        """End a step: bring planes up to date, and send full pages to the host."""
        pages, page = self._current(plan), self._pool.page_size
        self._update_planes(plan, pages)
        full = torch.where(plan.seq_lens % page == 0, pages, -1)
        flush_pages(self.frames, self._pool.host, full, impl=self._impl)
        release_pages(self.frames, full)

    def _current(self, plan: DecodePlan) -> torch.Tensor:
        """The page that each row writes to, int32 [rows]."""
        last = (plan.seq_lens - 1).clamp(min=0) // self._pool.page_size
        return plan.page_table.gather(1, last.long()[:, None])[:, 0].contiguous()

    def _update_planes(self, plan: DecodePlan, pages: torch.Tensor) -> None:
        frames, pool, count = self.frames, self._pool, plan.num_rows
        layers, heads, page, dim = (
            pool.layer_num, pool.head_num, pool.page_size, pool.head_dim,
        )  # fmt: skip
        pinned = frames.k[frames.cached * page :].view(-1, layers, heads, page, dim)
        held = pinned.index_select(0, plan.request_slots).index_select(1, self._plane_layers)
        # [rows, layers, heads, P, dim] to [layers, rows, P, heads, dim]
        keys = self._keys.view(len(self._keys), -1, page, heads, dim)
        keys[:, :count].copy_(held.permute(1, 0, 3, 2, 4))
        places = self._rows[:count]
        end = (plan.seq_lens - 1).clamp(min=0) % page + 1
        self._planes.update(places[:, None], torch.zeros_like(end), end, max_new_tokens=page)
        self._planes.copy(pool.plane_layers[0], places, pages.long())

    # A prefill batch.

    def forget(self, spans: list[Span]) -> None:
        """Forget what frames hold of pages that a prefill batch is about to write."""
        for span in spans:
            release_pages(self.frames, span.written.contiguous())

    def hand_over(self, spans: list[Span], slots: torch.Tensor) -> None:
        """Pin the open pages of a prefill batch, which decoding goes on with.

        Args:
            spans: its requests.
            slots: int64 [requests], their request slots.
        """
        for row, span in enumerate(spans):
            page = span.open_page
            pin_pages(self.frames, page, slots[row : row + len(page)])
            fill_pages(self.frames, self._pool.host, page, impl=self._impl)

    # Compiled before the first batch, see `ahead.compile_kernels`.

    def rehearse(self, rows: int) -> None:
        """Launch what writes the tokens of a step of so many rows, into the padding page."""
        k = torch.zeros(
            (rows, self._pool.head_num, self._pool.head_dim), dtype=self._pool.dtype,
            device=self.frames.k.device,
        )  # fmt: skip
        slots = torch.zeros(rows, dtype=torch.int64, device=k.device)
        for layer in range(self._pool.start_layer, min(2, self._pool.end_layer)):
            self.store(layer, k, k, slots)

    def rehearse_fill(self) -> None:
        """Launch what fills open pages, for lists of pages of either alignment."""
        none = torch.full((2,), -1, dtype=torch.int32, device=self.frames.k.device)
        for pages in (none[:1], none[1:]):
            fill_pages(self.frames, self._pool.host, pages, impl=self._impl)

    # Reports.

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, and of a frame."""
        return 2 * self._pool.page_size * self._pool.head_dim * self._pool.dtype.itemsize

    def counts(self, *, wait: bool) -> dict[str, int] | None:
        """What was found, loaded and flushed, by the names of ``COUNTERS``, and bytes over the bus.

        Args:
            wait: for the device; else an earlier snapshot, or None if none has arrived.
        """
        found = self._sums.read() if wait else self._sums.poll()
        if found is None:
            return None
        return found | {
            "loaded_bytes": found["loads"] * self.block_bytes,
            "flushed_bytes": found["flushes"] * self.block_bytes,
            "prompt_read_bytes": self.prompts.read_bytes,
            "prompt_written_bytes": self.prompts.written_bytes,
        }

    def describe(self) -> dict[str, int]:
        """Sizes and counts in plain numbers. Waits for the device."""
        return {
            "host_bytes": self._pool.host.nbytes,
            "frames": self.frames.cached,
            "frame_bytes": self.block_bytes,
            "pinned_pages": len(self._rows),
            "prompt_bytes": self.prompts.nbytes(),
            **(self.counts(wait=True) or {}),
        }

    def nbytes(self) -> int:
        """Device bytes of everything here."""
        own = self.frames.nbytes + self._keys.nbytes + self._planes.nbytes()
        own += sum(found.nbytes for found in (self._found, *self._found_ahead))
        return own + tensor_bytes(self._rounds) + self.prompts.nbytes()
