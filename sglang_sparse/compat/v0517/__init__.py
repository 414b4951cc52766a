# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.17. Seams of its own (paths under ``sglang/srt``):

``server_args.py: ServerArgs.__post_init__``
    Resolves the flags in the constructor, so a ``ServerArgs`` is always resolved.
``model_executor/runner/decode_cuda_graph_runner.py: DecodeCudaGraphRunner``
    ``_capture_one_stream`` captures every batch size twice, dense and sparse;
    ``_make_graph_key`` picks one at replay, after ``init_forward_metadata_out_graph``.
``mem_cache/radix_cache.py: RadixCache.cache_unfinished_req``, ``cache_finished_req``
    Where a request's prefix enters the tree; ``Req.req_pool_idx`` is its row.
``platforms/interface.py: SRTPlatform.get_mha_kv_pool_cls``, ``get_paged_allocator_cls``
    Pool and allocator on the CPU: its own allocator launches Triton kernels.
``utils/common.py: support_triton``, ``mem_cache/allocation.py: get_last_loc``
    PyTorch index writes on the CPU: it avoids Triton by the backend's name, and "sparse" is not a
    name that it knows.
``distributed/parallel_state.py: init_model_parallel_group``
    It builds NCCL communicators on every platform that is not an NPU or XPU.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from sglang_sparse.compat.protocol import Hook

if TYPE_CHECKING:
    from sglang_sparse.graph_variants import Variant
    from sglang_sparse_radix.radix_cache import SparseRadixCache

_OURS = "sglang_sparse"
_SRT = "sglang.srt"
_CPU = f"{_OURS}.compat.v0517.cpu"
_GRAPHS = f"{_OURS}.compat.v0517.graphs"
_RUNNER = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_ENDPOINTS = f"{_OURS}.endpoints"
_ANTHROPIC = f"{_SRT}.entrypoints.anthropic.serving.AnthropicServing"
_OLLAMA = f"{_SRT}.entrypoints.ollama.serving.OllamaServing"
_OPENAI = f"{_SRT}.entrypoints.openai"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_REPORTER = f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_KV = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_TREE = f"{_SRT}.mem_cache.radix_cache.RadixCache"
_POOL = f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool"
_ALLOCATOR = f"{_SRT}.mem_cache.allocator.PagedTokenToKVPoolAllocator"
_BACKEND = f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend"
_PLATFORM = f"{_SRT}.platforms.interface.SRTPlatform"

MARKER = "srt/server_args.py"
CPU_PLATFORM = f"{_CPU}.CpuPlatform"

HOOKS = (
    Hook(f"{_SRT}.server_args.ServerArgs.add_cli_args", f"{_OURS}.flags:add_cli_args", "after"),
    Hook(f"{_SRT}.server_args.ServerArgs.from_cli_args", f"{_OURS}.flags:from_cli_args", "around"),
    Hook(
        f"{_KV}._build_mha_kv_pool",
        f"{_OURS}.pools:build_mha_kv_pool",
        "around",
    ),
    Hook(
        f"{_SRT}.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        f"{_OURS}.pools:compute_cell_size",
        "around",
    ),
    Hook(
        f"{_KV}._resolve_memory_pool_config",
        f"{_OURS}.state_pools:resolve_pool_config",
        "around",
    ),
    Hook(
        f"{_KV}._build_token_to_kv_pool",
        f"{_OURS}.state_pools:build_token_to_kv_pool",
        "around",
    ),
    Hook(f"{_RUNNER}._capture_one_stream", f"{_GRAPHS}:capture_one_stream", "around"),
    Hook(f"{_RUNNER}._make_graph_key", f"{_GRAPHS}:make_graph_key", "around"),
    Hook(
        f"{_TOKENIZER}._validate_one_request",
        f"{_OURS}.request_options:validate_one_request",
        "around",
    ),
    Hook(
        f"{_TOKENIZER}.create_abort_task",
        f"{_OURS}.request_options:check_before_streaming",
        "around",
    ),
    Hook(f"{_ANTHROPIC}.handle_messages", f"{_ENDPOINTS}:carry_custom_params", "around"),
    Hook(
        f"{_ANTHROPIC}._convert_to_chat_completion_request",
        f"{_ENDPOINTS}:into_chat_request",
        "after",
    ),
    Hook(
        f"{_OPENAI}.serving_responses.OpenAIServingResponses.create_responses",
        f"{_ENDPOINTS}:carry_custom_params",
        "around",
    ),
    Hook(
        f"{_OPENAI}.protocol.ResponsesRequest.to_sampling_params",
        f"{_ENDPOINTS}:into_sampling_params",
        "after",
    ),
    Hook(f"{_OLLAMA}.handle_chat", f"{_ENDPOINTS}:carry_custom_params", "around"),
    Hook(f"{_OLLAMA}.handle_generate", f"{_ENDPOINTS}:carry_custom_params", "around"),
    Hook(
        f"{_OLLAMA}._convert_options_to_sampling_params",
        f"{_ENDPOINTS}:into_sampling_params",
        "after",
    ),
    Hook(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new",
        f"{_OURS}.backend.requests:tell_backend",
        "after",
    ),
    Hook(f"{_SRT}.utils.common.support_triton", f"{_CPU}:support_triton", "around"),
    Hook(f"{_SRT}.mem_cache.allocation.get_last_loc", f"{_CPU}:get_last_loc", "around"),
    Hook(
        f"{_SRT}.distributed.parallel_state.init_model_parallel_group",
        f"{_CPU}:init_model_parallel_group",
        "around",
    ),
    Hook(
        f"{_SRT}.distributed.device_communicators.triton_symm_mem_ag.MultimemAllGatherer._build",
        f"{_OURS}.platform_cpu:build_multimem",
        "around",
    ),
    Hook(f"{_REPORTER}.report_decode_stats", f"{_OURS}.progress_log:after_decode", "after"),
    Hook(f"{_REPORTER}.report_decode_stats", f"{_OURS}.metrics:after_decode", "after"),
    Hook(f"{_REPORTER}._maybe_log_idle_metrics", f"{_OURS}.metrics:when_idle", "after"),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler.get_internal_state",
        f"{_OURS}.server_info:add_sparse_block",
        "after",
    ),
)

SEAMS = (
    f"{_SRT}.plugins.hook_registry.HookRegistry.register",
    f"{_SRT}.server_args.add_attention_backend_choices",
    f"{_SRT}.layers.attention.attention_registry.register_attention_backend",
    f"{_SRT}.mem_cache.registry.register_radix_cache_backend",
    f"{_SRT}.mem_cache.registry.get_radix_cache_factory",
    f"{_SRT}.mem_cache.registry.default_radix_cache_factory",
    f"{_TREE}.__init__",
    f"{_TREE}.reset",
    f"{_TREE}.match_prefix",
    f"{_TREE}.insert",
    f"{_TREE}._insert_helper",
    f"{_TREE}._match_prefix_helper",
    f"{_TREE}._split_node",
    f"{_TREE}.cache_unfinished_req",
    f"{_TREE}.cache_finished_req",
    f"{_KV}._profile_available_bytes",
    f"{_KV}._apply_token_constraints",
    f"{_SRT}.mem_cache.memory_pool.NoOpMHATokenToKVPool._create_buffers",
    f"{_POOL}.__init__",
    f"{_POOL}._create_buffers",
    f"{_POOL}._clear_buffers",
    f"{_POOL}.get_kv_size_bytes",
    f"{_POOL}._finalize_allocation_log",
    f"{_POOL}.set_kv_buffer",
    f"{_POOL}.move_kv_cache",
    f"{_POOL}.set_kv_buffer_prefix_valid",
    f"{_POOL}.get_cpu_copy",
    f"{_POOL}.load_cpu_copy",
    f"{_POOL}.get_contiguous_buf_infos",
    f"{_POOL}.finalize_backing",
    f"{_POOL}.register_layer_transfer_counter",
    f"{_ALLOCATOR}.alloc_extend",
    f"{_ALLOCATOR}.alloc_decode",
    f"{_BACKEND}.init_cuda_graph_state",
    f"{_BACKEND}.init_forward_metadata",
    f"{_BACKEND}.init_forward_metadata_out_graph",
    f"{_BACKEND}.init_forward_metadata_in_graph",
    f"{_BACKEND}.get_cuda_graph_seq_len_fill_value",
    f"{_BACKEND}.forward_decode",
    f"{_BACKEND}.forward_extend",
    f"{_BACKEND}.support_triton",
    f"{_PLATFORM}.apply_server_args_defaults",
    f"{_PLATFORM}.get_default_attention_backend",
    f"{_PLATFORM}.get_mha_kv_pool_cls",
    f"{_PLATFORM}.get_paged_allocator_cls",
    f"{_SRT}.configs.model_config.ModelConfig.__init__",
    f"{_SRT}.configs.hybrid_arch.mambaish_config",
    f"{_SRT}.distributed.parallel_state.get_tp_group",
    f"{_SRT}.runtime_context.get_server_args",
    f"{_SRT}.runtime_context.get_parallel",
)


def request_row(req: Any) -> int:
    """Row of a scheduled request in SGLang's request table."""
    return int(req.req_pool_idx)


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


def variant_being_captured() -> Variant:
    """Which decode graph is captured at this moment."""
    from sglang_sparse.compat.v0517 import graphs

    return graphs.capturing
