# SPDX-License-Identifier: Apache-2.0
"""Requests that decode over frames, page by page to the host, and give their pages back."""

from random import Random

import pytest
import torch
from frame_cases import on_device, poison_frames, same_bytes, steps_of
from kernel_cases import DEVICE, NAN

from sglang_sparse_kernels import (
    Attend,
    AttendFrames,
    DecodePlan,
    Fetch,
    KVView,
    Lists,
    Softmax,
    StepContext,
    make_workspace,
)
from sglang_sparse_kernels.frames import (
    FoundFrames,
    FrameDemand,
    FramePool,
    begin_step,
    flush_pages,
    make_host_blocks,
    pin_pages,
    release_pages,
    store_tokens,
)

P, HEADS, GROUP, DIM, LAYERS, ROWS = 16, 2, 2, 64, 2, 3
MAX_PAGES, UNITS = 4, 2
PAGES = ROWS * MAX_PAGES + 1


class Decoding:
    """Requests of any length that come and go; page 0 is for rows without one."""

    def __init__(self, impl: str, dtype: torch.dtype, seed: int) -> None:
        self.impl, self.dtype, self.rng = impl, dtype, Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        demand = FrameDemand(LAYERS, ROWS, HEADS, MAX_PAGES)
        self.pool = FramePool.allocate(
            demand, pages=PAGES, cached=demand.blocks, pinned_pages=ROWS + 1, page_size=P, dim=DIM,
            dtype=dtype, device=DEVICE,
        )  # fmt: skip
        poison_frames(self.pool)
        self.host = make_host_blocks(self.pool)
        self.host.view(torch.uint8).fill_(0x7F)
        shape = (LAYERS, PAGES * P, HEADS, DIM)
        self.k, self.v = (torch.zeros(shape, device=DEVICE).to(dtype) for _ in range(2))
        self.found = FoundFrames.allocate(
            self.pool, max_rows=ROWS, max_pages=MAX_PAGES, list_units=UNITS, tail_pages=MAX_PAGES
        )
        self.workspace = make_workspace(ROWS, HEADS * GROUP, HEADS, DIM, DEVICE)
        self.free = list(range(1, PAGES))
        self.tables: list[list[int]] = [[] for _ in range(ROWS)]
        self.lengths = [0] * ROWS
        pin_pages(self.pool, on_device([0]), on_device([ROWS]))

    def begin_token(self, row: int) -> int:
        """The slot of a request's next token; a new request where the old one ends."""
        full = self.lengths[row] == MAX_PAGES * P
        if full or (self.lengths[row] and self.rng.random() < 0.02):
            release_pages(self.pool, on_device(self.tables[row]))
            self.free += self.tables[row]
            self.tables[row], self.lengths[row] = [], 0
        table, offset = self.tables[row], self.lengths[row] % P
        if offset == 0:
            if table:
                flush_pages(self.pool, self.host, on_device([-1, table[-1]]), impl=self.impl)
                release_pages(self.pool, on_device([table[-1]]))
            table.append(self.free.pop(self.rng.randrange(len(self.free))))
            pin_pages(self.pool, on_device([table[-1]]), on_device([row]))
        self.lengths[row] += 1
        return table[-1] * P + offset

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs over frames and over resident KV, of all layers, after one more token each."""
        slots = on_device([self.begin_token(row) for row in range(ROWS)], torch.int64)
        plan = DecodePlan.allocate(ROWS, MAX_PAGES, DEVICE)
        for row, table in enumerate(self.tables):
            plan.page_table[row, : len(table)] = on_device(table)
        plan.seq_lens.copy_(on_device(self.lengths))
        tails = [n - 1 - self.rng.randrange(2) if n > 20 else 0 for n in self.lengths]
        plan.tail_start.copy_(on_device(tails))
        plan.k_units.copy_(on_device([min(UNITS, -(-tail // P)) for tail in tails]))
        begin_step(self.pool, impl=self.impl)
        outputs = []
        for layer in range(LAYERS):
            indices = torch.zeros((ROWS, HEADS, UNITS), dtype=torch.int32)
            for row, tail in enumerate(tails):
                for head in range(HEADS):
                    listed = self.rng.sample(range(-(-tail // P)), int(plan.k_units[row]))
                    indices[row, head, : len(listed)] = torch.tensor(sorted(listed)).int()
            counts = plan.k_units[:, None].expand(-1, HEADS).contiguous()
            lists = Lists(indices.to(DEVICE), counts, on_device(list(range(ROWS))), P)
            q, k, v = (
                torch.randn((ROWS, heads, DIM), generator=self.numbers).to(DEVICE)
                for heads in (HEADS * GROUP, HEADS + 1, HEADS)
            )
            k, v = k.to(self.dtype)[:, :HEADS], v.to(self.dtype)
            for stored, fresh in ((self.k, k), (self.v, v)):
                stored.view(torch.uint8)[layer, slots] = fresh.contiguous().view(torch.uint8)
            store_tokens(self.pool, layer, k, v, slots, impl=self.impl)
            kv = KVView(self.k[layer], self.v[layer], plan.page_table, P)
            fetch = AttendFrames(Fetch(self.pool, self.host, layer, self.found), self.workspace)
            pair = []
            for stage in (fetch, Attend(self.workspace)):
                out = torch.full((ROWS, HEADS * GROUP, DIM), NAN, device=DEVICE).bfloat16()
                stage.run(
                    StepContext(q.bfloat16(), kv, plan, lists, Softmax(0.125), out, self.impl)
                )
                pair.append(out)
            outputs.append(torch.stack(pair))
        got, want = torch.stack(outputs).unbind(1)
        return got, want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("impl", "steps"), steps_of(torch=150, cpu=300, triton=30))
def test_requests_decode_page_by_page_to_the_host(
    impl: str, steps: int, dtype: torch.dtype
) -> None:
    decoding = Decoding(impl, dtype, seed=steps)
    for number in range(steps):
        got, want = decoding.step()
        assert not want.isnan().any()
        assert same_bytes(got, want), f"step {number}"
    hits, loads, unserved, *_ = decoding.pool.counters.tolist()
    assert hits > 0
    assert loads > 0
    assert unserved == 0


@pytest.mark.parametrize("impl", ["torch", "cpu", "triton"])
def test_pages_that_are_not_pinned_are_neither_written_nor_flushed(impl: str) -> None:
    decoding = Decoding(impl, torch.float16, seed=1)
    pool, host = decoding.pool, decoding.host
    before = [t.clone() for t in (pool.k, pool.v, host)]
    k = torch.ones((2, HEADS, DIM), dtype=torch.float16, device=DEVICE)
    store_tokens(pool, 0, k, k, on_device([3 * P, 4 * P + 5]), impl=impl)
    flush_pages(pool, host, on_device([3, -1]), impl=impl)
    for was, tensor in zip(before, (pool.k, pool.v, host), strict=True):
        assert same_bytes(was, tensor)
    assert not pool.counters.any()
    with pytest.raises(ValueError, match="k is torch"):
        store_tokens(pool, 0, k.float(), k, on_device([0, 1]), impl=impl)
    with pytest.raises(ValueError, match="layer=2"):
        store_tokens(pool, 2, k, k, on_device([0, 1]), impl=impl)
