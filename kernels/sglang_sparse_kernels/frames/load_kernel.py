# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of loading: programs read missing blocks straight from host memory.

Attention is launched as soon as all programs run, goes on beside them, and waits for the pages that
it reads (:func:`.triton_ops.wait_for_pages`). Blocks are loaded in the order of a lookup's entries,
which is that of attention's programs. No program waits for one that has not started.

Programs with a block to copy note when they begin and end. The last one to end adds the time from
the first beginning to the last end to the pool's counters, and clears the notes for the next load.
"""

import torch
import triton
import triton.language as tl

from ..device import programs_to_fill
from ..triton_ops import INTERPRETED, begin_after, overlapping, page_arrived, read_clock
from .types import COUNTERS, NEVER, FoundFrames, FramePool

# Other values were not tried; with these loads reach 48 GB/s on an H200 (notes/frames.md).
CTAS_PER_SM = 2
TILE_WORDS = 2048

STALL = tl.constexpr(COUNTERS.index("stall_nanoseconds"))
UNSET = tl.constexpr(NEVER)


@triton.jit
def load_blocks_kernel(
    host, k, v, missing, victims, num_missing, arriving, counters, timing, clock,
    WORDS: tl.constexpr, BW: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    # WORDS: 4-byte words of the keys of a block; as many of its values follow.
    begin_after()
    o_w = tl.arange(0, BW)
    count = tl.load(num_missing)
    if tl.program_id(0) >= count:
        return
    if TIMED:
        begin = read_clock(clock)
    for i_m in range(tl.program_id(0), count, tl.num_programs(0)):
        i_block = tl.load(missing + i_m).to(tl.int64)
        i_frame = tl.load(victims + i_m).to(tl.int64)
        for i_w in tl.static_range(0, WORDS, BW):
            p_from = host + i_block * (2 * WORDS) + i_w + o_w
            p_to = i_frame * WORDS + i_w + o_w
            b_k, b_v = tl.load(p_from), tl.load(p_from + WORDS)
            tl.store(k + p_to, b_k)
            tl.store(v + p_to, b_v)
        if arriving is not None:
            page_arrived(arriving, i_frame)
    if TIMED:
        # Behind the stores of all threads, which wait for what was loaded.
        tl.debug_barrier()
        end = read_clock(clock)
        tl.atomic_min(timing, begin, sem="relaxed")
        tl.atomic_max(timing + 1, end, sem="relaxed")
        if tl.atomic_add(timing + 2, 1) == tl.minimum(count, tl.num_programs(0)) - 1:
            first = tl.atomic_xchg(timing, UNSET, sem="relaxed")
            last = tl.atomic_xchg(timing + 1, 0, sem="relaxed")
            tl.atomic_xchg(timing + 2, 0, sem="relaxed")
            tl.atomic_add(counters + STALL, last - first, sem="relaxed")


def load_blocks_triton(
    pool: FramePool,
    host: torch.Tensor,
    found: FoundFrames,
    clock: torch.Tensor | None = None,
    *,
    timed: bool = True,
) -> None:
    """Launch :func:`load_blocks_kernel`, a fixed number of programs that share the blocks.

    Args:
        pool, host, found, timed: see :func:`sglang_sparse_kernels.frames.load_blocks`.
        clock: what programs read in place of the GPU's clock, see :func:`read_clock`. Without it,
            the interpreter measures nothing.
    """
    words, k, v = (rows.view(torch.int32) for rows in (host, pool.k, pool.v))
    count = words.shape[-1] * pool.page_size
    load_blocks_kernel[(programs_to_fill(pool.k.device, CTAS_PER_SM),)](
        words, k, v, found.missing, found.victims, found.num_missing, pool.arriving,
        pool.counters, pool.timing, clock,
        WORDS=count, BW=min(count, TILE_WORDS),
        TIMED=timed and (clock is not None or not INTERPRETED.value), **overlapping(0),
    )  # fmt: skip
