# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the frame pool."""

from time import perf_counter_ns

import torch

from ..common import put, take
from ..plan import DecodePlan
from ..records import Lists, ListSpan
from .types import COUNTERS, MISSING, FoundFrames, FramePool


def begin_step_reference(pool: FramePool) -> None:
    """See :func:`sglang_sparse_kernels.frames.begin_step`."""
    used = pool.stamp[pool.order.long()] == pool.clock
    pool.order.copy_(torch.cat((pool.order[~used], pool.order[used])))
    pool.clock.add_(1)
    pool.cursor.zero_()


def find_frames_reference(
    pool: FramePool,
    layer: int,
    page_table: torch.Tensor,
    plan: DecodePlan,
    lists: Lists,
    found: FoundFrames,
    span: ListSpan | None,
) -> None:
    """See :func:`sglang_sparse_kernels.frames.find_frames`."""
    rows, heads, cached = plan.num_rows, pool.heads, pool.cached
    mine = found.plan.rows(rows * heads)
    for name in ("seq_lens", "tail_start", "k_units"):
        getattr(mine, name).copy_(getattr(plan, name).repeat_interleave(heads))
    head = torch.arange(heads, device=plan.seq_lens.device)
    mine.request_slots.copy_((plan.request_slots[:, None] * heads + head).flatten())
    list_of = head if lists.head_map is None else lists.head_map.long()
    found.list_rows[: rows * heads] = (
        lists.rows[:, None] * lists.indices.shape[1] + list_of
    ).flatten()

    tail_pages = found.tail_pages if span is None or span.tails else 0
    pages = _pages(plan, lists, list_of, tail_pages, pool.page_size, span)  # [R, H, entries]
    asked = pages >= 0
    physical = page_table.gather(1, pages.clamp(min=0).flatten(1)).view_as(pages)
    blocks = layer * pool.frame_of[0].numel() + physical * heads + head[:, None]
    blocks = torch.where(asked, blocks, -1)
    entries = pages.shape[2]
    found.pages[: rows * heads, :entries] = pages.flatten(0, 1).int()
    found.blocks[: rows * heads, :entries] = blocks.flatten(0, 1).int()

    frame_of = pool.frame_of.view(-1)
    wanted = blocks[asked]
    frames = frame_of[wanted]
    hits = frames[(frames >= 0) & (frames < cached)].unique().long()
    new_hits = hits[pool.stamp[hits] != pool.clock]
    pool.stamp[hits] = pool.clock

    # Missing blocks in the order of their first entries.
    missed = wanted[frames < 0]
    distinct, inverse = missed.unique(return_inverse=True)
    first = torch.full_like(distinct, len(missed)).scatter_reduce_(
        0, inverse, torch.arange(len(missed), device=missed.device), "amin"
    )
    missing = distinct[first.argsort()]
    order = pool.order.long()
    victims = order[pool.stamp[order] != pool.clock][: len(missing)]
    served, unserved = missing[: len(victims)], len(missing) - len(victims)

    evicted = pool.owner[victims].long()
    gone = evicted[(evicted >= 0) & (frame_of[evicted.clamp(min=0)] == victims)]
    frame_of[gone] = MISSING
    frame_of[served] = victims.int()
    pool.owner[victims] = served.int()
    pool.stamp[victims] = pool.clock
    found.missing[: len(served)] = served.int()
    found.victims[: len(served)] = victims.int()
    found.num_missing.fill_(len(served))
    counted = {"hits": len(new_hits), "loads": len(served), "unserved": unserved}
    counts = [counted.get(name, 0) for name in COUNTERS]
    pool.counters.add_(torch.tensor(counts, device=pool.counters.device))

    row_head = torch.arange(rows * heads, device=pages.device).view(rows, heads, 1)
    target = row_head.expand_as(pages)[asked], pages[asked]
    mine.page_table[target] = frame_of[wanted].clamp(min=0)


def _pages(
    plan: DecodePlan, lists: Lists, list_of: torch.Tensor, tail_pages: int, page_size: int,
    span: ListSpan | None,
) -> torch.Tensor:  # fmt: skip
    """Logical pages that each row and KV head reads, -1 for none: int64 [R, H, entries]."""
    tail, length = (t.long()[:, None, None] for t in (plan.tail_start, plan.seq_lens))
    rows = lists.rows.long()[:, None]
    units, counts = lists.indices[rows, list_of].long(), lists.counts[rows, list_of][..., None]
    place = torch.arange(lists.capacity, device=units.device)
    listed = (place < counts) & (place < plan.k_units[:, None, None])
    listed &= (units >= 0) & (units * lists.unit < tail)
    if span is not None:
        listed &= (place >= span.first[..., None]) & (place < span.last[..., None])
    units = torch.where(listed, units * lists.unit // page_size, -1)
    after = tail // page_size + torch.arange(tail_pages, device=units.device)
    after = torch.where(after * page_size < length, after, -1)
    return torch.cat((units, after.expand(-1, len(list_of), -1)), 2)


def load_blocks_reference(
    pool: FramePool, host: torch.Tensor, found: FoundFrames, *, timed: bool
) -> None:
    """See :func:`sglang_sparse_kernels.frames.load_blocks`."""
    count = int(found.num_missing)
    if not count:
        return
    begin = perf_counter_ns()
    blocks, frames = (t[:count].long() for t in (found.missing, found.victims))
    loaded = take(host.view(-1, *host.shape[3:]), (blocks.to(host.device),)).to(pool.k.device)
    for rows, part in ((pool.k, 0), (pool.v, 1)):
        put(rows.view(-1, *host.shape[4:]), (frames,), loaded[:, part])
    if timed:
        pool.counters[COUNTERS.index("stall_nanoseconds")] += perf_counter_ns() - begin


def store_tokens_reference(
    pool: FramePool, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """See :func:`sglang_sparse_kernels.frames.store_tokens`."""
    slots = slots.long()
    frames = pool.frame_of[layer, slots // pool.page_size].long()  # [n, H]
    pinned = frames >= pool.cached
    rows = (frames * pool.page_size + (slots % pool.page_size)[:, None])[pinned]
    for stored, fresh in ((pool.k, k), (pool.v, v)):
        put(stored, (rows, 0), take(fresh, (pinned,)))


def flush_pages_reference(pool: FramePool, host: torch.Tensor, pages: torch.Tensor) -> None:
    """See :func:`sglang_sparse_kernels.frames.flush_pages`."""
    for page in pages[pages >= 0].tolist():
        frames = pool.frame_of[:, page].long()
        pinned = frames >= pool.cached
        pool.counters[COUNTERS.index("flushes")] += pinned.sum()
        for stored, part in ((pool.k, 0), (pool.v, 1)):
            blocks = take(stored.view(-1, *host.shape[4:]), (frames[pinned],))
            layer, head = pinned.nonzero(as_tuple=True)
            put(
                host,
                (layer.to(host.device), page, head.to(host.device), part),
                blocks.to(host.device),
            )


def fill_pages_reference(pool: FramePool, host: torch.Tensor, pages: torch.Tensor) -> None:
    """See :func:`sglang_sparse_kernels.frames.fill_pages`."""
    for page in pages[pages >= 0].tolist():
        frames = pool.frame_of[:, page].long()
        pinned = frames >= pool.cached
        layer, head = pinned.nonzero(as_tuple=True)
        blocks = take(host, (layer.to(host.device), page, head.to(host.device)))
        for rows, part in ((pool.k, 0), (pool.v, 1)):
            fresh = take(blocks, (slice(None), part)).to(rows.device)
            put(rows.view(-1, *host.shape[4:]), (frames[pinned],), fresh)


def copy_blocks_reference(
    host: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, to_host: bool
) -> None:
    """See :func:`sglang_sparse_kernels.frames.read_pages` and ``write_pages``."""
    at, page_size = pages.long().to(host.device), host.shape[3]
    for rows, part in ((k, 0), (v, 1)):
        paged = rows[: len(pages) * page_size].view(-1, page_size, *rows.shape[1:])
        if to_host:
            put(host, (at, slice(None), part), paged.transpose(1, 2).to(host.device))
        else:
            paged.copy_(take(host, (at, slice(None), part)).transpose(1, 2))
