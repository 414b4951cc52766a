# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.23. Seams of its own (paths under ``sglang/srt``):

``server_args.py: ServerArgs.resolve_once``, ``arg_groups/overrides.py: resolving_view``
    A ``ServerArgs`` is a record of what was asked; resolved values are read through a view.
``layers/attention/graph_variants.py: create_attention_graph_variants``
    SGLang's own variants of a decode graph: ours are dense and sparse.
    ``model_executor/runner/decode_cuda_graph_runner.py:
    DecodeCudaGraphRunner._resolve_attention_variant`` picks one for a batch.
    ``model_executor/runner_utils/capture_mode.py: get_capture_attention_variant`` tells which one
    is captured.
``mem_cache/radix_cache.py: RadixCache.checkpoint``
    Where a request's prefix enters the tree; ``Req.kv.req_pool_idx`` is its row, and a row that
    was freed is the next to be handed out.
``layers/attention/flashinfer_backend.py: FlashInferAttnBackend.forward_extend``
    A cached prefix is read by the layer's KV scales, as it is in decoding.
``mem_cache/memory_pool.py: MHATokenToKVPool._create_buffers``
    K and V of a layer are halves of one tensor.
``mem_cache/unified_radix_cache.py``, ``swa_memory_pool.py``
    Two pools, of which one holds windows, see :mod:`.windows`, :mod:`sglang_sparse.window_pools`.
    ``prefill_budget.py: SWAPrefillBudget.check_prefill`` lets a prompt wait for a chunk's room.
``environ.py: SGLANG_HTTP_SERVER_APP_PATH``
    The application of tokenizer processes.
``platforms/interface.py: PlatformCapabilities``
    On a CPU it neither launches Triton kernels nor builds NCCL communicators.
    ``interface.py: SRTPlatform.supports_speculative_algorithm`` says what drafts are served there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_sparse.compat import shared
from sglang_sparse.compat.protocol import Hook

if TYPE_CHECKING:
    from sglang_sparse.graph_variants import Variant
    from sglang_sparse_radix.radix_cache import SparseRadixCache

_SRT = "sglang.srt"
_CPU_SPECULATION = "sglang_sparse.compat.cpu_speculation"
_GRAPHS = "sglang_sparse.compat.v0523.graphs"
_RUNNER = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_TREE = f"{_SRT}.mem_cache.radix_cache.RadixCache"

MARKER = "srt/layers/attention/graph_variants.py"
SHARES_STATES = False
PLACES_ON_HOST = False
WAITS_FOR_WHOLE_CHUNKS = True
WINDOW_CORES = frozenset({"python", "rust"})  # SGLang leaves "rust" for components of ours
READS_KV_SCALES = frozenset({"flashinfer", "triton"})
CPU_PLATFORM = "sglang_sparse.native_cpu.NativeCpuPlatform"

HOOKS = (
    *shared.HOOKS,
    Hook(
        "sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
        f"{_CPU_SPECULATION}:draft_window",
        "around",
    ),
    Hook(
        f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        f"{_CPU_SPECULATION}:prepare_copies",
        "around",
    ),
    Hook(
        f"{_SRT}.layers.attention.graph_variants.create_attention_graph_variants",
        f"{_GRAPHS}:create_attention_graph_variants",
        "around",
    ),
    Hook(f"{_RUNNER}._resolve_attention_variant", f"{_GRAPHS}:resolve_attention_variant", "around"),
)

SEAMS = (
    *shared.SEAMS,
    f"{_SRT}.server_args.ServerArgs.resolve_once",
    f"{_SRT}.arg_groups.overrides.resolving_view",
    f"{_SRT}.model_executor.runner_utils.capture_mode.get_capture_attention_variant",
    f"{_SRT}.platforms.interface.SRTPlatform.supports_speculative_algorithm",
    f"{_TREE}.checkpoint",
    f"{_TREE}.free_kv_row",
    f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache.release_swa_prefix_lock",
    f"{_SRT}.mem_cache.unified_cache.tree_core_registry._rust_fallback_reason",
)


def request_row(req: Any) -> int:
    """Row of a scheduled request in SGLang's request table."""
    return int(req.kv.req_pool_idx)


def prefilled(req: Any) -> int:
    """Tokens up to which a request's last prefill chunk went."""
    return int(req.extend_end)


def resolved(server_args: Any) -> Any:
    """A view of ``server_args``; resolves them unless SGLang has."""
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args.resolve_once()
    return resolving_view(server_args)


def declared_defaults() -> dict[str, Any]:
    """Every field of ``ServerArgs`` with its default; None for one without."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return {
        field.name: None if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(ServerArgs)
    }


def tree_class() -> type[SparseRadixCache]:
    """SGLang's radix cache with branches and counts of reused planes."""
    from sglang_sparse.compat.v0523.tree import BranchingRadixCache

    return BranchingRadixCache


def hierarchical_tree_class() -> None:
    """None: the hierarchical cache is not tested on this version."""


def window_tree_class() -> type[Any]:
    """SGLang's tree of two pools, where streaming heads hold sinks and windows."""
    from sglang_sparse.compat.v0523.windows import WindowRadixCache

    return WindowRadixCache


def variant_being_captured() -> Variant:
    """Which decode graph is captured at this moment."""
    from sglang_sparse.compat.v0523 import graphs

    return graphs.variant_being_captured()


@contextmanager
def workers_application(name: str) -> Iterator[None]:
    """Set the variable that SGLang has for this."""
    from sglang.srt.environ import envs

    with envs.SGLANG_HTTP_SERVER_APP_PATH.override(name):
        yield


def prepare_draft_worker() -> None:
    """Make ``speculative/ngram_worker.py`` run without accelerators."""
    from sglang_sparse.compat import cpu_speculation

    cpu_speculation.provide_kernels()
