# SPDX-License-Identifier: Apache-2.0
"""What holds after every step of a server's memory side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from radix_parts import asked_for, scheduler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_sparse_kernels.planes import by_page
from sglang_sparse_radix.branches import Branch

if TYPE_CHECKING:
    from radix_harness import MemorySide

# The kinds of sparse attention that dense KV saw.
DENSE_KV: frozenset[object] = frozenset()


def reachable_pages(side: MemorySide) -> dict[int, int]:
    """Physical page -> rows of it that a request or the tree may read."""
    found: dict[int, int] = {}
    for node in tree_nodes(side.tree):
        for page in () if node.evicted else _page_ids(side.page_size, node.value):
            found[page] = side.page_size
    for req in side.live_requests():
        committed = scheduler.committed(req)
        slots = side.requests.req_to_token[scheduler.row(req), :committed]
        for i, page in enumerate(_page_ids(side.page_size, slots)):
            rows = min(side.page_size, committed - i * side.page_size)
            found[page] = max(found.get(page, 0), rows)
    return found


def check_prefix(side: MemorySide, req: Req) -> None:
    """What a request takes over saw nothing that the request would not have seen itself."""
    sparse, slots = asked_for(None, req), scheduler.prefix_slots(req, side.tree)
    seen = DENSE_KV.union(*(side.saw[slot] for slot in slots))
    own = set()
    if sparse.prefill is not None:
        own.add("prefill")
        # Its own prompt is sparse from there on, to the page.
        beyond = (sparse.prefill // side.page_size + 1) * side.page_size
        assert all(side.saw[slot] for slot in slots[beyond:]), "dense KV in a sparse prompt"
    if sparse.decode is not None:
        own.add(("decode", sparse.budget))
    assert seen <= own, f"a request that sees {own} took over KV that saw {seen - own}"
    side.seen["dense prefix"] += bool(slots) and not own
    side.seen["sparse prefix"] += bool(seen)


def check_branches(side: MemorySide) -> None:
    """Dense KV lies on the trunk, KV that saw sparse attention on a branch that begins with it."""
    for node in tree_nodes(side.tree):
        saw = side.seen_by(node)
        if not isinstance(node.key.extra_key, Branch):
            assert not any(saw), "KV that saw sparse attention is in reach of dense requests"
        elif node.parent.key.extra_key != node.key.extra_key:
            side.seen["branch"] += 1
            assert any(saw[: side.page_size]), "dense KV is out of reach of dense requests"


def _page_ids(page_size: int, slots: torch.Tensor) -> list[int]:
    pages = slots[::page_size] // page_size
    offsets = torch.arange(len(slots)) % page_size
    expected = pages.repeat_interleave(page_size)[: len(slots)] * page_size + offsets
    assert torch.equal(slots.long(), expected.long()), "slots do not lie in whole pages"
    return pages.tolist()


def check(side: MemorySide) -> None:
    """Planes equal recomputation, no page is lost or owned twice."""
    reachable = reachable_pages(side)
    assert 0 not in reachable, "the padding page was handed out"
    pages = torch.tensor(list(reachable), dtype=torch.int64)
    rows = torch.tensor(list(reachable.values()), dtype=torch.int64)
    there = side.loaded(pages)
    wrong = side.pool.verify_planes(pages[there], rows[there])
    assert not wrong, f"planes differ from recomputation: {wrong[:4]}"
    for name, plane in side.pool.planes.tensors().items():
        # A run of the sketch holds other pages beside the padding page.
        first = [
            by_page(layer, side.page_size)[0, 0] if name == "key_sketch" else layer[:1]
            for layer in plane
        ]
        assert not any(x.float().isnan().any() for x in first), f"{name} of page 0 holds NaN"
    check_branches(side)
    free = side.allocator.available_size() // side.page_size
    assert free + len(reachable) == side.pool.num_pages - 1, "pages lost or owned twice"


def tree_nodes(tree: object) -> list[object]:
    """All nodes of a radix tree but the root; none for a cache without a tree."""
    if not isinstance(tree, RadixCache):
        return []
    stack = list(tree.root_node.children.values())
    nodes = []
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children.values())
    return nodes
