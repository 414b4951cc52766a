# SPDX-License-Identifier: Apache-2.0
"""Reads models and processes of SGLang, in the same way for every supported version.

Seams: ``configs/model_config.py: ModelConfig``, ``configs/hybrid_arch.py: mambaish_config``,
``layers/radix_attention.py: RadixAttention``, ``runtime_context.py: get_server_args``,
``environ.py: envs``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from sglang.srt.configs.model_config import ModelConfig


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

    A request of n tokens ends so that n + 2 is at most the context length, and n + 1 tokens and a
    page fit in the KV pool. Its last token is never fed back. Seam: ``init_req_max_new_tokens``.

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


def attention_layers(model: Any) -> list[Any]:
    """The layers that attend through the KV pool.

    Seam: ``layers/radix_attention.py: RadixAttention``, as a module of ``ModelRunner.model``.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    return [m for m in model.modules() if isinstance(m, RadixAttention)]


def rotary_embeddings(model: Any) -> list[Any] | None:
    """The distinct rotary embeddings of attention layers; None if a layer has none.

    Seam: models keep a layer's as ``rotary_emb`` beside its ``RadixAttention``, which they get from
    ``layers/rotary_embedding/factory.py: get_rope``.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, Any] = {}
    for module in model.modules():
        if any(isinstance(child, RadixAttention) for child in module.children()):
            rope = getattr(module, "rotary_emb", None)
            if rope is None:
                return None
            found[id(rope)] = rope
    return list(found.values())


def writes_kv_in_rope(model: Any) -> bool:
    """True for models that may write K and V inside their RoPE kernel, past the backend.

    Seam: ``models/utils.py: enable_fused_set_kv_buffer``, which their modules import.
    """
    import sys

    return hasattr(sys.modules[type(model).__module__], "enable_fused_set_kv_buffer")


def kv_scales(layer: Any) -> tuple[float, float]:
    """What a layer's stored keys and values are multiplied by; 1 where the checkpoint says nothing.

    Seams: ``layers/radix_attention.py: RadixAttention.k_scale_float``, ``v_scale_float``, set by
    ``layers/quantization/kv_cache.py: BaseKVCacheMethod.process_weights_after_loading``.
    """
    k, v = layer.k_scale_float, layer.v_scale_float
    return 1.0 if k is None else float(k), 1.0 if v is None else float(v)


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


def tensor_group() -> tuple[Any, int]:
    """The CPU's process group of the tensor-parallel ranks, and how many they are.

    Seams: ``distributed/parallel_state.py: get_tp_group``, ``GroupCoordinator.cpu_group``.
    """
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return group.cpu_group, int(group.world_size)


def current_server_args() -> Any:
    """The ``ServerArgs`` of this process. Seam: ``runtime_context.get_server_args``."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def tree_core() -> str:
    """Name of the core that SGLang's tree of two pools runs on: ``python`` takes rules."""
    from sglang.srt.environ import envs

    return str(envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get())
