# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.17. Seams of its own (paths under ``sglang/srt``):

``server_args.py: ServerArgs.__post_init__``
    Resolves the flags in the constructor, so a ``ServerArgs`` is always resolved.
``model_executor/runner/decode_cuda_graph_runner.py: DecodeCudaGraphRunner``
    ``_capture_one_stream`` captures every batch size twice, dense and sparse;
    ``_make_graph_key`` picks one at replay, after ``init_forward_metadata_out_graph``.
``layers/attention/flashinfer_backend.py: FlashInferAttnBackend.forward_extend``
    A prompt with a cached prefix attends to it without the layer's KV scales.
``mem_cache/radix_cache.py: RadixCache.cache_unfinished_req``, ``cache_finished_req``
    Where a request's prefix enters the tree; ``Req.req_pool_idx`` is its row.
``mem_cache/hiradix_cache.py: HiRadixCache``, ``managers/cache_controller.py: HiCacheController``
    KV in host memory, see :mod:`.host_tier`.
``mem_cache/pool_host/mha.py: get_mha_host_pool_cls``
    The host's copy of the KV pool, on the CPU: its own is pinned and copied by GPU kernels.
``platforms/interface.py: SRTPlatform.get_mha_kv_pool_cls``, ``get_paged_allocator_cls``
    Pool and allocator on the CPU: its own allocator launches Triton kernels.
``utils/common.py: support_triton``
    PyTorch index writes on the CPU. SGLang avoids Triton there by the backend's name, and does not
    know the name "sparse".
``mem_cache/swa_memory_pool.py: SWAKVPool``, ``mem_cache/unified_radix_cache.py: UnifiedRadixCache``
    Two pools, of which one holds windows, see :mod:`.windows`, :mod:`sglang_sparse.window_pools`.
``distributed/parallel_state.py: init_model_parallel_group``
    It builds NCCL communicators on every platform that is not an NPU or XPU.
``entrypoints/http_server.py: _setup_and_run_http_server``
    It names the application of tokenizer processes to ``uvicorn.run``.
``mem_cache/kv_cache_configurator.py: KVCacheConfigurator._build_oot_mha_kv_pool``
    The KV pool on the CPU, a draft model's too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from sglang_sparse.compat import shared
from sglang_sparse.compat.protocol import Hook

if TYPE_CHECKING:
    from sglang_sparse.graph_variants import Variant
    from sglang_sparse_radix.radix_cache import SparseRadixCache

_SRT = "sglang.srt"
_CPU = "sglang_sparse.compat.v0517.cpu"
_GRAPHS = "sglang_sparse.compat.v0517.graphs"
_RUNNER = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_KV = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_UNIFIED = f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache"
_TREE = f"{_SRT}.mem_cache.radix_cache.RadixCache"
_HOST_TREE = f"{_SRT}.mem_cache.hiradix_cache.HiRadixCache"
_HOST_POOL = f"{_SRT}.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_CONTROLLER = f"{_SRT}.managers.cache_controller.HiCacheController"
_ALLOCATOR = f"{_SRT}.mem_cache.allocator.PagedTokenToKVPoolAllocator"
_PLATFORM = f"{_SRT}.platforms.interface.SRTPlatform"

_APPLICATION = f"{_SRT}.entrypoints.http_server:app"

MARKER = "srt/server_args.py"
SHARES_STATES = True
PLACES_ON_HOST = True
WAITS_FOR_WHOLE_CHUNKS = False
WINDOW_CORES = frozenset({"python"})
READS_KV_SCALES = frozenset({"triton"})
CPU_PLATFORM = f"{_CPU}.CpuPlatform"

HOOKS = (
    *shared.HOOKS,
    Hook(
        f"{_KV}._resolve_memory_pool_config",
        "sglang_sparse.placed_pools:resolve_pool_config",
        "around",
    ),
    Hook(f"{_RUNNER}._capture_one_stream", f"{_GRAPHS}:capture_one_stream", "around"),
    Hook(f"{_RUNNER}._make_graph_key", f"{_GRAPHS}:make_graph_key", "around"),
    Hook(f"{_SRT}.utils.common.support_triton", f"{_CPU}:support_triton", "around"),
    Hook(f"{_KV}._build_oot_mha_kv_pool", f"{_CPU}:build_oot_mha_kv_pool", "around"),
    Hook(
        f"{_SRT}.mem_cache.pool_host.mha.get_mha_host_pool_cls",
        f"{_CPU}:get_mha_host_pool_cls",
        "around",
    ),
    Hook(
        f"{_SRT}.distributed.parallel_state.init_model_parallel_group",
        f"{_CPU}:init_model_parallel_group",
        "around",
    ),
)

SEAMS = (
    *shared.SEAMS,
    f"{_KV}.resolve_max_num_reqs",
    f"{_TREE}.cache_unfinished_req",
    f"{_TREE}.cache_finished_req",
    f"{_HOST_TREE}.__init__",
    f"{_HOST_TREE}.insert",
    f"{_HOST_TREE}.match_prefix",
    f"{_HOST_TREE}._match_prefix_helper",
    f"{_HOST_TREE}._split_node",
    f"{_HOST_TREE}._inc_hit_count",
    f"{_HOST_TREE}._update_host_leaf_status",
    f"{_HOST_TREE}.ready_to_load_host_cache",
    f"{_HOST_TREE}.write_backup",
    f"{_HOST_TREE}.attach_storage_backend",
    f"{_CONTROLLER}.load",
    f"{_CONTROLLER}.start_loading",
    f"{_SRT}.managers.cache_controller.LayerDoneCounter.wait_until",
    f"{_HOST_POOL}.__init__",
    f"{_HOST_POOL}.load_to_device_per_layer",
    f"{_HOST_POOL}.backup_from_device_all_layer",
    f"{_ALLOCATOR}.alloc_extend",
    f"{_ALLOCATOR}.alloc_decode",
    f"{_PLATFORM}.get_mha_kv_pool_cls",
    f"{_PLATFORM}.get_paged_allocator_cls",
    f"{_UNIFIED}.dec_swa_lock_only",
    f"{_SRT}.speculative.eagle_worker_common.prepare_for_draft",
)


def request_row(req: Any) -> int:
    """Row of a scheduled request in SGLang's request table."""
    return int(req.req_pool_idx)


def prefilled(req: Any) -> int:
    """Tokens up to which a request's last prefill chunk went."""
    return int(req.extend_range.end)


def resolved(server_args: Any) -> Any:
    """``server_args`` itself: the constructor resolves."""
    return server_args


def declared_defaults() -> dict[str, Any]:
    """Every field of ``ServerArgs`` with its default; None for one without."""
    from sglang.srt.server_args import ServerArgs

    return {f.name: None if f.default is MISSING else f.default for f in fields(ServerArgs)}


def tree_class() -> type[SparseRadixCache]:
    """SGLang's radix cache with branches and counts of reused planes."""
    from sglang_sparse.compat.v0517.tree import BranchingRadixCache

    return BranchingRadixCache


def hierarchical_tree_class() -> type[SparseRadixCache]:
    """The same over SGLang's hierarchical cache."""
    from sglang_sparse.compat.v0517.host_tier import BranchingHiRadixCache

    return BranchingHiRadixCache


def window_tree_class() -> type[Any]:
    """SGLang's tree of two pools, with sinks."""
    from sglang_sparse.compat.v0517.windows import WindowRadixCache

    return WindowRadixCache


def variant_being_captured() -> Variant:
    """Which decode graph is captured at this moment."""
    from sglang_sparse.compat.v0517 import graphs

    return graphs.capturing


@contextmanager
def workers_application(name: str) -> Iterator[None]:
    """Have uvicorn serve ``name`` where SGLang names its own application.

    Raises:
        RuntimeError: SGLang serves something else.
    """
    import uvicorn

    run = uvicorn.run

    def run_ours(app: Any, **options: Any) -> None:
        if app != _APPLICATION:
            raise RuntimeError(f"uvicorn was to serve {app}, not {_APPLICATION}")
        run(name, **options)

    uvicorn.run = run_ours
    try:
        yield
    finally:
        uvicorn.run = run


def prepare_draft_worker() -> None:
    """Make ``speculative/ngram_worker.py`` and ``eagle_worker_v2.py`` run without accelerators."""
    from sglang_sparse.compat import cpu_speculation

    if not cpu_speculation.provide_kernels():
        return
    from sglang.srt.speculative import eagle_worker_common

    # What it is for SGLang's own CPU engine, and asks in `prepare_for_draft` alone.
    eagle_worker_common._is_cpu = True
    eagle_worker_common.assign_draft_cache_locs_contiguous_cpu = cpu_speculation.draft_slots
