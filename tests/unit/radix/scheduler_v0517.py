# SPDX-License-Identifier: Apache-2.0
"""What the scheduler of SGLang 0.5.17 does to requests, tree and pools."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, release_req
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
from sglang.srt.mem_cache.common import maybe_cache_unfinished_req, release_kv_cache
from sglang.srt.runtime_context import get_server_args

from sglang_sparse_radix.allocator import TorchPagedTokenToKVPoolAllocator

ALLOCATOR = TorchPagedTokenToKVPoolAllocator  # of the CPU platform
CONTEXT = {"effective_chunked_prefill_size": 512}
DISABLED_TREE = "ChunkCache"
CONFIGURATOR: dict[str, object] = {}  # fields of `KVCacheConfigurator`
OTHER_FIELDS: set[str] = {
    "attn_dp_size",
    "enable_kv_cache_sharding",
    "enable_pd_role_switch",
    "enable_unified_cache_external_linker",
    "speculative_draft_kv_cache_dtype",
    "speculative_use_block_verification",
}  # flags that rules name for other versions
TREE_SWITCHES: tuple[str, ...] = (
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE",
)


def row(req: Req) -> int | None:
    return req.req_pool_idx


def committed(req: Req) -> int:
    """Tokens whose KV is written."""
    return req.kv_committed_len


def commit(req: Req, tokens: int) -> None:
    """Note that the KV of so many further tokens is written."""
    req.kv_committed_len += tokens


def prefix(req: Req) -> int:
    """Tokens before this round's."""
    return len(req.prefix_indices)


def prefix_slots(req: Req, tree: Any) -> list[int]:
    """KV slots of the prefix that a request matched."""
    slots: list[int] = req.prefix_indices.tolist()
    return slots


def set_extend(req: Req, end: int) -> None:
    req.set_extend_range(prefix(req), end)


def extend_end(req: Req) -> int:
    return req.extend_range.end


def lock(req: Req, tree: Any) -> None:
    result = tree.inc_lock_ref(req.last_node)
    if tree.supports_swa():
        req.swa_uuid_for_lock, req.skip_lock_node_ids = result.swa_uuid_for_lock, {}


def unlock(req: Req, tree: Any) -> None:
    tree.dec_lock_ref(req.last_node, DecLockRefParams(swa_uuid_for_lock=req.swa_uuid_for_lock))


def checkpoint(req: Req, tree: Any, *, chunked: bool) -> None:
    """Put what the running request has computed in the tree."""
    maybe_cache_unfinished_req(req, tree, chunked=chunked)


def release(req: Req, tree: Any, *, insert: bool) -> None:
    release_kv_cache(req, tree, is_insert=insert)


def release_to_wait(req: Req, batch: ScheduleBatch) -> None:
    """Release a running request's memory, so that it is recomputed."""
    release_req(
        req=req,
        remaing_req_count=len(batch.reqs) - 1,
        server_args=get_server_args(),
        req_to_token_pool=batch.req_to_token_pool,
        token_to_kv_pool_allocator=batch.token_to_kv_pool_allocator,
        tree_cache=batch.tree_cache,
        hisparse_coordinator=None,
    )


def retract(batch: ScheduleBatch) -> tuple[list[Req], list[Req]]:
    """Retract for want of memory; who waits again, and who is aborted."""
    retracted, _, aborted = batch.retract_decode(get_server_args())
    return retracted, aborted


def leave_out(batch: ScheduleBatch, req: Req | None) -> None:
    """Take finished requests, and the one whose prompt goes on, out of the batch."""
    batch.filter_batch(chunked_req_to_exclude=req)
