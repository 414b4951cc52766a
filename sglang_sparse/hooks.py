# SPDX-License-Identifier: Apache-2.0
"""What SGLang is to find in its registries, and the functions that it is to call.

Nothing of this package imports this module but the plugin's entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_sparse import compat

_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


def _hooks() -> list[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) for every hook; imported when the plugin is loaded, not before."""
    from sglang_sparse import (
        endpoints,
        flags,
        graph_variants,
        metrics,
        pools,
        progress_log,
        request_options,
        server_info,
    )
    from sglang_sparse.backend import requests

    return [
        ("sglang.srt.server_args.ServerArgs.add_cli_args", flags.add_cli_args, "after"),
        ("sglang.srt.server_args.ServerArgs.from_cli_args", flags.from_cli_args, "around"),
        (
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
            pools.build_mha_kv_pool,
            "around",
        ),
        (
            "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
            pools.compute_cell_size,
            "around",
        ),
        (f"{_RUNNER}._capture_one_stream", graph_variants.capture_one_stream, "around"),
        (f"{_RUNNER}._make_graph_key", graph_variants.make_graph_key, "around"),
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
            request_options.validate_one_request,
            "around",
        ),
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.create_abort_task",
            request_options.check_before_streaming,
            "around",
        ),
        (f"{_ANTHROPIC}.handle_messages", endpoints.carry_custom_params, "around"),
        (
            f"{_ANTHROPIC}._convert_to_chat_completion_request",
            endpoints.into_chat_request,
            "after",
        ),
        *_responses_hooks(),
        (
            "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
            endpoints.into_sampling_params,
            "after",
        ),
        (f"{_OLLAMA}.handle_chat", endpoints.carry_custom_params, "around"),
        (f"{_OLLAMA}.handle_generate", endpoints.carry_custom_params, "around"),
        (
            f"{_OLLAMA}._convert_options_to_sampling_params",
            endpoints.into_sampling_params,
            "after",
        ),
        (
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            requests.tell_backend,
            "after",
        ),
        ("sglang.srt.utils.common.support_triton", pools.support_triton, "around"),
        ("sglang.srt.mem_cache.allocation.get_last_loc", pools.get_last_loc, "around"),
        (f"{_REPORTER}.report_decode_stats", metrics.after_decode, "after"),
        (f"{_REPORTER}._maybe_log_idle_metrics", metrics.when_idle, "after"),
        (f"{_REPORTER}.report_decode_stats", progress_log.after_decode, "after"),
        (
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            server_info.add_sparse_block,
            "after",
        ),
    ]


def _responses_hooks() -> list[tuple[str, Callable[..., Any], str]]:
    """Hooks on ``/v1/responses``; none where SGLang, too, goes without that endpoint."""
    from sglang_sparse import endpoints

    if not compat.serves_responses():
        return []
    handler = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
    return [(f"{handler}.create_responses", endpoints.carry_custom_params, "around")]


def register() -> None:
    """Register the flag's value, the backend, the tree and every hook. Runs once a process."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    from sglang_sparse.backend import create_backend
    from sglang_sparse.checks import BACKEND
    from sglang_sparse.flags import engine_server_args
    from sglang_sparse.prefixes import sparse_from
    from sglang_sparse_radix import radix_cache

    for target, hook, kind in _hooks():
        compat.install_hook(target, hook, kind)
    register_attention_backend(BACKEND)(create_backend)
    radix_cache.register(sparse_from)
    Engine.server_args_class = staticmethod(engine_server_args)
    # Last: argparse accepts the name only if all of the above went through.
    add_attention_backend_choices([BACKEND])
