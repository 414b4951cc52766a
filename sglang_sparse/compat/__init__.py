# SPDX-License-Identifier: Apache-2.0
"""All knowledge of SGLang's versions: a :class:`.protocol.SGLangVersion` module for each.

Seams that every version shares (paths under ``sglang/srt``):

``plugins/__init__.py: load_plugins``
    Entry point ``sglang.srt.plugins``. It logs a plugin's exception and goes on.
``plugins/hook_registry.py: HookRegistry``
    Hooks. A lost target is only logged; ``_patched`` tells, and :func:`verify_hooks` asks it.
``server_args.py: add_attention_backend_choices``
    The value ``sparse`` of ``--attention-backend``.
``server_args.py: ServerArgs.add_cli_args``, ``ServerArgs.from_cli_args``
    The flags ``--sparse-method`` and ``--sparse-config``, read before SGLang resolves the flags.
``entrypoints/engine.py: Engine.server_args_class``
    The same two values for ``sglang.Engine``.
``layers/attention/attention_registry.py: register_attention_backend``
    The backend's factory, called with a ``ModelRunner``.
``layers/attention/base_attn_backend.py: AttentionBackend``
    The contract of the backend.
``layers/attention/flashinfer_backend.py: FlashInferAttnBackend.prefill_wrapper_ragged`` and
``prefill_wrappers_paged``
    ``FlashInferIndicesUpdaterPrefill.call_begin_forward`` plans a prompt on these, by offsets that
    ``backend/host_lengths.py`` replaces. ``use_paged`` of the same class has a prompt attend to new
    and cached tokens in one kernel; short chunks set it while they are planned.
``mem_cache/registry.py: register_radix_cache_backend``
    The tree that goes with the planes and keeps sparse KV away from dense requests. What it uses
    of SGLang's tree is listed in ``sglang_sparse_radix/radix_cache.py``.
``mem_cache/memory_pool.py: MHATokenToKVPool``
    The KV pool that planes lie beside; ``_create_buffers`` allocates them.
``mem_cache/memory_pool.py: MHATokenToKVPool.set_kv_buffer``
    With ``--kv-cache-dtype fp8_e4m3`` it divides K and V, in place, by the scales that it is given,
    and casts: what is above 464 then becomes NaN, or 448 with PyTorch 2.14. Rows are stored as
    bytes; ``get_key_buffer`` and ``get_value_buffer`` view them as fp8. Rows of other dtypes are
    never divided.
``layers/radix_attention.py: RadixAttention.k_scale``, ``k_scale_float``, and the same of V
    The scales of a layer: tensors to write by, numbers to read by, None without a quantized
    checkpoint. ``layers/quantization/kv_cache.py: BaseKVCacheMethod`` loads both; a file of
    ``--quantization-param-path`` sets the tensors alone, so that what is divided is never
    multiplied: refused. ``torch_native`` writes and reads without them.
``mem_cache/kv_cache_dtype.py: configure_kv_cache_dtype``
    ``auto`` becomes fp8 e4m3 where a ModelOpt checkpoint says so.
``mem_cache/kv_cache_configurator.py: KVCacheConfigurator._build_mha_kv_pool``
    The pool class.
``model_executor/pool_configurator.py: DefaultPoolConfigurator._compute_cell_size``
    Plane bytes in SGLang's memory sizing.
``distributed/parallel_state.py: get_tp_group``
    The ranks whose counts are added up, over its CPU group.
``distributed/device_communicators/triton_symm_mem_ag.py: MultimemAllGatherer._build``
    It is skipped on a CPU, where it would look for GPU memory.
``configs/update_config.py: adjust_config_with_unaligned_cpu_tp``
    It is skipped on a CPU, where ranks that outnumber KV heads have copies of them.
``managers/tokenizer_manager.py: TokenizerManager``
    ``_validate_one_request`` checks ``custom_params.sparse``; a ValueError there is a 400.
    ``create_abort_task`` checks it for a stream of ``/generate``, whose status is sent before
    that. Both run in each tokenizer process.
``managers/tp_worker.py: TpModelWorker.get_worker_info``
    How long a prompt may be, see :mod:`sglang_sparse.admission`.
``entrypoints/http_server.py: _setup_and_run_http_server``
    It starts tokenizer processes, in which SGLang loads no plugins.
``entrypoints/anthropic/serving.py: AnthropicServing``, ``entrypoints/ollama/serving.py:
OllamaServing``, ``entrypoints/openai/serving_responses.py: OpenAIServingResponses``
    Handlers of endpoints whose protocols have no ``custom_params``: they are read from the body
    around ``handle_messages``, ``handle_chat``, ``handle_generate`` and ``create_responses``, and
    put into what ``_convert_to_chat_completion_request``, ``_convert_options_to_sampling_params``
    and ``openai/protocol.py: ResponsesRequest.to_sampling_params`` return.
``speculative/spec_info.py: SpeculativeAlgorithm.create_worker``, ``speculative/spec_utils.py:
move_accept_tokens_to_target_kvcache``, ``speculative/ngram_worker.py: NGRAMWorker``
    Speculation with chains; on a CPU also what :mod:`.cpu_speculation` names.
``speculative/draft_utils.py: DraftBackendFactory``
    What a draft model attends on: its tables know no ``sparse``. ``speculative/
    standalone_worker_v2.py: StandaloneWorkerV2`` and ``eagle_worker_v2.py: EAGLEWorkerV2`` run as
    they are. Which states EAGLE reads is for the target's model runner to say, through
    ``CaptureHiddenMode`` and, for EAGLE3, ``model_runner_components/spec_aux_hidden_state.py``.
``managers/schedule_batch.py: Req.sampling_params.custom_params``
    The options of a request.
``sampling/custom_logit_processor.py: CustomLogitProcessor``
    Forced decoding for perplexities derives from it; ``__req__`` is its request.
``model_executor/forward_batch_info.py: ForwardBatch.init_new``
    The last place that sees a batch's requests, on the forward stream.
``managers/scheduler_components/metrics_reporter.py: SchedulerMetricsReporter``
    ``report_decode_stats`` runs after every decode step, ``_maybe_log_idle_metrics`` when there
    is nothing to do; ``metrics_collector.labels`` are the labels of the metrics beside ours.
``managers/scheduler.py: Scheduler.init_req_max_new_tokens``, ``managers/tp_worker.py``
    How long a request may become (:func:`longest_row`).
``managers/scheduler.py: Scheduler.get_internal_state``
    The ``sparse`` block of ``/server_info``.

What differs is in the docstrings of :mod:`.v0517` and :mod:`.v0523`.
"""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

from sglang_sparse.compat import v0517, v0523
from sglang_sparse.compat.models import (
    attention_layers,
    current_server_args,
    has_recurrent_layers,
    is_mla,
    kv_scales,
    longest_row,
    read_model_config,
    rotary_embeddings,
    serves_responses,
    sliding_window,
    tensor_group,
    tree_core,
    writes_kv_in_rope,
)
from sglang_sparse.compat.protocol import Hook, HookKind, SGLangVersion
from sglang_sparse.compat.signatures import differences
from sglang_sparse.config import ConfigError

__all__ = [
    "TESTED_SGLANG",
    "Hook",
    "HookKind",
    "SGLangVersion",
    "attention_layers",
    "captures_decode",
    "current",
    "current_server_args",
    "has_recurrent_layers",
    "install_hooks",
    "is_mla",
    "is_supported",
    "is_tested",
    "kv_scales",
    "limit_prefill_graphs",
    "longest_row",
    "read_model_config",
    "resolved",
    "rotary_embeddings",
    "serves_responses",
    "sglang_version",
    "sliding_window",
    "supported_range",
    "tensor_group",
    "tested_versions",
    "tree_core",
    "untested_warning",
    "verify_hooks",
    "writes_kv_in_rope",
]

_VERSIONS: dict[str, SGLangVersion] = {"0.5.17": v0517, "0.5.23": v0523}
TESTED_SGLANG = tuple(_VERSIONS)
_FLAGS = "sglang.srt.server_args.ServerArgs."


def sglang_version() -> str:
    """Version of the installed SGLang distribution."""
    return version("sglang")


def tested_versions() -> str:
    """The tested versions, for messages: ``0.5.17 and 0.5.23``."""
    return " and ".join(TESTED_SGLANG)


def supported_range() -> str:
    """The range of versions that start, for messages."""
    return f"{TESTED_SGLANG[0]} to {TESTED_SGLANG[-1]}"


def is_tested() -> bool:
    """True if the installed version is one that the tests run on."""
    return sglang_version() in TESTED_SGLANG


def is_supported() -> bool:
    """True if the installed version lies between the oldest and the newest tested one."""
    found = Version(sglang_version())
    return Version(TESTED_SGLANG[0]) <= found <= Version(TESTED_SGLANG[-1])


@cache
def current() -> SGLangVersion:
    """The module for the installed SGLang.

    A version that is not tested gets the newest module whose marker file it has. Its start names
    the hook targets that it lost. Nothing of SGLang is imported, since SGLang asks this while it
    chooses its platform.
    """
    exact = _VERSIONS.get(sglang_version())
    if exact is not None:
        return exact
    package = find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    root = Path(package.submodule_search_locations[0])
    return next((m for m in reversed(_VERSIONS.values()) if (root / m.MARKER).exists()), v0517)


def _hooks() -> list[Hook]:
    """The hooks of this process, without those of ``/v1/responses`` if SGLang lacks it."""
    hooks = current().HOOKS
    return [h for h in hooks if ".serving_responses." not in h.target or serves_responses()]


def install_hooks() -> None:
    """Register every hook with SGLang; on a version out of range, only the hooks of the flags."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in _hooks():
        if is_supported() or hook.target.startswith(_FLAGS):
            HookRegistry.register(hook.target, hook.load(), HookType(hook.kind))


def verify_hooks() -> None:
    """Check that SGLang is of a supported version and really applied every hook.

    SGLang logs a hook that lost its target and serves on.

    Raises:
        ConfigError: names the version, or the targets that this SGLang no longer has.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = sglang_version()
    if not is_supported():
        raise _unsupported(f"sglang {found} is out of the supported range")
    lost = sorted({hook.target for hook in _hooks()} - HookRegistry._patched)
    if lost:
        raise _unsupported(f"sglang {found} lacks what it hooks: {', '.join(lost)}")


def _unsupported(problem: str) -> ConfigError:
    return ConfigError(
        flag="--attention-backend",
        value="sparse",
        problem=problem,
        allowed=f"sglang {supported_range()} (tested: {tested_versions()})",
        remedy="install a tested version, or serve with a dense attention backend",
    )


def untested_warning() -> str | None:
    """One line for a version between the tested ones, with what it changed; None for a tested one.

    Call it once SGLang is loaded.
    """
    if is_tested():
        return None
    changed = differences(current())
    what = f"its signatures differ in {', '.join(changed)}" if changed else "its signatures fit"
    return (
        f"sglang {sglang_version()} is between the tested versions {tested_versions()} "
        f"and is not tested itself; {what}"
    )


def resolved(server_args: Any) -> Any:
    """Flags as SGLang resolves them, readable by name."""
    return current().resolved(server_args)


def limit_prefill_graphs(server_args: Any, tokens: int) -> None:
    """Leave prefills of more than ``tokens`` out of the CUDA graphs that will be captured.

    SGLang captures a size in as many requests as the context asks for, whatever batches hold; what
    no graph is captured for runs without one. The graphs of decoding stay.

    Seam: ``model_executor/runner/prefill_cuda_graph_runner.py: PrefillCudaGraphRunner.__init__``
    reads ``ServerArgs.cuda_graph_config.prefill.bs``; ``capture_prepare`` shares a size out.
    """
    prefill = resolved(server_args).cuda_graph_config.prefill
    if prefill.bs is not None:
        prefill.bs = [size for size in prefill.bs if size <= tokens]


def captures_decode(server_args: Any) -> bool:
    """True if decode will be captured in CUDA graphs.

    Seam: ``ServerArgs.cuda_graph_config``; the older ``disable_cuda_graph`` only folds into it.
    """
    flags = resolved(server_args)
    return bool(flags.device != "cpu" and flags.cuda_graph_config.decode.backend != "disabled")
