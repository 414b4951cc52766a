# SPDX-License-Identifier: Apache-2.0
"""Whole pages between host memory, rows on the device and pinned frames."""

import pytest
import torch
from frame_cases import on_device, poison_frames, random_host, same_bytes
from kernel_cases import DEVICE

from sglang_sparse_kernels.frames import (
    COUNTERS,
    FoundFrames,
    FrameDemand,
    FramePool,
    fill_pages,
    flush_pages,
    pin_pages,
    read_pages,
    release_pages,
    write_pages,
)
from sglang_sparse_kernels.frames.types import MISSING

PAGES, LAYERS = 7, 2
IMPLS = ("torch", "cpu", "triton")
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


def make_pool(dtype: torch.dtype, heads: int, page_size: int, dim: int = 64) -> FramePool:
    pool = FramePool.allocate(
        FrameDemand(LAYERS, 1, heads, 2), pages=PAGES, cached=LAYERS * heads * 2, pinned_pages=2,
        page_size=page_size, dim=dim, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    poison_frames(pool)
    return pool


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "page_size", "dim"), [(1, 16, 64), (3, 32, 128)])
def test_pages_go_to_rows_and_back(impl, dtype, heads, page_size, dim):
    host = random_host(make_pool(dtype, heads, page_size, dim))
    before, pages = host.clone(), on_device([5, 0, 3])
    rows = torch.full((4 * page_size, heads, dim), float("nan"), device=DEVICE).to(dtype)
    k, v = rows.clone(), rows.clone()
    read_pages(host[1], pages, k, v, impl=impl)
    for got, part in ((k, 0), (v, 1)):
        paged = got.view(torch.uint8)[: 3 * page_size].view(3, page_size, heads, -1)
        want = host.view(torch.uint8)[1][pages.long().cpu(), :, part].transpose(1, 2)
        assert same_bytes(paged, want)
        # What lies behind is left alone.
        assert same_bytes(got[3 * page_size :], rows[3 * page_size :])
    target = on_device([2, 6, 4], torch.int64)
    write_pages(host[0], target, k, v, impl=impl)
    want = before.view(torch.uint8).clone()
    want[0, target.cpu()] = before.view(torch.uint8)[1, pages.long().cpu()]
    assert same_bytes(host.view(torch.uint8), want)
    write_pages(host[0], target[:0], k, v, impl=impl)
    assert same_bytes(host.view(torch.uint8), want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pinned_pages_are_filled_from_the_host_and_others_are_not(impl, dtype):
    pool = make_pool(dtype, 3, 16)
    host = random_host(pool)
    before = host.clone()
    pin_pages(pool, on_device([4]), on_device([1]))
    frames = [tensor.clone() for tensor in (pool.k, pool.v)]
    fill_pages(pool, host, on_device([-1, 4, 2]), impl=impl)
    first = (pool.cached + LAYERS * 3) * 16
    for was, now, part in zip(frames, (pool.k, pool.v), (0, 1), strict=True):
        assert same_bytes(was[:first], now[:first])
        got = now.view(torch.uint8)[first:].view(LAYERS, 3, 16, -1)
        assert same_bytes(got, host.view(torch.uint8)[:, 4, :, part])
    # A page that was filled is flushed as it was.
    host[:, 4].view(torch.uint8).zero_()
    assert not pool.counters.any()
    flush_pages(pool, host, on_device([2, 4, -1]), impl=impl)
    assert same_bytes(host, before)
    assert dict(zip(COUNTERS, pool.counters.tolist(), strict=True))["flushes"] == LAYERS * 3


def test_pages_are_released_and_negative_ones_are_none():
    pool = make_pool(torch.bfloat16, 2, 16)
    pin_pages(pool, on_device([1, 3]), on_device([0, 1]))
    kept = pool.frame_of[:, 1].clone()
    release_pages(pool, on_device([-1, 3, -1]))
    assert torch.equal(pool.frame_of[:, 1], kept)
    assert (pool.frame_of[:, 3] == MISSING).all()
    assert (pool.frame_of[:, -1] == MISSING).all()


def test_rows_and_blocks_that_do_not_fit_are_refused():
    host = random_host(make_pool(torch.bfloat16, 2, 16))
    k = torch.zeros((16, 2, 64), dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="fewer than 2 pages of 16"):
        read_pages(host[0], on_device([1, 2]), k, k, impl="torch")
    with pytest.raises(ValueError, match=r"k is torch\.float16"):
        write_pages(host[0], on_device([1]), k.half(), k, impl="torch")
    with pytest.raises(ValueError, match="host has shape"):
        write_pages(host, on_device([1]), k, k, impl="torch")


def test_lists_and_tails_that_never_come_together_need_fewer_frames():
    pool = make_pool(torch.bfloat16, 2, 16)  # for 2 pages a row
    sizes = {"max_rows": 1, "max_pages": 5, "list_units": 2, "tail_pages": 2}
    with pytest.raises(ValueError, match="1 rows that read 4 pages are more than"):
        FoundFrames.allocate(pool, **sizes)
    with pytest.raises(ValueError, match="1 rows that read 3 pages are more than"):
        FoundFrames.allocate(pool, **sizes, row_pages=3)
    found = FoundFrames.allocate(pool, **sizes, row_pages=2)
    assert (found.list_units, found.tail_pages) == (2, 2)
    # What it takes is known before it is made.
    assert FoundFrames.of_rows(1 * 2, 5, 2, 2, "meta").nbytes == found.nbytes
