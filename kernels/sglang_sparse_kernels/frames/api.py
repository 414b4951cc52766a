# SPDX-License-Identifier: Apache-2.0
"""Public functions of the frame pool: validate, then dispatch to the implementation asked for."""

import torch

from ..common import (
    IMPLS,
    Impl,
    check_choice,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
)
from ..plan import DecodePlan
from ..records import Lists, ListSpan
from .reference import (
    begin_step_reference,
    copy_blocks_reference,
    fill_pages_reference,
    find_frames_reference,
    flush_pages_reference,
    load_blocks_reference,
    store_tokens_reference,
)
from .types import MISSING, FoundFrames, FramePool


def begin_step(pool: FramePool, *, impl: Impl) -> None:
    """Begin a decode step: put the frames in the order of their recency.

    Frames that the step before used move behind all others. Both parts keep their order. All shapes
    are fixed and nothing waits for the device, so a CUDA graph may hold it.

    Args:
        pool: changed in place.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``.
    """
    check_choice("impl", impl, IMPLS)
    if impl == "torch":
        begin_step_reference(pool)
        return
    used = pool.stamp[pool.order] == pool.clock
    idle, last = (~used).cumsum(0), used.cumsum(0)
    place = torch.where(used, idle[-1] + last, idle) - 1
    pool.order.scatter_(0, place, pool.order.clone())
    pool.clock.add_(1)
    pool.cursor.zero_()


def find_frames(
    pool: FramePool, layer: int, page_table: torch.Tensor, plan: DecodePlan, lists: Lists, *,
    found: FoundFrames, impl: Impl, span: ListSpan | None = None,
) -> None:  # fmt: skip
    """Find a frame for each block that attention of one layer reads (PSA, section 3.4).

    KV head h of row r reads the pages of the units on its list that begin below tail_start, as
    attention does, and those of its tail. A block without a frame gets the least recently used one
    that this step has not used: in the order of their first entries, counted by row, KV head and
    place in the list. The next launch has to load it (:func:`load_blocks`), and the one behind that
    to attend: its kernels wait until it is loaded, without end if it never is. No frame is given to
    two blocks, and none is taken from a block that the step has looked up, in this layer or in one
    before. That always succeeds, since a pool has :attr:`FrameDemand.blocks` frames.

    With a ``span`` a layer may be looked up in several calls, each of which takes a part of the
    lists. What a call found stays where it is to the end of the step. The first call has to take
    the tails.

    Where blocks lie and what is counted is the same for every ``impl``, run after run.

    Args:
        pool: changed in place.
        layer: of the pool's layers.
        page_table: int32 [R, max_pages], physical page of each logical page of a row.
        plan: R rows, one query each; a tail has at most ``found.tail_pages`` pages.
        lists: without windows.
        found: written: what to load, and where attention finds it.
        impl: "triton", "cpu" or "torch".
        span: the part of the lists that is looked up; None for all, with the tails.

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a batch that does not fit.
    """
    check_choice("impl", impl, IMPLS)
    _check_layer(pool, layer)
    check_dtype("page_table", page_table, torch.int32)
    found.check(pool, page_table, plan, lists)
    if span is not None:
        span.check(plan.num_rows, pool.heads)
    if impl != "triton":
        find_frames_reference(pool, layer, page_table, plan, lists, found, span)
        return
    from .lookup_kernel import find_frames_triton

    find_frames_triton(pool, layer, page_table, plan, lists, found, span)


def load_blocks(
    pool: FramePool, host: torch.Tensor, found: FoundFrames, *, impl: Impl, timed: bool = True
) -> None:
    """Copy the blocks that the last lookup missed from host memory to their frames.

    Args:
        pool: its frames and counters are written.
        host: [layers, pages, H, 2, P, D], contiguous, pinned where the pool is on a GPU
            (:func:`make_host_blocks`). Kernels read it in place.
        found: of the lookup.
        impl: "triton", "cpu" or "torch".
        timed: how long it takes is added to the pool's counters (:data:`COUNTERS`).

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, memory that is not pinned.
    """
    check_choice("impl", impl, IMPLS)
    pool.check_host(host)
    if impl != "triton":
        load_blocks_reference(pool, host, found, timed=timed)
        return
    from .load_kernel import load_blocks_triton

    load_blocks_triton(pool, host, found, timed=timed)


def store_tokens(
    pool: FramePool,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    impl: Impl,
) -> None:
    """Write the keys and values of new tokens of a layer to the pinned frames of their pages.

    Tokens of pages that are not pinned are not written, as those of padding rows.

    Args:
        pool: its pinned frames are written.
        layer: of the pool's layers.
        k, v: [n, H, D] in the pool's dtype, any stride between rows.
        slots: int32 or int64 [n], distinct KV slots; slot s is row ``s % P`` of page ``s // P``.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    _check_pages("slots", slots)
    _check_layer(pool, layer)
    for name, rows in {"k": k, "v": v}.items():
        check_shape(name, rows, (slots.shape[0], pool.heads, pool.k.shape[2]))
        check_dtype(name, rows, pool.k.dtype)
        check_dense_rows(name, rows)
    if impl != "triton":
        store_tokens_reference(pool, layer, k, v, slots)
        return
    from .store_kernel import store_tokens_triton

    store_tokens_triton(pool, layer, k, v, slots)


def flush_pages(pool: FramePool, host: torch.Tensor, pages: torch.Tensor, *, impl: Impl) -> None:
    """Copy the blocks of pinned pages to host memory, of all layers and KV heads.

    They stay pinned until they are released. Pages that are not pinned are left out.

    Args:
        pool: read, but for its counters (:data:`COUNTERS`).
        host: as for :func:`load_blocks`; written.
        pages: int32 or int64 [n], distinct physical pages, or negative for none.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, memory that is not pinned.
    """
    check_choice("impl", impl, IMPLS)
    _check_pages("pages", pages)
    pool.check_host(host)
    if impl != "triton":
        flush_pages_reference(pool, host, pages)
        return
    from .store_kernel import flush_pages_triton

    flush_pages_triton(pool, host, pages)


def fill_pages(pool: FramePool, host: torch.Tensor, pages: torch.Tensor, *, impl: Impl) -> None:
    """Copy the blocks of pinned pages from host memory: the inverse of :func:`flush_pages`.

    Args:
        pool: its pinned frames are written.
        host: as for :func:`load_blocks`.
        pages: int32 or int64 [n], distinct physical pages, or negative for none. Pages that are not
            pinned are left out.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, memory that is not pinned.
    """
    check_choice("impl", impl, IMPLS)
    _check_pages("pages", pages)
    pool.check_host(host)
    if impl != "triton":
        fill_pages_reference(pool, host, pages)
        return
    from .store_kernel import fill_pages_triton

    fill_pages_triton(pool, host, pages)


def read_pages(
    host: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, impl: Impl
) -> None:
    """Copy pages of a layer from host memory to rows: page ``pages[i]`` to rows from ``i * P`` on.

    Args:
        host: [pages, H, 2, P, D], contiguous, one layer of :func:`make_host_blocks`, pinned where
            ``k`` is on a GPU.
        pages: int32 or int64 [n], physical pages.
        k, v: [rows, H, D] in the dtype of ``host``, contiguous, with at least ``n * P`` rows;
            written.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, memory that is not pinned.
    """
    _copy_blocks(host, pages, k, v, to_host=False, impl=impl)


def write_pages(
    host: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, impl: Impl
) -> None:
    """Copy rows to pages of a layer in host memory: the inverse of :func:`read_pages`.

    Args:
        host: as for :func:`read_pages`; written.
        pages: int32 or int64 [n], distinct physical pages.
        k, v: as for :func:`read_pages`; read.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, memory that is not pinned.
    """
    _copy_blocks(host, pages, k, v, to_host=True, impl=impl)


def _copy_blocks(
    host: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, to_host: bool,
    impl: Impl,
) -> None:  # fmt: skip
    check_choice("impl", impl, IMPLS)
    _check_pages("pages", pages)
    check_shape("host", host, (-1, -1, 2, -1, -1))
    check_contiguous("host", host)
    _, heads, _, page_size, dim = host.shape
    for name, rows in {"k": k, "v": v}.items():
        check_shape(name, rows, (-1, heads, dim))
        check_dtype(name, rows, host.dtype)
        check_contiguous(name, rows)
        if rows.shape[0] < pages.shape[0] * page_size:
            raise ValueError(
                f"{name} has {rows.shape[0]} rows, fewer than {pages.shape[0]} pages of {page_size}"
            )
    if k.is_cuda and not host.is_pinned():
        raise ValueError("host must be pinned memory")
    if not pages.shape[0]:
        return
    if impl != "triton":
        copy_blocks_reference(host, pages, k, v, to_host=to_host)
        return
    from .page_kernel import copy_blocks_triton

    copy_blocks_triton(host, pages, k, v, to_host=to_host)


def release_pages(pool: FramePool, pages: torch.Tensor) -> None:
    """Forget where the blocks of ``pages`` lie, because they lie elsewhere or hold other KV now.

    Their frames are reused when their turn comes.

    Args:
        pool: changed in place.
        pages: int32 or int64 [n], physical pages, or negative for none. With a negative one among
            them, page 0 is kept or released as chance has it.

    Raises:
        ValueError: on a wrong dtype or shape.
    """
    _check_pages("pages", pages)
    at = pages.long().clamp(min=0)
    kept = torch.where((pages < 0)[:, None], pool.frame_of[:, at], MISSING)
    pool.frame_of.index_copy_(1, at, kept)


def pin_pages(pool: FramePool, pages: torch.Tensor, places: torch.Tensor) -> None:
    """Let blocks of ``pages`` lie in pinned frames until they are released or pinned elsewhere.

    Block (l, p, h) of page ``p = pages[i]`` then lies in frame
    ``cached + (places[i] * layers + l) * H + h``.

    Args:
        pool: changed in place.
        pages: int32 or int64 [n], distinct physical pages.
        places: int32 or int64 [n], distinct, below the pool's ``pinned_pages``.

    Raises:
        ValueError: on a wrong dtype or shape.
    """
    _check_pages("pages", pages)
    _check_pages("places", places)
    check_shape("places", places, tuple(pages.shape))
    layers, _, heads = pool.frame_of.shape
    blocks = torch.arange(layers * heads, dtype=torch.int32, device=pages.device)
    frames = pool.cached + places.int()[:, None] * (layers * heads) + blocks
    pool.frame_of[:, pages.long()] = frames.view(-1, layers, heads).transpose(0, 1)


def _check_pages(name: str, pages: torch.Tensor) -> None:
    check_shape(name, pages, (-1,))
    check_dtype(name, pages, torch.int32, torch.int64)
    check_contiguous(name, pages)


def _check_layer(pool: FramePool, layer: int) -> None:
    if not 0 <= layer < pool.frame_of.shape[0]:
        raise ValueError(f"layer={layer} is none of the pool's {pool.frame_of.shape[0]}")
