# SPDX-License-Identifier: Apache-2.0
"""Replacement in a pool of frames in plain Python, and blocks of KV that can be told apart."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from absent_gpu import environment
from kernel_cases import DEVICE

from sglang_sparse_kernels.frames import FramePool, make_host_blocks


@dataclass
class Oracle:
    """Least recently used frames make room, never those that this step uses.

    Attributes:
        frames: cached ones.
        held: the block in each frame.
        order: frames, the least recently used first.
        used: frames that this step has used.
        pinned: the frame of each pinned block.
    """

    frames: int
    held: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    pinned: dict[int, int] = field(default_factory=dict)
    hits: int = 0
    loads: int = 0

    def __post_init__(self) -> None:
        self.order = list(range(self.frames))

    def begin_step(self) -> None:
        """Frames of the step before are now the most recently used."""
        idle = [frame for frame in self.order if frame not in self.used]
        self.order = idle + [frame for frame in self.order if frame in self.used]
        self.used = set()

    def frame_of(self, block: int) -> int | None:
        """Where a block lies."""
        if block in self.pinned:
            return self.pinned[block]
        return next((frame for frame, held in self.held.items() if held == block), None)

    def look_up(self, asked: list[int]) -> list[tuple[int, int]]:
        """Give each block that is asked for a frame; what was loaded, in order."""
        for block in asked:
            frame = self.frame_of(block)
            if frame is not None and block not in self.pinned and frame not in self.used:
                self.used.add(frame)
                self.hits += 1
        loaded = []
        for block in asked:
            if self.frame_of(block) is None:
                frame = next(one for one in self.order if one not in self.used)
                self.used.add(frame)
                self.held[frame] = block
                loaded.append((block, frame))
        self.loads += len(loaded)
        return loaded

    def release(self, blocks: list[int]) -> None:
        """Forget blocks."""
        for block in blocks:
            self.pinned.pop(block, None)
            self.held = {frame: held for frame, held in self.held.items() if held != block}


def write_blocks(host: torch.Tensor, pages: list[int], version: int) -> None:
    """Fill blocks of ``pages`` with random bytes; numbers, NaN and infinities are among them."""
    rng = torch.Generator().manual_seed(version)
    shape = (host.shape[0], len(pages), *host.view(torch.uint8).shape[2:])
    fresh = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    host.view(torch.uint8)[:, pages] = fresh


def random_host(pool: FramePool) -> torch.Tensor:
    """Host memory whose blocks differ."""
    host = make_host_blocks(pool)
    write_blocks(host, list(range(host.shape[1])), 0)
    return host


def poison_frames(pool: FramePool) -> None:
    """Frames and scratch that nobody wrote are NaN."""
    for rows in (pool.k, pool.v):
        if rows.dtype == torch.float8_e4m3fn:
            rows.view(torch.uint8).fill_(0x7F)
        else:
            rows.fill_(float("nan"))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN included, once kernels wrote host memory."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return torch.equal(*(t.contiguous().cpu().view(torch.uint8) for t in (one, other)))


def frame_bytes(pool: FramePool, frame: int) -> torch.Tensor:
    """Keys and values of a frame: [2, P, D]."""
    rows = slice(frame * pool.page_size, (frame + 1) * pool.page_size)
    return torch.stack((pool.k.view(torch.uint8)[rows, 0], pool.v.view(torch.uint8)[rows, 0]))


def on_device(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor of Python numbers."""
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def steps_of(triton: int, **pytorch: int) -> list[tuple[str, int]]:
    """Each ``impl`` whose outputs are equal to the bit, and how many random steps it is to take.

    On a GPU these are the kernels alone: bits of PyTorch's products there depend on the number of
    rows.
    """
    return [("triton", 1000)] if DEVICE.type == "cuda" else [*pytorch.items(), ("triton", triton)]


# A pool, scratch and host memory, in a process that compiles for a GPU and launches nothing.
_ABSENT = """
import torch
from absent_gpu import compile_for_absent_gpu
from sglang_sparse_kernels.frames import FoundFrames, FrameDemand, FramePool

compile_for_absent_gpu()
pool = FramePool.allocate(
    FrameDemand(1, 1, 2, 4), pages=8, cached=8, pinned_pages=1, page_size=16, dim=64,
    dtype=torch.bfloat16, device="cpu",
)
found = FoundFrames.allocate(pool, max_rows=1, max_pages=8, list_units=3, tail_pages=1)
host = torch.empty((1, 8, 2, 2, 16, 64), dtype=torch.bfloat16)
"""


def compiled_for_absent_gpu(program: str, folder: Path) -> list[str]:
    """Lines that ``program`` prints, which has ``pool``, ``found`` and ``host``."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _ABSENT + program], check=False, capture_output=True, text=True,
        env=os.environ | environment(folder)
        | {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
