# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of what writes pinned frames, and of copies between them and the host."""

import torch
import triton
import triton.language as tl

from .load_kernel import TILE_WORDS
from .types import COUNTERS, FramePool

FLUSHES = tl.constexpr(COUNTERS.index("flushes"))


@triton.jit
def store_tokens_kernel(
    new_k, new_v, slots, k, v, frame_of, stride_k, stride_v, cached, first_block,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.arange(0, D)
    slot = tl.load(slots + i_n).to(tl.int32)
    frame = tl.load(frame_of + first_block + slot // PAGE * H + i_h)
    m_d = (o_d < D) & (frame >= cached)
    o_to = (frame.to(tl.int64) * PAGE + slot % PAGE) * D + o_d
    b_k = tl.load(new_k + i_n * stride_k + i_h * D + o_d)
    b_v = tl.load(new_v + i_n * stride_v + i_h * D + o_d)
    tl.store(k + o_to, b_k, mask=m_d)
    tl.store(v + o_to, b_v, mask=m_d)


@triton.jit
def flush_pages_kernel(
    host, k, v, pages, frame_of, counters, cached, num_pages,
    H: tl.constexpr, WORDS: tl.constexpr, BW: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    page, i_l, i_h = tl.load(pages + tl.program_id(0)), tl.program_id(1), tl.program_id(2)
    i_block = (i_l.to(tl.int64) * num_pages + tl.maximum(page, 0)) * H + i_h
    frame = tl.load(frame_of + i_block)
    o_w = tl.arange(0, BW)
    pinned = (page >= 0) & (frame >= cached)
    m_w = (o_w < WORDS) & pinned
    if not FILL:
        tl.atomic_add(counters + FLUSHES, 1, mask=pinned, sem="relaxed")
    for i_w in tl.static_range(0, WORDS, BW):
        p_host = host + i_block * (2 * WORDS) + i_w + o_w
        o_f = frame.to(tl.int64) * WORDS + i_w + o_w
        if FILL:
            tl.store(k + o_f, tl.load(p_host, mask=m_w), mask=m_w)
            tl.store(v + o_f, tl.load(p_host + WORDS, mask=m_w), mask=m_w)
        else:
            tl.store(p_host, tl.load(k + o_f, mask=m_w), mask=m_w)
            tl.store(p_host + WORDS, tl.load(v + o_f, mask=m_w), mask=m_w)


def store_tokens_triton(
    pool: FramePool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Launch :func:`store_tokens_kernel`, one program a token and KV head."""
    store_tokens_kernel[(k.shape[0], pool.heads)](
        k, v, slots, pool.k, pool.v, pool.frame_of, k.stride(0), v.stride(0), pool.cached,
        layer * pool.frame_of[0].numel(), H=pool.heads, D=k.shape[2], PAGE=pool.page_size,
        num_warps=1,
    )  # fmt: skip


def flush_pages_triton(pool: FramePool, host: torch.Tensor, pages: torch.Tensor) -> None:
    """Launch :func:`flush_pages_kernel`, one program a block."""
    _between(pool, host, pages, fill=False)


def fill_pages_triton(pool: FramePool, host: torch.Tensor, pages: torch.Tensor) -> None:
    """Launch :func:`flush_pages_kernel` the other way, one program a block."""
    _between(pool, host, pages, fill=True)


def _between(pool: FramePool, host: torch.Tensor, pages: torch.Tensor, *, fill: bool) -> None:
    words, k, v = (rows.view(torch.int32) for rows in (host, pool.k, pool.v))
    layers, num_pages, heads = pool.frame_of.shape
    count = words.shape[-1] * pool.page_size
    flush_pages_kernel[(pages.shape[0], layers, heads)](
        words, k, v, pages, pool.frame_of, pool.counters, pool.cached, num_pages,
        H=heads, WORDS=count, BW=min(count, TILE_WORDS), FILL=fill,
    )  # fmt: skip
