# SPDX-License-Identifier: Apache-2.0
"""What the scheduler of SGLang 0.5.23 does to requests, tree and pools."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, release_req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

ALLOCATOR = PagedTokenToKVPoolAllocator  # of the CPU platform
CONTEXT: dict[str, object] = {}
DISABLED_TREE = "UnifiedRadixCache"
CONFIGURATOR: dict[str, object] = {"kv_shard_rank": None}  # fields of `KVCacheConfigurator`
OTHER_FIELDS: set[str] = {
    "enable_prefill_context_parallel"
}  # flags that rules name for other versions
TREE_SWITCHES: tuple[str, ...] = ()


def row(req: Req) -> int | None:
    return req.kv.req_pool_idx


def committed(req: Req) -> int:
    """Tokens whose KV is written."""
    return req.kv.kv_committed_len


def commit(req: Req, tokens: int) -> None:
    """Note that the KV of so many further tokens is written."""
    req.kv.kv_committed_len += tokens


def prefix(req: Req) -> int:
    """Tokens before this round's."""
    return req.prefix_len


def prefix_slots(req: Req, tree: Any) -> list[int]:
    """KV slots of the prefix that a request matched."""
    slots: list[int] = tree.path_device_indices(req.last_node)[: req.prefix_len].tolist()
    return slots


def set_extend(req: Req, end: int) -> None:
    req.extend_end = end


def extend_end(req: Req) -> int:
    return req.extend_end


def lock(req: Req, tree: Any) -> None:
    req.lock = tree.lock(req.last_node)


def unlock(req: Req, tree: Any) -> None:
    tree.unlock(req.lock)
    req.lock = None


def checkpoint(req: Req, tree: Any, *, chunked: bool) -> None:
    """Put what the running request has computed in the tree."""
    checkpoint_kv_cache(req, tree)


def release(req: Req, tree: Any, *, insert: bool) -> None:
    release_kv_cache(req, tree, checkpoint=insert)


def release_to_wait(req: Req, batch: ScheduleBatch) -> None:
    """Release a running request's memory, so that it is recomputed."""
    release_req(
        req=req,
        remaing_req_count=len(batch.reqs) - 1,
        req_to_token_pool=batch.req_to_token_pool,
        token_to_kv_pool_allocator=batch.token_to_kv_pool_allocator,
        tree_cache=batch.tree_cache,
        hisparse_coordinator=None,
    )


def retract(batch: ScheduleBatch) -> tuple[list[Req], list[Req]]:
    """Retract for want of memory; who waits again, and who is aborted."""
    retracted, _, aborted = batch.retract_decode()
    return retracted, aborted


def leave_out(batch: ScheduleBatch, req: Req | None) -> None:
    """Take finished requests, and the one whose prompt goes on, out of the batch."""
    batch.filter_batch(reqs_to_exclude=[] if req is None else [req])
