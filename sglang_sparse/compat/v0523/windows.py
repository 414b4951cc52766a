# SPDX-License-Identifier: Apache-2.0
"""The tree of SGLang 0.5.23 where streaming heads hold sinks and windows only.

Seams beside those of :mod:`sglang_sparse.compat.windows`: (``mem_cache/unified_cache/
unified_tree_core.py: UnifiedTreeCore``) ``_insert_overlap_step``; (``mem_cache/
unified_radix_cache.py: UnifiedRadixCache``) ``release_swa_prefix_lock``; (``managers/
schedule_batch.py: ReqKvInfo.swa_dead_lo``) ``swa_evict_floor``; (``mem_cache/unified_cache/
tree_core_registry.py``) ``_rust_fallback_reason``: components of our own take the core in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV

from sglang_sparse.compat.windows import SinkWindowComponent as SharedComponent
from sglang_sparse.compat.windows import WindowRadixCache as SharedTree

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams


class SinkWindowComponent(SharedComponent):
    """See :class:`sglang_sparse.compat.windows.SinkWindowComponent`."""

    def update_component_on_insert_overlap(
        self,
        node: Any,
        prefix_len: int,
        total_prefix_len: int,
        value_slice: torch.Tensor,
        params: InsertParams,
        result: Any,
        cache_actions: list[Any],
    ) -> int:
        """See `SWAComponent`; gives back a request's sinks where the tree holds others.

        SGLang takes all that lies before what left a request's window as gone, and its sinks, too.
        """
        if total_prefix_len >= self.sink:
            unused: int = super().update_component_on_insert_overlap(
                node, prefix_len, total_prefix_len, value_slice, params, result, cache_actions
            )
            return unused
        own = min(max(0, params.prev_prefix_len - total_prefix_len), prefix_len)
        if own < prefix_len:
            cache_actions.append(FreeDeviceKV([value_slice[own:]]))
        return own


class WindowRadixCache(SharedTree):
    """SGLang's tree of two pools, with sinks."""

    component = SinkWindowComponent

    @staticmethod
    def floor_record(req: Req) -> Any:
        """What a request holds of the pools."""
        return req.kv

    @staticmethod
    def prompt_end(req: Req) -> int:
        """See `WindowRadixCache`."""
        return int(req.extend_end)

    @property
    def release_swa_prefix_lock(self) -> Any:
        """Not there: SGLang asks for it to release a window early, and would release the sinks."""
        raise AttributeError("release_swa_prefix_lock")
