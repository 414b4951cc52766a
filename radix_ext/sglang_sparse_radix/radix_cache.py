# SPDX-License-Identifier: Apache-2.0
"""SGLang's radix tree, kept in step with the KV planes.

Seams (under `sglang/srt/mem_cache/`, the same from sglang 0.5.17 to 0.5.23):
  `radix_cache.py`: `RadixCache.reset`, `match_prefix`, `insert`, `_insert_helper`,
      `_match_prefix_helper`, `_split_node`; `RadixKey.child_key`, which takes
      any hashable extra key, `__getitem__`, `page_aligned`, `maybe_to_bigram_view`
  `../managers/schedule_batch.py`: `Req.extra_key`, `Req.last_node`
The function that puts a request's KV into the tree differs between versions, and the subclasses in
`sglang_sparse.compat` override it. It calls `insert`, and `match_prefix` without a request.

Invariant 1: for every page reachable from a running request or from the tree, each plane equals
recomputation from the KV rows now in that page. Planes are indexed by the physical page, and a
page's rows and planes are written by one forward pass (`SparseMHATokenToKVPool.update_planes`).
What remains to show is that no tree operation changes the rows of a reachable page, or makes a page
reachable whose planes were not computed:

  insert: stores the page ids of a request's whole pages. Their rows were written, and their planes
      updated, by forward passes already queued on the stream, so every later reader is ordered
      behind both. The partly filled last page stays with the request, which alone writes it.
  insert of a duplicate: the request's copy is freed, and its row of `req_to_token` rewritten to
      the tree's pages. Those were right before and are not written again: the row's next token
      lies behind them.
  match: reads only, and splits.
  split: divides a node's list of page ids at a page boundary. No page changes hands.
  evict: frees the pages of an unlocked leaf, which no request reaches. A freed page is reachable
      again only once it is handed out, and its new owner rewrites an entry whenever it writes a row
      that the entry covers: min and max from the first row of the logical page, the sketch token by
      token. What the earlier owner left is thus never read.
  finish, abort, retraction: free what the tree did not take. Retraction (`is_insert=False`) leaves
      the shared prefix to the tree; the rest is recomputed in pages allocated anew.
  reset (`/flush_cache`): drops the tree and clears the allocator. No page is reachable.
  write to the host, eviction to it: K and V are copied, a page of the device is freed. A node that
      is on the host alone has no page.
  load from the host: its pages are allocated, written by the load, and their planes computed in the
      prefill that the load was started for (`host_loads`), before anybody decodes on them.

So planes are never copied, moved or invalidated here. What the tree adds are counts of the prefix
tokens whose planes a request reused, and invariant 2.

Invariant 2: a request's prefix holds only KV that it could have computed itself: KV that saw dense
attention alone, or sparse attention of the request's own way. `branches` says how: KV that saw
sparse attention lies on branches of the tree that a dense request does not look at. Nothing else
changes. A node on a branch is an ordinary node, so locks, eviction and sizes are SGLang's own. A
node keeps its key while its KV is on the host, and with it its branch.

Under EAGLE, keys are SGLang's pairs: that of position i is its token and the next one, since a
draft model's KV of position i follows from both. A key then has one entry less than it has tokens.
Entry i is the KV slot of position i, as with single tokens, so branches and pages are counted
alike. Keys are cut by their own slices, and no code here looks at their tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_sparse_radix.branches import (
    DENSE,
    ExtraKey,
    Section,
    SparseFrom,
    allowed,
    sections,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


@dataclass(slots=True)
class PlaneReuse:
    """Monotonic counts since start; they survive `/flush_cache`.

    A prefill counts once each time a request gets a row. It counts again after a retraction, but
    not for further chunks. Tokens count when the prefill ran, not when the scheduler looked up the
    prefix.

    Attributes:
        prefills: prefills counted.
        prefills_with_reuse: those whose prefix was at least partly in the tree.
        tokens: prefix tokens whose K, V and planes were taken from the tree.
        pages: the same in physical pages.
        recomputed_pages: pages that came back from the host, whose planes were computed anew.
    """

    prefills: int = 0
    prefills_with_reuse: int = 0
    tokens: int = 0
    pages: int = 0
    recomputed_pages: int = 0


class SparseRadixCache(RadixCache):
    """`RadixCache` with branches for KV that saw sparse attention, and `PlaneReuse` counts.

    A subclass for each version of SGLang says where KV enters it.

    Attributes:
        plane_reuse: counts, for metrics to read.
    """

    plane_reuse: PlaneReuse

    def __init__(
        self, params: CacheInitParams, sparse_from: Callable[[Req], SparseFrom], **build: Any
    ) -> None:
        """Takes what SGLang's tree takes, and a rule that says where a request is sparse."""
        self.plane_reuse = PlaneReuse()
        self._sparse_from = sparse_from
        # The path of the request whose KV is being cached.
        self._path: list[Section] | None = None
        self._counted_generation: dict[int, int] = {}
        super().__init__(params, **build)

    def check_planes(self) -> dict[str, int]:
        """Compare the planes of every page in the tree with recomputation, for tests.

        Returns:
            `pages` compared, and `wrong`: the (layer, page, plane) that differ. It copies to the
            host and takes seconds: do not call it while requests are served.
        """
        slots = self._slots_on_device()
        pages = slots[:: self.page_size] // self.page_size
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        return {"pages": len(pages), "wrong": len(pool.verify_planes(pages))}

    def _slots_on_device(self) -> torch.Tensor:
        """KV slots of all nodes, int64 `[n * P]`, in whole pages; not of those on the host."""
        device = self.token_to_kv_pool_allocator.device
        slots = [torch.empty(0, dtype=torch.int64, device=device)]
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            if not node.evicted:
                slots.append(node.value)
            stack.extend(node.children.values())
        return torch.cat(slots)

    def reset(self) -> None:
        """Drop the tree; the caller clears the allocator (`/flush_cache`)."""
        # Clearing the request pool restarts its generation counts.
        self._counted_generation.clear()
        super().reset()

    @staticmethod
    def flags(server_args: Any) -> Any:
        """The server's flags as they were resolved, readable by name."""
        return server_args

    def _insert_section(
        self, node: TreeNode, key: RadixKey, start: int, params: InsertParams
    ) -> tuple[int, TreeNode]:
        """Put the section of `params` that begins at `start` below `node`.

        Returns:
            How many of its tokens the tree already held, and the node that it ends on.
        """
        raise NotImplementedError

    def _matched(self, values: list[torch.Tensor], node: TreeNode) -> MatchResult:
        """SGLang's record of a match that ends on `node`; `values` are the slots of its path."""
        raise NotImplementedError

    @contextmanager
    def _caching(self, req: Req, prefilled: int) -> Iterator[None]:
        """Let `insert` and `match_prefix` follow the path of `req`'s own KV.

        Args:
            req: the request whose KV is put into the tree.
            prefilled: tokens that had been prefilled when its last prefill ended; later tokens were
                decoded.
        """
        matched: Counter[ExtraKey] = Counter()
        node = req.last_node
        while node is not None and node is not self.root_node:
            matched[node.key.extra_key] += len(node.key)
            node = node.parent
        self._path = sections(
            self._sparse_from(req),
            req.extra_key,
            matched=matched,
            prefilled=prefilled,
            page_size=self.page_size,
        )
        try:
            yield
        finally:
            self._path = None

    def _cut(self, key: RadixKey) -> Iterator[tuple[int, int, RadixKey]]:
        """(start, end, key) of each section of the path that is being cached."""
        assert self._path is not None, "only a request's own KV is put into the tree"
        key, start = self._whole_pages(key), 0
        for section in self._path:
            end = min(section.end, len(key))
            if end > start:
                yield start, end, _on_branch(key, section.extra_key)[start:end]
                start = end

    def _whole_pages(self, key: RadixKey) -> RadixKey:
        """`key` in whole pages, as pairs of tokens where the tree holds these."""
        pairs, _ = key.maybe_to_bigram_view(self.is_eagle)
        return pairs.page_aligned(self.page_size)

    def insert(self, params: InsertParams) -> InsertResult:
        """See `RadixCache`; KV that saw sparse attention goes to branches of its own."""
        prefix, node = 0, self.root_node
        for start, _, key in self._cut(params.key):
            # All behind newly inserted tokens is new, so the tokens already held are one prefix.
            present, node = self._insert_section(node, key, start, params)
            prefix += present
        return InsertResult(prefix_len=prefix, last_device_node=node)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix that the request may take over; see `RadixCache`.

        Without a request it follows the path that is being cached; if there is none, dense KV.
        """
        values: list[torch.Tensor] = []
        node = self.root_node
        if self._path is not None:
            for _, _, key in self._cut(params.key):
                found, node = self._match_prefix_helper(node, key)
                values += found
        else:
            sparse = DENSE if params.req is None else self._sparse_from(params.req)
            branches = allowed(sparse, params.key.extra_key, self.page_size)
            path, end = self._longest(node, self._whole_pages(params.key), 0, branches)
            now = node.last_access_time = time.monotonic()
            for node in path:
                node.last_access_time = now
                if len(node.key) > end:
                    node = self._split_node(node.key, node, end)
                end -= len(node.key)
                if not node.evicted:  # else it is on the host
                    values.append(node.value)
        return self._matched(values, node)

    def _longest(
        self, node: TreeNode, key: RadixKey, start: int, branches: Sequence[Section]
    ) -> tuple[list[TreeNode], int]:
        """The longest path of `key[start:]` below `node`; at equal lengths, the first branch's.

        Returns:
            Its nodes, of which the last may hold more than `key`, and the position that it reaches.
        """
        here, *later = branches
        path, end = self._follow(node, key, start, here)
        best = path, end
        for index, parent in enumerate([node, *path] if later else []):
            # Branches begin where nodes end; the last node may go on behind `end`.
            start += len(parent.key) if index else 0
            if start > end:
                break
            found, reached = self._longest(parent, key, start, later)
            if reached > best[1]:
                best = [*path[:index], *found], reached
        return best

    def _follow(
        self, node: TreeNode, key: RadixKey, start: int, branch: Section
    ) -> tuple[list[TreeNode], int]:
        """`_longest` on one branch alone."""
        path: list[TreeNode] = []
        key = _on_branch(key, branch.extra_key)
        limit = min(branch.end, len(key))
        while start < limit:
            page = key[start : start + self.page_size]
            child: Any = node.children.get(page.child_key(self.page_size))
            if child is None:
                break
            remainder = key[start : min(start + len(child.key), limit)]
            matched = child.key.match(remainder, page_size=self.page_size)
            path.append(child)
            start += matched
            if matched < len(child.key):
                break
            node = child
        return path, start

    def _count_reuse(self, row: int, reused: int) -> None:
        """Count a prefill, once for each owner of a row.

        Args:
            row: the request's row of `req_to_token`.
            reused: tokens that the tree protects. Until the row's first insert they are what the
                request matched.
        """
        generation = int(self.req_to_token_pool.req_generation[row])
        if self._counted_generation.get(row) == generation:
            return
        self._counted_generation[row] = generation
        self.plane_reuse.prefills += 1
        self.plane_reuse.prefills_with_reuse += reused > 0
        self.plane_reuse.tokens += reused
        self.plane_reuse.pages += reused // self.page_size


def _on_branch(key: RadixKey, extra_key: ExtraKey) -> RadixKey:
    """`key` with another extra key, and all else that this SGLang keeps in it."""
    moved = copy(key)
    moved.extra_key = extra_key
    return moved
