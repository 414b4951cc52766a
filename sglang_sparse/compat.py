# SPDX-License-Identifier: Apache-2.0
"""The one module that knows SGLang's versions.

Seams in use, as they are in SGLang 0.5.17 (paths under ``sglang/srt``):

``plugins/__init__.py: load_plugins``
    Entry point ``sglang.srt.plugins``. It logs a plugin's exception and goes on.
``plugins/hook_registry.py: HookRegistry``
    Hooks. A lost target is only logged; ``_patched`` tells, and :func:`verify_hooks` asks it.
``server_args.py: add_attention_backend_choices``
    The value ``sparse`` of ``--attention-backend``.
``server_args.py: ServerArgs.add_cli_args``, ``ServerArgs.from_cli_args``
    The flags ``--sparse-method`` and ``--sparse-config``, resolved before ``__post_init__``.
``entrypoints/engine.py: Engine.server_args_class``
    The same two values for ``sglang.Engine``.
``layers/attention/attention_registry.py: register_attention_backend``
    The backend's factory, called with a ``ModelRunner``.
``mem_cache/registry.py: register_radix_cache_backend``
    The tree that goes with the planes and keeps sparse KV away from dense requests. What it uses
    of SGLang's tree is listed in ``sglang_sparse_radix/radix_cache.py``.
``mem_cache/kv_cache_configurator.py: KVCacheConfigurator._build_mha_kv_pool``
    The pool class on CUDA; ``platforms/interface.py: SRTPlatform.get_mha_kv_pool_cls`` on the CPU.
``model_executor/pool_configurator.py: DefaultPoolConfigurator._compute_cell_size``
    Plane bytes in SGLang's memory sizing.
``model_executor/runner/decode_cuda_graph_runner.py: DecodeCudaGraphRunner``
    ``_capture_one_stream`` captures every batch size twice, dense and sparse;
    ``_make_graph_key`` picks one at replay, after ``init_forward_metadata_out_graph``.
``utils/common.py: support_triton``, ``mem_cache/allocation.py: get_last_loc``
    PyTorch index writes on the CPU: SGLang avoids Triton by the backend's name, and "sparse" is
    not a name that it knows.
``managers/tokenizer_manager.py: TokenizerManager``
    ``_validate_one_request`` checks ``custom_params.sparse``; a ValueError there is a 400.
    ``create_abort_task`` checks it for a stream of ``/generate``, whose status is sent before
    that. Both run in the one tokenizer process that loads plugins.
``entrypoints/anthropic/serving.py: AnthropicServing``, ``entrypoints/ollama/serving.py:
OllamaServing``, ``entrypoints/openai/serving_responses.py: OpenAIServingResponses``
    Handlers of endpoints whose protocols have no ``custom_params``: they are read from the body
    around ``handle_messages``, ``handle_chat``, ``handle_generate`` and ``create_responses``, and
    put into what ``_convert_to_chat_completion_request``, ``_convert_options_to_sampling_params``
    and ``openai/protocol.py: ResponsesRequest.to_sampling_params`` return.
``managers/schedule_batch.py: Req.sampling_params.custom_params``, ``Req.req_pool_idx``
    What a request asked for, and its row of per-request state.
``managers/schedule_batch.py: Req.extend_range``, ``sampling/custom_logit_processor.py``
    Forced decoding for perplexities: which chunk a prefill is at, and the processor's base class.
``model_executor/forward_batch_info.py: ForwardBatch.init_new``
    The last place that sees a batch's requests, on the forward stream.
``managers/scheduler_components/metrics_reporter.py: SchedulerMetricsReporter``
    ``report_decode_stats`` runs after every decode step, ``_maybe_log_idle_metrics`` when there
    is nothing to do; ``metrics_collector.labels`` are the labels of the metrics beside ours.
``managers/scheduler.py: Scheduler.init_req_max_new_tokens``, ``managers/tp_worker.py``
    How long a request may become (:func:`longest_row`).
``managers/scheduler.py: Scheduler.get_internal_state``
    The ``sparse`` block of ``/server_info``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sglang_sparse.config import ConfigError

if TYPE_CHECKING:
    import argparse

    from sglang.srt.configs.model_config import ModelConfig

TESTED_SGLANG = ("0.5.17",)
_hooked: list[str] = []


def sglang_version() -> str:
    """Version of the installed SGLang distribution."""
    return version("sglang")


def tested_range() -> str:
    """The tested versions, for messages."""
    return (
        TESTED_SGLANG[0]
        if len(TESTED_SGLANG) == 1
        else f"{TESTED_SGLANG[0]} to {TESTED_SGLANG[-1]}"
    )


def install_hook(target: str, hook: Callable[..., Any], kind: str) -> None:
    """Ask SGLang to call ``hook`` at ``target``, a dotted name. Seam: ``HookRegistry.register``.

    Args:
        target: method or function of SGLang.
        hook: what to call.
        kind: ``after`` or ``around``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType(kind))
    _hooked.append(target)


def verify_hooks() -> None:
    """Check that SGLang really applied every hook: it logs one that lost its target, and serves on.

    Raises:
        ConfigError: names the targets that this SGLang no longer has.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    lost = sorted(set(_hooked).difference(HookRegistry._patched))
    if lost:
        raise ConfigError(
            flag="--attention-backend",
            value="sparse",
            problem=f"sglang {sglang_version()} lacks what it hooks: {', '.join(lost)}",
            allowed=f"sglang {tested_range()}",
            remedy="install a tested version, or serve with a dense attention backend",
        )


def read_model_config(args: argparse.Namespace) -> ModelConfig:
    """SGLang's own view of the model, from parsed flags that are not yet a ``ServerArgs``.

    Reads ``config.json`` only. Seam: ``configs/model_config.py: ModelConfig.__init__``.
    """
    from sglang.srt.configs.model_config import ModelConfig

    optional: dict[str, Any] = {
        name: getattr(args, flag)
        for name, flag in (
            ("trust_remote_code", "trust_remote_code"),
            ("revision", "revision"),
            ("context_length", "context_length"),
            ("model_override_args", "json_model_override_args"),
            ("is_embedding", "is_embedding"),
            ("dtype", "dtype"),
            ("quantization", "quantization"),
            ("model_config_parser", "model_config_parser"),
        )
        if getattr(args, flag, None) is not None
    }
    return ModelConfig(model_path=args.model_path, **optional)


def longest_row(context_len: int, pool_tokens: int | None, page_size: int) -> int:
    """Return the most tokens that a row can have in a decode step.

    A request of n tokens ends so that n + 2 is at most the context length, and n + 1 and a page at
    most the KV pool; its last token is never fed back. Seam: ``init_req_max_new_tokens``.

    Args:
        context_len: SGLang's context length, in tokens.
        pool_tokens: tokens that the KV pool holds; None if that is not known yet.
        page_size: tokens in a page of the KV pool.
    """
    if pool_tokens is None:
        return context_len - 3
    return min(context_len - 3, pool_tokens - page_size - 2)


def is_mla(model: ModelConfig) -> bool:
    """True for multi-head latent attention. Seam: ``ModelConfig.attention_arch``."""
    from sglang.srt.configs.model_config import AttentionArch

    return bool(model.attention_arch == AttentionArch.MLA)


def sliding_window(model: ModelConfig) -> int | None:
    """The window of a model that really uses one, else None.

    Qwen configs carry a ``sliding_window`` that ``use_sliding_window: false`` switches off.
    Seams: ``ModelConfig.sliding_window_size`` and ``ModelConfig.is_hybrid_swa``.
    """
    if getattr(model.hf_text_config, "use_sliding_window", True) is False:
        return None
    window = model.sliding_window_size
    if window is None and getattr(model, "is_hybrid_swa", False):
        return -1
    return window


def has_recurrent_layers(model: ModelConfig) -> bool:
    """True for models with Mamba or linear-attention layers. Seam: ``configs/hybrid_arch.py``."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


@cache
def serves_responses() -> bool:
    """True if the handlers of ``/v1/responses`` can be imported.

    Seam: ``entrypoints/http_server.py: lifespan`` logs a failed import of
    ``entrypoints/openai/serving_responses.py`` and serves without the endpoint.
    """
    try:
        import sglang.srt.entrypoints.openai.serving_responses  # noqa: F401
    except Exception:  # as SGLang does: packages that the endpoint alone needs may be missing
        return False
    return True


def captures_decode(server_args: Any) -> bool:
    """True if decode will be captured in CUDA graphs.

    Seam: ``ServerArgs.cuda_graph_config``; the older ``disable_cuda_graph`` only folds into it.
    """
    return (
        server_args.device != "cpu" and server_args.cuda_graph_config.decode.backend != "disabled"
    )


def attention_layers(model: Any) -> list[Any]:
    """The layers that attend through the KV pool.

    Seam: ``layers/radix_attention.py: RadixAttention``, as a module of ``ModelRunner.model``.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    return [m for m in model.modules() if isinstance(m, RadixAttention)]


def current_server_args() -> Any:
    """The ``ServerArgs`` of this process. Seam: ``runtime_context.get_server_args``."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()
