# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.23. Seams of its own (paths under ``sglang/srt``):

``server_args.py: ServerArgs.resolve_once``, ``arg_groups/overrides.py: resolving_view``
    A ``ServerArgs`` is a record of what was asked; resolved values are read through a view.
``layers/attention/graph_variants.py: create_attention_graph_variants``
    SGLang's own variants of a decode graph: ours are dense and sparse.
    ``model_executor/runner_utils/capture_mode.py: get_capture_attention_variant`` tells which one
    is captured.
``mem_cache/radix_cache.py: RadixCache.checkpoint``
    Where a request's prefix enters the tree; ``Req.kv.req_pool_idx`` is its row, and a row that
    was freed is the next to be handed out.
``mem_cache/memory_pool.py: MHATokenToKVPool._create_buffers``
    K and V of a layer are halves of one tensor.
``platforms/interface.py: PlatformCapabilities``
    On a CPU it neither launches Triton kernels nor builds NCCL communicators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse.compat.protocol import Hook

if TYPE_CHECKING:
    from sglang_sparse.graph_variants import Variant
    from sglang_sparse_radix.radix_cache import SparseRadixCache

_OURS = "sglang_sparse"
_SRT = "sglang.srt"
_GRAPHS = f"{_OURS}.compat.v0523.graphs"
_ENDPOINTS = f"{_OURS}.endpoints"
_ANTHROPIC = f"{_SRT}.entrypoints.anthropic.serving.AnthropicServing"
_OLLAMA = f"{_SRT}.entrypoints.ollama.serving.OllamaServing"
_OPENAI = f"{_SRT}.entrypoints.openai"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_REPORTER = f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_TREE = f"{_SRT}.mem_cache.radix_cache.RadixCache"
_POOL = f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool"
_BACKEND = f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend"
_PLATFORM = f"{_SRT}.platforms.interface.SRTPlatform"

MARKER = "srt/layers/attention/graph_variants.py"
CPU_PLATFORM = f"{_OURS}.native_cpu.NativeCpuPlatform"

HOOKS = (
    Hook(f"{_SRT}.server_args.ServerArgs.add_cli_args", f"{_OURS}.flags:add_cli_args", "after"),
    Hook(f"{_SRT}.server_args.ServerArgs.from_cli_args", f"{_OURS}.flags:from_cli_args", "around"),
    Hook(
        f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        f"{_OURS}.pools:build_mha_kv_pool",
        "around",
    ),
    Hook(
        f"{_SRT}.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        f"{_OURS}.pools:compute_cell_size",
        "around",
    ),
    Hook(
        f"{_SRT}.layers.attention.graph_variants.create_attention_graph_variants",
        f"{_GRAPHS}:create_attention_graph_variants",
        "around",
    ),
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
    f"{_SRT}.server_args.ServerArgs.resolve_once",
    f"{_SRT}.arg_groups.overrides.resolving_view",
    f"{_SRT}.model_executor.runner_utils.capture_mode.get_capture_attention_variant",
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
    f"{_TREE}.checkpoint",
    f"{_TREE}.free_kv_row",
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
    f"{_SRT}.configs.model_config.ModelConfig.__init__",
    f"{_SRT}.configs.hybrid_arch.mambaish_config",
    f"{_SRT}.distributed.parallel_state.get_tp_group",
    f"{_SRT}.runtime_context.get_server_args",
    f"{_SRT}.runtime_context.get_parallel",
)


def request_row(req: Any) -> int:
    """Row of a scheduled request in SGLang's request table."""
    return int(req.kv.req_pool_idx)


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


def variant_being_captured() -> Variant:
    """Which decode graph is captured at this moment."""
    from sglang_sparse.compat.v0523 import graphs

    return graphs.variant_being_captured()
