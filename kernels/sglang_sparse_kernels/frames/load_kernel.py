# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of loading: programs read missing blocks straight from host memory."""

import torch
import triton
import triton.language as tl

from ..device import programs_to_fill
from .types import FoundFrames, FramePool

# Not measured on a GPU yet.
CTAS_PER_SM = 2
TILE_WORDS = 2048


@triton.jit
def load_blocks_kernel(
    host, k, v, missing, victims, num_missing, WORDS: tl.constexpr, BW: tl.constexpr
):
    # WORDS: 4-byte words of the keys of a block; as many of its values follow.
    o_w = tl.arange(0, BW)
    for i_m in range(tl.program_id(0), tl.load(num_missing), tl.num_programs(0)):
        i_block = tl.load(missing + i_m).to(tl.int64)
        i_frame = tl.load(victims + i_m).to(tl.int64)
        for i_w in tl.static_range(0, WORDS, BW):
            p_from = host + i_block * (2 * WORDS) + i_w + o_w
            p_to = i_frame * WORDS + i_w + o_w
            b_k, b_v = tl.load(p_from), tl.load(p_from + WORDS)
            tl.store(k + p_to, b_k)
            tl.store(v + p_to, b_v)


def load_blocks_triton(pool: FramePool, host: torch.Tensor, found: FoundFrames) -> None:
    """Launch :func:`load_blocks_kernel`, a fixed number of programs that share the blocks."""
    words, k, v = (rows.view(torch.int32) for rows in (host, pool.k, pool.v))
    count = words.shape[-1] * pool.page_size
    load_blocks_kernel[(programs_to_fill(pool.k.device, CTAS_PER_SM),)](
        words, k, v, found.missing, found.victims, found.num_missing,
        WORDS=count, BW=min(count, TILE_WORDS),
    )  # fmt: skip
