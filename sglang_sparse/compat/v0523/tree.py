# SPDX-License-Identifier: Apache-2.0
"""The radix tree of SGLang 0.5.23: its Python one, which a plugin may subclass.

Seams: ``mem_cache/radix_cache.py: RadixCache.checkpoint`` (it calls ``insert``, again up to the
prompt's end, and ``match_prefix`` without a request), ``free_kv_row``; ``RadixKey.cache_salt``;
``Req.extend_end``, which holds the last prefill's end while a request decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse_radix.radix_cache import SparseRadixCache

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


class BranchingRadixCache(SparseRadixCache):
    """`SparseRadixCache` over the tree of 0.5.23."""

    @staticmethod
    def flags(server_args: Any) -> Any:
        """See `SparseRadixCache`; the record itself holds what was asked."""
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(server_args)

    def checkpoint(self, req: Req, *, up_to: int) -> None:
        """See `RadixCache`; counts the reused prefix on a row's first call."""
        self._count_reuse(req.kv.req_pool_idx, req.kv.cache_protected_len)
        with self._caching(req, req.extend_end):
            super().checkpoint(req, up_to=up_to)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """See `BasePrefixCache`; counts for a request that ends and was never put in the tree."""
        self._count_reuse(kv.req_pool_idx, kv.cache_protected_len)
        super().free_kv_row(kv, ranges)

    def _insert_section(
        self, node: TreeNode, key: RadixKey, start: int, params: InsertParams
    ) -> tuple[int, TreeNode]:
        present, last = self._insert_helper(
            node,
            key,
            params.value[start : start + len(key)],
            params.priority,
            max(0, params.inserted_len - start),
        )
        return present, last

    def _matched(self, values: list[torch.Tensor], node: TreeNode) -> MatchResult:
        return self._empty_match_result._replace(
            device_prefix_len=sum(len(value) for value in values),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )
