# SPDX-License-Identifier: Apache-2.0
"""How long loads take: what is counted, by which clock, and that it compiles for a GPU."""

from pathlib import Path
from random import Random

import pytest
import torch
from frame_cases import compiled_for_absent_gpu, on_device, random_host
from kernel_cases import DEVICE

from sglang_sparse_kernels.device import programs_to_fill
from sglang_sparse_kernels.frames import FoundFrames, FrameDemand, FramePool, load_blocks, reference
from sglang_sparse_kernels.frames.load_kernel import CTAS_PER_SM, load_blocks_triton
from sglang_sparse_kernels.frames.types import NEVER

FRAMES = 8


def make_pool() -> tuple[FramePool, torch.Tensor, FoundFrames]:
    """A pool, host memory, and scratch for up to eight missing blocks."""
    pool = FramePool.allocate(
        FrameDemand(1, 1, 2, 4), pages=8, cached=FRAMES, pinned_pages=1, page_size=16, dim=64,
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    found = FoundFrames.allocate(pool, max_rows=1, max_pages=8, list_units=3, tail_pages=1)
    return pool, random_host(pool), found


def miss(found: FoundFrames, count: int, rng: Random) -> None:
    """A lookup that missed so many blocks."""
    found.missing[:count] = on_device(rng.sample(range(16), count))
    found.victims[:count] = on_device(rng.sample(range(FRAMES), count))
    found.num_missing.fill_(count)


@pytest.mark.parametrize("seed", range(5))
def test_a_load_takes_from_its_first_program_to_its_last(seed: int) -> None:
    rng = Random(seed)
    pool, host, found = make_pool()
    programs, total = programs_to_fill(pool.k.device, CTAS_PER_SM), 0
    for count in (0, 1, rng.randrange(2, 4), 0, FRAMES):
        miss(found, count, rng)
        # Programs of a GPU overlap: one may begin first and end last.
        taking_part = min(programs, count)
        begins = [rng.randrange(2**40) for _ in range(taking_part)]
        ends = [begin + rng.randrange(1, 2**40) for begin in begins]
        readings = [now for pair in zip(begins, ends, strict=True) for now in pair]
        if DEVICE.type == "cuda":
            # Which program reads first is chance, so all read the same.
            readings = [5] * len(readings)
        clock = on_device([0, *readings], torch.int64)
        load_blocks_triton(pool, host, found, clock)
        if taking_part and DEVICE.type == "cpu":
            total += max(ends) - min(begins)
        assert pool.counters.tolist() == [0, 0, 0, total, 0]
        assert int(clock[0]) == 2 * taking_part, "programs without a block read no clock"
        assert pool.timing.tolist() == [NEVER, 0, 0]


@pytest.mark.parametrize("impl", ["torch", "cpu"])
def test_copies_on_the_host_are_timed_there(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, host, found = make_pool()
    readings = iter([1_000, 1_250, 5_000, 5_007])
    monkeypatch.setattr(reference, "perf_counter_ns", lambda: next(readings))
    for count, total in ((2, 250), (0, 250), (1, 257)):
        miss(found, count, Random(count))
        load_blocks(pool, host, found, impl=impl)
        assert pool.counters.tolist() == [0, 0, 0, total, 0]


def test_a_gpu_counts_by_its_own_clock_and_the_interpreter_has_none() -> None:
    pool, host, found = make_pool()
    miss(found, 3, Random(0))
    load_blocks(pool, host, found, impl="triton")
    *others, stalled, flushes = pool.counters.tolist()
    assert [*others, flushes] == [0] * 4
    assert 0 < stalled < 10**9 if DEVICE.type == "cuda" else stalled == 0
    assert pool.timing.tolist() == [NEVER, 0, 0]


# Compiles what a server launches, and prints what the GPU runs.
PROGRAM = """
from sglang_sparse_kernels.frames import load_kernel

run, compiled = load_kernel.load_blocks_kernel.run, []
load_kernel.load_blocks_kernel.run = (
    lambda *a, warmup, **k: compiled.append(run(*a, warmup=True, **k))
)
load_kernel.load_blocks_triton(pool, host, found)
print(compiled[0].asm["ptx"])
"""


def test_a_gpu_reads_its_clock_before_its_loads_and_behind_its_stores(tmp_path: Path) -> None:
    lines = compiled_for_absent_gpu(PROGRAM, tmp_path)
    assert any(".target sm_90" in line for line in lines)
    clock = [i for i, line in enumerate(lines) if "%globaltimer" in line]
    copies = [i for i, line in enumerate(lines) if "ld.global" in line or "st.global" in line]
    barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
    assert len(clock) == 2
    assert copies[0] < clock[0] < copies[1], "only the number of blocks is read before"
    assert copies[-1] < clock[1]
    assert any(copies[-1] < i < clock[1] for i in barriers)
