# SPDX-License-Identifier: Apache-2.0
"""Where SGLang gets its radix tree: the factory behind `--radix-cache-backend sparse`.

Seams (`sglang/srt/mem_cache/registry.py`, the same from sglang 0.5.17 to 0.5.23):
`register_radix_cache_backend`, `create_tree_cache` (calls the factory, also when the radix cache is
disabled), `default_radix_cache_factory`; `TreeCacheBuildContext.tp_worker`, which is told the
counter that forward passes wait on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import (
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_sparse_kernels.common import FP8
from sglang_sparse_radix.branches import SparseFrom
from sglang_sparse_radix.pool import SparseMHATokenToKVPool
from sglang_sparse_radix.radix_cache import SparseRadixCache
from sglang_sparse_radix.refusals import find_unsupported
from sglang_sparse_radix.state_pool import StateKVPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

BACKEND_NAME = "sparse"
SparseFromRequest = Callable[[Any, Any], SparseFrom]
HierarchicalClass = Callable[[], type[SparseRadixCache] | None]
WindowClass = Callable[[], type[Any]]


def create_sparse_radix_cache(
    ctx: TreeCacheBuildContext,
    *,
    cache_class: type[SparseRadixCache],
    hierarchical_class: HierarchicalClass,
    window_class: WindowClass,
    sparse_from: SparseFromRequest,
) -> BasePrefixCache:
    """Factory of `--radix-cache-backend sparse`, for `registry.py` `create_tree_cache`.

    Args:
        ctx: SGLang's.
        cache_class: the subclass of `SparseRadixCache` for the SGLang that is installed.
        hierarchical_class: gives the same over its hierarchical cache; asked only where that is on.
        window_class: gives the tree of a pool whose streaming heads hold windows; asked only there.
        sparse_from: from where a request of a server attends sparsely.

    Returns:
        The tree; with `--disable-radix-cache` what SGLang itself would build, since planes need
        none; on a pool of state slots, a cache of snapshots.

    Raises:
        ValueError: one line naming the setting, its value, what is allowed and what to do.
    """
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    states = isinstance(pool, StateKVPool)
    problem = find_unsupported(cache_class.flags(ctx.server_args))
    split = getattr(pool, "shape", None) if isinstance(pool, SWAKVPool) else None
    if not states and split is None:
        problem = problem or _unsupported_build(ctx)
    if problem is not None:
        raise ValueError(problem)
    if states and not ctx.disable_radix_cache:
        from sglang_sparse_radix.snapshot_cache import SnapshotCache

        return SnapshotCache(ctx.params, pool.snapshots)
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    of_request = partial(sparse_from, ctx.server_args)
    if split is not None:
        tree: Any = window_class()(ctx.params, sink=split.sink)
        return tree
    if not ctx.enable_hierarchical_cache:
        return cache_class(ctx.params, of_request)
    host_tier = hierarchical_class()
    if host_tier is None:
        raise ValueError(
            "--enable-hierarchical-cache is on: it is not tested on this sglang; allowed: unset; "
            "start without --enable-hierarchical-cache"
        )
    tree = host_tier(ctx.params, of_request, server_args=ctx.server_args)
    tree.forward_stream = ctx.tp_worker.model_runner.forward_stream
    ctx.tp_worker.register_hicache_layer_transfer_counter(tree.cache_controller.layer_done_counter)
    return tree


def register(
    cache_class: type[SparseRadixCache],
    hierarchical_class: HierarchicalClass,
    window_class: WindowClass,
    sparse_from: SparseFromRequest,
) -> None:
    """Register the factory as `"sparse"`; calling it again is harmless.

    Args:
        cache_class, hierarchical_class, window_class: as in `create_sparse_radix_cache`.
        sparse_from: from where a request attends sparsely, by `ServerArgs` and `Req`.

    Raises:
        ValueError: the name is taken by someone else.
    """
    factory = partial(
        create_sparse_radix_cache,
        cache_class=cache_class,
        hierarchical_class=hierarchical_class,
        window_class=window_class,
        sparse_from=sparse_from,
    )
    known = get_radix_cache_factory(BACKEND_NAME)
    if getattr(known, "keywords", None) != factory.keywords:
        register_radix_cache_backend(BACKEND_NAME, factory)


def _unsupported_build(ctx: TreeCacheBuildContext) -> str | None:
    kinds = {
        "hybrid sliding-window": ctx.is_hybrid_swa,
        "hybrid state-space": ctx.is_hybrid_ssm,
        "DeepSeek sparse attention": ctx.is_dsa,
    }
    for kind, found in kinds.items():
        if found:
            return (
                f"--model-path is a {kind} model; the sparse KV planes allow full-attention MHA "
                "and GQA models; serve it without --attention-backend sparse"
            )
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    if not isinstance(pool, SparseMHATokenToKVPool):
        return (
            f"--radix-cache-backend {BACKEND_NAME} got the KV pool {type(pool).__name__}; allowed: "
            f"{SparseMHATokenToKVPool.__name__}; start with --attention-backend sparse"
        )
    if ctx.enable_hierarchical_cache and pool.dtype == FP8:
        return (
            "--kv-cache-dtype is 'auto', which this checkpoint makes fp8_e4m3: quantized KV is not "
            "tested in host memory; allowed: bf16 or bfloat16; start with --kv-cache-dtype "
            "bfloat16, or without --enable-hierarchical-cache"
        )
    if ctx.params.page_size != pool.page_size:
        return (
            f"--page-size is {pool.page_size} in the KV pool but {ctx.params.page_size} in the "
            "radix cache; they must be equal; start without context parallelism"
        )
    try:
        pool.plane_spec.validate_page_size(ctx.params.page_size)
    except ValueError as error:
        return str(error)
    return None
