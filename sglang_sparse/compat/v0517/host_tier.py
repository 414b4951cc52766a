# SPDX-License-Identifier: Apache-2.0
"""The radix tree of SGLang 0.5.17 with KV in host memory (``--enable-hierarchical-cache``).

A node's KV is on the device, on the host, or on both. Its key stays as it is, and so does its
branch. Seams (under ``sglang/srt``):

``mem_cache/hiradix_cache.py: HiRadixCache``
    ``insert`` is a loop from the root, and of one extra key: :meth:`._insert_section` is the same
    below any node. ``ready_to_load_host_cache`` starts the loads of a prefill batch that is made;
    ``attach_storage_backend`` is asked over HTTP.
``managers/cache_controller.py: HiCacheController.load_queue``, ``load_stream``, ``write_stream``
    Loads that were asked for and not started yet; the streams that copies run on. Both wait for the
    scheduler's stream alone. Later versions let loads wait for ``ModelRunner.forward_stream``
    (``model_executor/model_runner.py``), too.
``mem_cache/base_prefix_cache.py: MatchResult``
    ``last_device_node`` is the last one with KV on the device, ``last_host_node`` with KV on the
    host; ``host_hit_length`` counts what is to be loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_sparse.compat.v0517.tree import BranchingRadixCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixKey


class BranchingHiRadixCache(BranchingRadixCache, HiRadixCache):
    """`HiRadixCache` with branches for KV that saw sparse attention, and `PlaneReuse` counts.

    Attributes:
        forward_stream: that of the forward passes. With the overlap scheduler a step is in flight
            when a request ends: it has yet to write the last of the KV that enters the tree, and
            writes to pages that are freed. So copies to and from the host go behind it.
    """

    forward_stream: Any

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """See `HiRadixCache`; waits for the step in flight."""
        self.cache_controller.write_stream.wait_stream(self.forward_stream)
        written: int = super().write_backup(node, write_back=write_back)
        return written

    def ready_to_load_host_cache(self) -> int:
        """See `HiRadixCache`; the pool is told what is loaded, so that planes are computed."""
        queue = self.cache_controller.load_queue
        slots = [operation.device_indices for operation in queue]
        if slots:
            self.cache_controller.load_stream.wait_stream(self.forward_stream)
        consumer: int = super().ready_to_load_host_cache()
        if slots:
            loaded = torch.cat(slots)
            self.kv_cache.loads.expect(consumer, loaded)
            self.plane_reuse.recomputed_pages += len(loaded) // self.page_size
        return consumer

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Refused: a storage backend names KV by its tokens alone, and forgets branches."""
        return False, (
            "a storage backend names KV by tokens alone, so sparse KV would come back as a dense "
            "request's; serve without --attention-backend sparse"
        )

    def check_planes(self) -> dict[str, int]:
        """See `SparseRadixCache`; waits for batches in flight: the tree has their loads already."""
        torch.get_device_module(self.device).synchronize()
        return super().check_planes()

    def _slots_on_device(self) -> torch.Tensor:
        """See `SparseRadixCache`; without pages whose load was not started yet."""
        slots = super()._slots_on_device()
        waiting = [operation.device_indices for operation in self.cache_controller.load_queue]
        return slots[~torch.isin(slots, torch.cat(waiting))] if waiting else slots

    def _insert_section(
        self, node: TreeNode, key: RadixKey, start: int, params: InsertParams
    ) -> tuple[int, TreeNode]:
        value = params.value[start : start + len(key)]
        priority = params.priority or 0
        there = 0
        while len(key):
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                return there, self._add_leaf(node, key, value, params)
            child.last_access_time = time.monotonic()
            matched = child.key.match(key, page_size=self.page_size)
            if matched < len(child.key):
                child = self._split_node(child.key, child, matched)
            child.priority = max(child.priority, priority)
            if child.evicted:
                # Computed anew: the request's own pages become the node's.
                self._put_on_device(child, value[:matched])
            else:
                self._inc_hit_count(child, params.chunked)
                there += matched
            node, key, value = child, key[matched:], value[matched:]
        return there, node

    def _put_on_device(self, node: TreeNode, value: torch.Tensor) -> None:
        node.value = value.clone()
        self.evictable_size_ += len(value)
        self._update_leaf_status(node)
        self._update_host_leaf_status(node)
        self._update_leaf_status(node.parent)

    def _add_leaf(
        self, parent: TreeNode, key: RadixKey, value: torch.Tensor, params: InsertParams
    ) -> TreeNode:
        leaf = TreeNode(priority=params.priority or 0)
        leaf.parent, leaf.key, leaf.value = parent, key, value.clone()
        parent.children[key.child_key(self.page_size)] = leaf
        self.evictable_size_ += len(value)
        self._update_leaf_status(parent)
        self._update_leaf_status(leaf)
        self._record_store_event(leaf)
        self._inc_hit_count(leaf, params.chunked)
        return leaf

    def _matched(self, values: list[torch.Tensor], node: TreeNode) -> MatchResult:
        on_device, to_load = node, 0
        while on_device.evicted:
            to_load += len(on_device.host_value)
            on_device = on_device.parent
        on_host = node
        while not on_host.backuped:
            on_host = on_host.parent
        return (
            super()
            ._matched(values, on_device)
            ._replace(last_host_node=on_host, best_match_node=on_host, host_hit_length=to_load)
        )
