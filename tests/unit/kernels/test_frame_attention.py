# SPDX-License-Identifier: Apache-2.0
"""Attention over frames equals attention over resident KV, to the bit."""

import pytest
import torch
from frame_cases import poison_frames, same_bytes
from kernel_cases import DEVICE, NAN, Batch

from sglang_sparse_kernels import (
    Attend,
    AttendFrames,
    DecodePlan,
    KVScales,
    KVView,
    Lists,
    Stage,
    StepContext,
    decode_step,
    make_workspace,
)
from sglang_sparse_kernels.frames import (
    FoundFrames,
    FrameDemand,
    FramePool,
    begin_step,
    make_host_blocks,
    pin_pages,
)

LENGTHS = [150, 1, 83, 96, 33]
LAYERS = 2

# page size, unit, heads, group, dim, queries' dtype, dtype of KV, lists are mapped
CASES = {
    "pages": (16, 16, 2, 2, 64, torch.bfloat16, None, False),
    "half pages, fp8": (32, 16, 1, 4, 64, torch.bfloat16, torch.float8_e4m3fn, False),
    "tokens, reused lists": (32, 1, 3, 1, 128, torch.float16, None, True),
}


class Tier:
    """A decoding batch whose KV lies on the host, but for each row's last page, beside a resident
    one."""

    def __init__(self, case: tuple, impl: str, spare: int) -> None:
        page_size, unit, heads, group, dim, dtype, kv_dtype, mapped = case
        self.impl = impl
        self.batch = batch = Batch(
            LENGTHS, page_size=page_size, unit=unit, heads=heads, group=group, dim=dim, dtype=dtype,
            kv_dtype=kv_dtype, capacity=3, budget=3 * unit, min_sparse=40, reselect_every=3,
            shared_pages=1, dense_rows=(3,), layers=LAYERS, seed=page_size + dim,
            scales=KVScales(0.5, 2.0) if kv_dtype else KVScales(),
        )  # fmt: skip
        rows, max_pages = len(LENGTHS), batch.max_pages
        demand = FrameDemand(LAYERS, rows, heads, max_pages)
        self.pool = FramePool.allocate(
            demand, pages=batch.num_pages, cached=demand.blocks + spare, pinned_pages=rows,
            page_size=page_size, dim=dim, dtype=batch.k[0].dtype, device=DEVICE,
        )  # fmt: skip
        poison_frames(self.pool)
        self.found = FoundFrames.allocate(
            self.pool, max_rows=rows, max_pages=max_pages, list_units=3, tail_pages=max_pages
        )
        self.host = make_host_blocks(self.pool)
        for layer in range(LAYERS):
            for part, rows_of in enumerate((batch.k[layer], batch.v[layer])):
                blocks = rows_of.view(batch.num_pages, page_size, heads, dim).transpose(1, 2)
                self.host[layer, :, :, part].copy_(blocks)
        self.pin_last_pages()
        self.head_map = None
        if mapped:
            taken = [heads - 1 - head for head in range(heads)]
            self.head_map = torch.tensor(taken, dtype=torch.int32, device=DEVICE)
        self.workspace = make_workspace(rows, heads * group, heads, dim, DEVICE)

    def pin_last_pages(self) -> None:
        """What a request still writes to is not on the host."""
        batch, pool = self.batch, self.pool
        table = batch.plan.page_table
        last = [int(table[row, (n - 1) // batch.page_size]) for row, n in enumerate(LENGTHS)]
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

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of all layers over frames and over resident KV, of random lengths and lists."""
        batch, rows = self.batch, len(LENGTHS)
        rng = torch.Generator().manual_seed(number)
        lengths = [int(torch.randint(1, n + 1, (1,), generator=rng)) for n in LENGTHS]
        batch.seq_lens = torch.tensor(lengths, device=DEVICE)
        plan = DecodePlan.allocate(rows, batch.max_pages, DEVICE)
        batch.fill_plan(plan, batch.seq_lens, "torch")
        batch.plan = plan
        batch.rng = rng
        begin_step(self.pool, impl=self.impl)
        outputs = []
        for layer in range(LAYERS):
            lists = batch.lists(*batch.random_lists(), self.head_map)
            q = torch.randn(batch.q.shape, generator=rng).to(DEVICE, batch.dtype)
            fetched = AttendFrames(self.pool, self.host, layer, self.found, self.workspace)
            nowhere = torch.full_like(batch.k[layer].float(), NAN).to(batch.k[layer].dtype)
            pair = [
                self.attend(fetched, q, lists, nowhere, nowhere),
                self.attend(Attend(self.workspace), q, lists, batch.k[layer], batch.v[layer]),
            ]
            outputs.append(torch.stack(pair))
        got, want = torch.stack(outputs).unbind(1)
        return got, want

    def attend(
        self, stage: Stage, q: torch.Tensor, lists: Lists, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """The output of one stage."""
        batch = self.batch
        out = torch.full_like(q, NAN)
        kv = KVView(k, v, batch.plan.page_table, batch.page_size, batch.scales)
        step = StepContext(q, kv, batch.plan, lists, batch.softmax(), out, self.impl)
        decode_step([stage], step)
        return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("impl", "steps"), [("cpu", 1000), ("triton", 1000 if DEVICE.type == "cuda" else 8)]
)
def test_output_over_frames_equals_the_residents(impl: str, steps: int, case: tuple) -> None:
    tier = Tier(case, impl, spare=7)
    for number in range(steps):
        got, want = tier.step(number)
        assert not want.isnan().any()
        assert same_bytes(got, want), f"step {number}"
    hits, loads, unserved = tier.pool.counters.tolist()
    assert hits > 0
    assert loads > 0
    assert unserved == 0
