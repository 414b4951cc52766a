# SPDX-License-Identifier: Apache-2.0
"""The radix tree of SGLang 0.5.17.

Seams: ``mem_cache/radix_cache.py: RadixCache.cache_unfinished_req``, ``cache_finished_req`` (these
two call ``insert``, and ``match_prefix`` without a request, once each); ``Req.extend_range``, which
holds the last prefill's range while a request decodes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from sglang_sparse_radix.radix_cache import SparseRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


class BranchingRadixCache(SparseRadixCache):
    """`SparseRadixCache` over the tree of 0.5.17."""

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """See `RadixCache`; counts the reused prefix on a row's first call."""
        self._count_reuse(req.req_pool_idx, req.cache_protected_len)
        with self._caching(req, req.extend_range.end):
            super().cache_unfinished_req(req, chunked=chunked)

    def cache_finished_req(
        self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """See `RadixCache`; counts the reused prefix on a row's first call."""
        self._count_reuse(req.req_pool_idx, req.cache_protected_len)
        with self._caching(req, req.extend_range.end) if is_insert else nullcontext():
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)

    def _insert_section(
        self, node: TreeNode, key: RadixKey, start: int, params: InsertParams
    ) -> tuple[int, TreeNode]:
        value = params.value[start : start + len(key)]
        present, last = self._insert_helper(node, key, value, params.priority, params.chunked)
        return present, last

    def _matched(self, values: list[torch.Tensor], node: TreeNode) -> MatchResult:
        empty = self._empty_match_result
        return empty._replace(
            device_indices=torch.cat(values) if values else empty.device_indices,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )
