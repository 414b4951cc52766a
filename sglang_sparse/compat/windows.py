# SPDX-License-Identifier: Apache-2.0
"""SGLang's tree of two pools where streaming heads hold sinks and windows only, in every version.

Seams (``mem_cache/unified_cache/components: SWAComponent``): ``commit_insert_component_data``,
``acquire_component_lock``, ``release_component_lock``, ``_evict_device_start``,
``_evict_device_next_node``, ``prepare_for_caching_req``; (``mem_cache/unified_radix_cache.py:
UnifiedRadixCache``) ``match_prefix``, ``sliding_window_size``; (``mem_cache/
cache_init_params.py: CacheInitParams``) ``component_registry_override``, for which 0.5.23 takes its
core in Python. A version's own module says where a request's floor is, below which none of its
slots leaves a window, and how SGLang releases a window's lock early.

SGLang's rules for windows: a node of the tree holds slots of the window pool or is a *tombstone*,
which holds those of the other pool alone. A prefix matches up to the last place before which a
whole window is held. Under pressure inner nodes become tombstones, the least recently used first,
and leaves go as a whole. Three rules are added for sinks, the first tokens of a path:

1. Nodes end where sinks end, and a node of sinks (a *sink node*) is held as long as it is in the
   tree: it never becomes a tombstone, and goes when it is a leaf.
2. A request locks the sink nodes of its path beside its window.
3. A request gives back nothing of its own sinks.

So a match is right as SGLang finds it: where a window is held, the sinks are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.cache_action import SWARebuild
from sglang.srt.mem_cache.unified_cache.components import (
    BASE_COMPONENT_TYPE,
    ComponentType,
    SWAComponent,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        IncLockRefResult,
        InsertParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class SinkWindowComponent(SWAComponent):
    """SGLang's component of windows, with sinks that are held as long as their node.

    Attributes:
        sink: first tokens of a path, a multiple of the page size.
    """

    _evict_device_cursor: Any
    cache: Any  # the tree below

    def __init__(
        self,
        cache: UnifiedRadixCache,
        params: CacheInitParams,
        *,
        sink: int,
    ) -> None:
        super().__init__(cache, params)
        self.sink = sink
        self._goes_for_sinks = False

    # Rule 1: where nodes end, and which are held.

    def sink_nodes(self, node: Any) -> Iterator[Any]:
        """The sink nodes on the path to ``node``, itself included, from the root on."""
        path = []
        while node is not self.tree_core.root_node:
            path.append(node)
            node = node.parent
        end = 0
        for node in reversed(path):
            if end >= self.sink:
                return
            end += len(node.key)
            yield node

    def _holds_sinks(self, node: Any) -> bool:
        """Whether ``node`` is a sink node."""
        start = 0
        while start < self.sink and node.parent is not self.tree_core.root_node:
            node = node.parent
            start += len(node.key)
        return start < self.sink

    def commit_insert_component_data(
        self,
        node: Any,
        is_new_leaf: bool,
        params: InsertParams,
        result: Any,
        cache_actions: list[Any],
    ) -> None:
        """See `SWAComponent`; a new leaf that begins with sinks is split where they end."""
        sinks = self.sink - result.prefix_len
        if is_new_leaf and sinks > 0:
            # What 0.5.23 notes of the insertion does not depend on the leaf.
            super().commit_insert_component_data(node, False, params, result, cache_actions)
            held = node
            if sinks < len(node.key):
                held, action = self.tree_core._split_node(node.key, node, sinks)
                assert action is None, "a new leaf is not being copied"
            value = held.component_data[BASE_COMPONENT_TYPE].value
            cache_actions.append(SWARebuild(held.id, value))
            if held is node:
                return
            result.prefix_len += sinks
            try:
                super().commit_insert_component_data(
                    node, is_new_leaf, params, result, cache_actions
                )
            finally:
                result.prefix_len -= sinks
            return
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        self._goes_for_sinks = False

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, **actions: Any
    ) -> int | None:
        """See `SWAComponent`; sink nodes go last, each behind everything that builds on it.

        What builds on an unlocked sink node has become tombstones by then, of use to nobody.
        0.5.23 also hands over ``cache_actions``, and wants one tombstone a step.
        """
        lru = self.tree_core.lru_lists[self.component_type]
        while tracker[self.component_type] < self._evict_device_request_cnt:
            node = self._evict_device_cursor
            if node is not None and not lru.in_list(node):
                node = lru.get_lru_no_lock()  # the last leaf took it along
            if node is None:
                if self._goes_for_sinks:
                    return None
                self._goes_for_sinks = True
                node = lru.get_lru_no_lock()
                if node is None:
                    return None
            self._evict_device_cursor = node
            if node not in self.tree_core.evictable_device_leaves and self._holds_sinks(node):
                if self._goes_for_sinks:
                    return int(self._leaf_below(node).id)
                self._evict_device_cursor = lru.get_prev_no_lock(node)
                continue
            self._evict_device_cursor = lru.get_prev_no_lock(node)
            if node in self.tree_core.evictable_device_leaves:
                return int(node.id)
            self._become_tombstone(
                node, tracker, device_frees=device_frees, host_frees=host_frees, **actions
            )
            if actions:
                return None
        return None

    def _become_tombstone(self, node: Any, tracker: Any, **frees: Any) -> None:
        core = self.tree_core
        core._evict_component_and_detach_lru(node, self, tracker=tracker, **frees)
        core._cascade_evict(node, self, tracker, **frees)

    def _leaf_below(self, node: Any) -> Any:
        """A leaf below an unlocked node. Whoever locks a leaf locks the sinks of its path."""
        while node not in self.tree_core.evictable_device_leaves:
            node = next(iter(node.children.values()))
        return node

    # Rule 2: locks.

    def acquire_component_lock(
        self, node: Any, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        result = super().acquire_component_lock(node, result, lock_host)
        for held in self.sink_nodes(node):
            self._count_lock(held, 1)
        return result

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        super().release_component_lock(node, params, lock_host)
        for held in self.sink_nodes(node):
            self._count_lock(held, -1)

    def _count_lock(self, node: Any, change: int) -> None:
        """Add a lock of a sink node, or take one away, beside those of windows."""
        data, kind, core = (
            node.component_data[self.component_type],
            self.component_type,
            self.tree_core,
        )
        before = data.lock_ref
        data.lock_ref += change
        assert data.lock_ref >= 0, f"node {node.id} has no lock to release"
        if min(before, data.lock_ref) == 0:
            core.component_evictable_size_[kind] -= change * len(node.key)
            core.component_protected_size_[kind] += change * len(node.key)
        if data.lock_ref == 0:
            core._update_evictable_leaf_sets(node)

    # What enters the tree.

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """See `SWAComponent`; what was decoded stays out of the tree, as it saw sparse steps."""
        most = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        end: int = self.cache.prompt_end(req)
        return end if most is None else min(most, end)


class WindowRadixCache(UnifiedRadixCache):
    """SGLang's tree of two pools, with sinks.

    Attributes:
        component: class of what holds the windows.
    """

    component: type[SinkWindowComponent] = SinkWindowComponent

    @staticmethod
    @abstractmethod
    def floor_record(req: Req) -> Any:
        """What has the field ``swa_evict_floor`` of a request."""

    @staticmethod
    @abstractmethod
    def prompt_end(req: Req) -> int:
        """Tokens up to which a request's last prefill chunk went."""

    def __init__(self, params: CacheInitParams, *, sink: int) -> None:
        """``params`` are what SGLang's tree takes; ``sink`` tokens begin each path."""
        self._sink = sink
        params.tree_components = (ComponentType.FULL, ComponentType.SWA)

        def component(cache: UnifiedRadixCache, given: CacheInitParams) -> SinkWindowComponent:
            return self.component(cache, given, sink=sink)

        params.component_registry_override = {ComponentType.SWA: component}
        super().__init__(params)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See `UnifiedRadixCache`; rule 3 of the module."""
        if params.req is not None:
            record = self.floor_record(params.req)
            record.swa_evict_floor = max(record.swa_evict_floor, self._sink)
        return super().match_prefix(params)

    def check_planes(self) -> dict[str, int]:
        """See `SparseRadixCache.check_planes`."""
        slots = self.all_values_flatten()
        pages = slots[:: self.page_size] // self.page_size
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        return {"pages": len(pages), "wrong": len(pool.verify_planes(pages))}
