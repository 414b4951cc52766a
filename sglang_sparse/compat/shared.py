# SPDX-License-Identifier: Apache-2.0
"""Hooks and seams that every supported version of SGLang has.

The package's docstring says what each is for. SGLang calls the hooks of one target in the order of
this list. So the log reads what a decode step added before the metrics ask the log for it.
"""

from sglang_sparse.compat.protocol import Hook

_OURS = "sglang_sparse"
_SRT = "sglang.srt"
_ENDPOINTS = f"{_OURS}.endpoints"
_ANTHROPIC = f"{_SRT}.entrypoints.anthropic.serving.AnthropicServing"
_OLLAMA = f"{_SRT}.entrypoints.ollama.serving.OllamaServing"
_OPENAI = f"{_SRT}.entrypoints.openai"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_REPORTER = f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_TREE = f"{_SRT}.mem_cache.radix_cache.RadixCache"
_KEY = f"{_SRT}.mem_cache.radix_cache.RadixKey"
_POOL = f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool"
_KV = f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_BACKEND = f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend"
_PLATFORM = f"{_SRT}.platforms.interface.SRTPlatform"
_MODEL_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_UNIFIED = f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WINDOW = f"{_SRT}.mem_cache.unified_cache.components.SWAComponent"
_WINDOWS = f"{_OURS}.window_pools"
_SPECULATION = f"{_OURS}.speculation.hooks"
_CPU_SPECULATION = f"{_OURS}.compat.cpu_speculation"
_FACTORY = f"{_SRT}.speculative.draft_utils.DraftBackendFactory"
_DRAFTS = f"{_OURS}.backend.drafts"

_SPECULATION_HOOKS = (
    Hook(
        f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        f"{_SPECULATION}:create_worker",
        "around",
    ),
    Hook(
        f"{_SRT}.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
        f"{_SPECULATION}:keep_accepted_rows",
        "around",
    ),
    Hook(f"{_SRT}.mem_cache.allocation.get_last_loc", f"{_CPU_SPECULATION}:get_last_loc", "around"),
    Hook(
        f"{_SRT}.mem_cache.allocation.assign_req_to_token_pool_func",
        f"{_CPU_SPECULATION}:assign_rows",
        "around",
    ),
    Hook(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
        f"{_CPU_SPECULATION}:extend_slots",
        "around",
    ),
    Hook(
        f"{_SRT}.speculative.eagle_utils.verify_tree_greedy_func",
        f"{_CPU_SPECULATION}:verify_greedy",
        "around",
    ),
    Hook(
        f"{_SRT}.speculative.eagle_utils.build_tree_kernel_efficient",
        f"{_CPU_SPECULATION}:build_chains",
        "around",
    ),
    Hook(
        f"{_SRT}.speculative.spec_utils.select_top_k_tokens",
        f"{_CPU_SPECULATION}:extend_chains",
        "around",
    ),
    Hook(
        "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
        f"{_CPU_SPECULATION}:last_accepted",
        "around",
    ),
    Hook(f"{_FACTORY}.create_decode_backend", f"{_DRAFTS}:create_decode_backend", "around"),
    Hook(
        f"{_FACTORY}.create_draft_extend_backend",
        f"{_DRAFTS}:create_draft_extend_backend",
        "around",
    ),
)

HOOKS = (
    Hook(f"{_SRT}.server_args.ServerArgs.add_cli_args", f"{_OURS}.flags:add_cli_args", "after"),
    Hook(f"{_SRT}.server_args.ServerArgs.from_cli_args", f"{_OURS}.flags:from_cli_args", "around"),
    Hook(f"{_KV}._build_mha_kv_pool", f"{_OURS}.pools:build_mha_kv_pool", "around"),
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
    Hook(
        f"{_SRT}.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        f"{_OURS}.pools:compute_cell_size",
        "around",
    ),
    Hook(
        f"{_SRT}.managers.tp_worker.TpModelWorker.get_worker_info",
        f"{_OURS}.admission:limit_prompts",
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
    Hook(
        f"{_SRT}.entrypoints.http_server._setup_and_run_http_server",
        f"{_OURS}.tokenizers:run_http_server",
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
    Hook(
        f"{_SRT}.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        f"{_OURS}.platform_cpu:keep_heads",
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
    Hook(f"{_MODEL_RUNNER}.init_kv_cache_configurator", f"{_WINDOWS}:announce_windows", "around"),
    Hook(
        f"{_SRT}.model_executor.pool_configurator.create_memory_pool_configurator",
        f"{_WINDOWS}:create_configurator",
        "around",
    ),
    Hook(f"{_KV}._build_token_to_kv_pool", f"{_WINDOWS}:build_token_to_kv_pool", "around"),
    Hook(f"{_KV}._build_token_to_kv_pool_allocator", f"{_WINDOWS}:build_allocator", "around"),
    *_SPECULATION_HOOKS,
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
    f"{_KEY}.__getitem__",
    f"{_KEY}.child_key",
    f"{_KEY}.match",
    f"{_KEY}.maybe_to_bigram_view",
    f"{_KEY}.page_aligned",
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
    f"{_KV}._profile_available_bytes",
    f"{_KV}._apply_token_constraints",
    f"{_SRT}.mem_cache.memory_pool.NoOpMHATokenToKVPool._create_buffers",
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
    f"{_SRT}.mem_cache.swa_memory_pool.SWAKVPool.__init__",
    f"{_SRT}.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.__init__",
    f"{_SRT}.mem_cache.common.free_swa_out_of_window_slots",
    f"{_UNIFIED}.__init__",
    f"{_UNIFIED}.match_prefix",
    f"{_WINDOW}.__init__",
    f"{_WINDOW}.commit_insert_component_data",
    f"{_WINDOW}.prepare_for_caching_req",
    f"{_WINDOW}.acquire_component_lock",
    f"{_WINDOW}.release_component_lock",
    f"{_WINDOW}._evict_device_start",
    f"{_WINDOW}._evict_device_next_node",
    f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode",
    f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
    f"{_SRT}.speculative.standalone_worker_v2.StandaloneWorkerV2.__init__",
    f"{_SRT}.speculative.eagle_worker_v2.EAGLEWorkerV2.__init__",
    f"{_SRT}.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
)
