# SPDX-License-Identifier: Apache-2.0
"""Attention beside the launch that loads what it reads: it waits for that, and for nothing else."""

from pathlib import Path
from threading import Thread

import pytest
import torch
from frame_cases import compiled_for_absent_gpu, on_device
from kernel_cases import DEVICE, NAN

from sglang_sparse_kernels import (
    DecodePlan,
    KVView,
    Lists,
    Softmax,
    gathered_decode_attention,
    make_workspace,
)

P, DIM, UNITS, PAGES = 16, 64, 6, 9
LONG = 60  # seconds


class Attending:
    """Attention over one row's list and tail, in a thread of its own."""

    def __init__(self, arriving: torch.Tensor | None) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.k, self.v = (torch.randn((PAGES * P, 1, DIM), generator=numbers) for _ in range(2))
        self.k, self.v = self.k.half().to(DEVICE), self.v.half().to(DEVICE)
        self.q = torch.randn((1, 4, DIM), generator=numbers).half().to(DEVICE)
        self.plan = DecodePlan.allocate(1, PAGES, DEVICE)
        self.plan.page_table.copy_(on_device([[5, 3, 8, 1, 7, 2, 6, 4, 0]]))
        self.plan.seq_lens.fill_(8 * P + 3)
        self.plan.tail_start.fill_(8 * P)
        self.plan.k_units.fill_(UNITS)
        # Logical page 6 is on no list.
        indices = on_device([[[0, 1, 3, 4, 5, 7]]])
        self.lists = Lists(indices, on_device([[UNITS]]), on_device([0]), P)
        self.arriving = arriving
        self.out = torch.full_like(self.q, NAN)
        self.thread = Thread(target=self.run, daemon=True)

    def run(self) -> None:
        kv = KVView(self.k, self.v, self.plan.page_table, P, arriving=self.arriving)
        gathered_decode_attention(
            self.q, kv, self.plan, self.lists, softmax=Softmax(0.125), out=self.out,
            workspace=make_workspace(1, 4, 1, DIM, DEVICE), impl="triton",
        )  # fmt: skip


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's launches are not threads of the host")
def test_attention_waits_for_the_pages_that_it_reads_and_for_no_others() -> None:
    resident = Attending(None)
    resident.run()
    arriving = torch.zeros(PAGES, dtype=torch.int32)
    arriving[6] = 1  # logical page 6
    beside = Attending(arriving)
    beside.run()
    assert torch.equal(beside.out, resident.out)

    # Physical page 7 is unit 4; its rows are NaN until it has arrived.
    arriving[7] = 1
    waiting = Attending(arriving)
    rows = slice(7 * P, 8 * P)
    loaded = waiting.k[rows].clone(), waiting.v[rows].clone()
    waiting.k[rows] = waiting.v[rows] = NAN
    waiting.thread.start()
    waiting.thread.join(1)
    assert waiting.thread.is_alive()
    waiting.k[rows], waiting.v[rows] = loaded
    arriving[7] = 0
    waiting.thread.join(LONG)
    assert not waiting.thread.is_alive()
    assert torch.equal(waiting.out, resident.out)


# Compiles what a server launches, and prints what the GPU runs.
PROGRAM = """
from sglang_sparse_kernels import KVScales, Lists, Softmax
from sglang_sparse_kernels.attend import kernel as attend
from sglang_sparse_kernels.frames import load_kernel, lookup_kernel
from sglang_sparse_kernels.plan import DecodePlan

plan = DecodePlan.allocate(1, 8, "cpu")
lists = Lists(
    torch.zeros((1, 2, 3), dtype=torch.int32), torch.zeros((1, 2), dtype=torch.int32),
    torch.zeros(1, dtype=torch.int32), 16,
)
for kernel in (lookup_kernel.settle_kernel, load_kernel.load_blocks_kernel,
               attend.attend_split_kernel):
    def compiled(*a, warmup, run=kernel.run, name=kernel.__name__, **k):
        print(f"kernel {name} {k.get('launch_pdl')}")
        print(run(*a, warmup=True, **k).asm["ptx"])
    kernel.run = compiled
for kernel in (lookup_kernel.bid_kernel, lookup_kernel.claim_kernel, attend.merge_splits_kernel):
    kernel.run = lambda *a, warmup, run=kernel.run, **k: run(*a, warmup=True, **k)
lookup_kernel.find_frames_triton(pool, 0, plan.page_table, plan, lists, found, None)
load_kernel.load_blocks_triton(pool, host, found)
q = torch.zeros((2, 4, 64), dtype=torch.bfloat16)
attend.gathered_decode_attention_triton(
    q, found.kv(pool, 1, KVScales()), found.rows(pool, 1), found.lists(pool, 1, lists),
    softmax=Softmax(1.0), out=q, workspace=torch.zeros(100000), queries=1,
)
"""


def test_on_a_gpu_attention_starts_beside_the_load_and_ends_behind_it(tmp_path: Path) -> None:
    """The order of what launches say to one another, in the code that a Hopper GPU runs."""
    code: dict[str, list[str]] = {}
    for line in compiled_for_absent_gpu(PROGRAM, tmp_path):
        if line.startswith("kernel "):
            _, name, early = line.split()
            assert early == "True", f"{name} does not start before its predecessor ends"
        code.setdefault(name, []).append(line)

    def where(name: str, what: str) -> list[int]:
        return [i for i, line in enumerate(code[name]) if what in line]

    wait, start = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    # The load lets attention start when all before it is written, and sends word behind its stores.
    load = "load_blocks_kernel"
    assert where(load, wait)[0] < where(load, start)[0] < where(load, "ld.global")[0]
    stores, word = where(load, "st.global"), where(load, "release.exch")
    assert len(word) == 1
    assert stores[-1] < word[0]
    assert any(stores[-1] < i < word[0] for i in where(load, "bar.sync"))
    # Attention waits for pages before it copies rows, and for the load as a whole at its end.
    attend = "attend_split_kernel"
    rows = where(attend, "cp.async.cg")
    assert rows
    assert where(attend, start)[0] < where(attend, "ld.acquire.gpu")[0] < rows[0]
    assert where(attend, wait)[0] > where(attend, "st.global")[-1]
    # The lookup waits before anything else.
    settle = "settle_kernel"
    assert where(settle, wait)[0] < where(settle, "ld.global")[0]
