# SPDX-License-Identifier: Apache-2.0
"""A decoding batch whose KV lies on the host, beside one whose KV lies on the device."""

import torch
from frame_cases import poison_frames
from kernel_cases import DEVICE, NAN, Batch

from sglang_sparse_kernels import (
    DecodePlan,
    Fetch,
    KVScales,
    KVView,
    Lists,
    Stage,
    StepContext,
    decode_step,
)
from sglang_sparse_kernels.frames import (
    FoundFrames,
    FrameDemand,
    FramePool,
    begin_step,
    make_host_blocks,
    pin_pages,
)

LAYERS = 2


class Tier:
    """A decoding batch whose KV lies on the host, but for each row's last page, beside a resident
    one."""

    def __init__(
        self, case: tuple, impl: str, spare: int, lengths: list[int], capacity: int
    ) -> None:
        page_size, unit, heads, group, dim, dtype, kv_dtype = case
        self.impl = impl
        self.batch = batch = Batch(
            lengths, page_size=page_size, unit=unit, heads=heads, group=group, dim=dim, dtype=dtype,
            kv_dtype=kv_dtype, capacity=capacity, budget=capacity * unit, min_sparse=40,
            reselect_every=3, shared_pages=1, dense_rows=(3,), layers=LAYERS, seed=page_size + dim,
            scales=KVScales(0.5, 2.0) if kv_dtype else KVScales(),
        )  # fmt: skip
        rows, max_pages = len(lengths), batch.max_pages
        demand = FrameDemand(LAYERS, rows, heads, max_pages)
        self.pool = FramePool.allocate(
            demand, pages=batch.num_pages, cached=demand.blocks + spare, pinned_pages=rows,
            page_size=page_size, dim=dim, dtype=batch.k[0].dtype, device=DEVICE,
        )  # fmt: skip
        poison_frames(self.pool)
        self.found = FoundFrames.allocate(
            self.pool, max_rows=rows, max_pages=max_pages, list_units=capacity,
            tail_pages=max_pages,
        )  # fmt: skip
        self.host = make_host_blocks(self.pool)
        for layer in range(LAYERS):
            for part, rows_of in enumerate((batch.k[layer], batch.v[layer])):
                blocks = rows_of.view(batch.num_pages, page_size, heads, dim).transpose(1, 2)
                self.host[layer, :, :, part].copy_(blocks)
        self.pin_last_pages()

    def pin_last_pages(self) -> None:
        """What a request still writes to is not on the host."""
        batch, pool = self.batch, self.pool
        table = batch.plan.page_table
        last = [int(table[row, (n - 1) // batch.page_size]) for row, n in enumerate(batch.lengths)]
        pages = torch.tensor(last, device=DEVICE)
        pin_pages(pool, pages, torch.arange(len(last), device=DEVICE))
        for page in last:
            for layer in range(LAYERS):
                for head in range(batch.heads):
                    frame = int(pool.frame_of[layer, page, head])
                    rows = slice(frame * batch.page_size, (frame + 1) * batch.page_size)
                    block = self.host[layer, page, head].to(DEVICE).view(torch.uint8)
                    pool.k.view(torch.uint8)[rows, 0] = block[0]
                    pool.v.view(torch.uint8)[rows, 0] = block[1]
        self.host.view(torch.uint8)[:, last] = 0x7F

    def begin_step(self, number: int) -> torch.Generator:
        """Begin a step of random lengths; random numbers for it."""
        batch, rng = self.batch, torch.Generator().manual_seed(number)
        lengths = [int(torch.randint(1, n + 1, (1,), generator=rng)) for n in batch.lengths]
        batch.seq_lens = torch.tensor(lengths, device=DEVICE)
        plan = DecodePlan.allocate(len(lengths), batch.max_pages, DEVICE)
        batch.fill_plan(plan, batch.seq_lens, "torch")
        batch.plan = plan
        batch.rng = rng
        begin_step(self.pool, impl=self.impl)
        return rng

    def fetch(self, layer: int) -> Fetch:
        """How a layer's blocks get to the device."""
        return Fetch(self.pool, self.host, layer, self.found)

    def attend(
        self, stage: Stage, q: torch.Tensor, lists: Lists, layer: int | None = None
    ) -> torch.Tensor:
        """The output of one stage, over resident KV of a layer, or over none."""
        batch = self.batch
        k, v = batch.k[layer or 0], batch.v[layer or 0]
        if layer is None:
            k = v = torch.full_like(k.float(), NAN).to(k.dtype)
        out = torch.full_like(q, NAN)
        kv = KVView(k, v, batch.plan.page_table, batch.page_size, batch.scales)
        step = StepContext(q, kv, batch.plan, lists, batch.softmax(), out, self.impl)
        decode_step([stage], step)
        return out
