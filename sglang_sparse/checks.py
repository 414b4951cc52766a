# SPDX-License-Identifier: Apache-2.0
"""What this version refuses, each with one line: flag, value, what is allowed, what to do.

Flags are checked before SGLang resolves them, so that the user reads our line and not a later
failure; the model is checked from its ``config.json``, before any weight is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse import compat
from sglang_sparse.config import ConfigError, SparseConfig
from sglang_sparse_radix.refusals import RULES, Rule, unsupported_switch

if TYPE_CHECKING:
    import argparse

    from sglang.srt.configs.model_config import ModelConfig

BACKEND = "sparse"

_OFF = (None, False)

# On top of what the planes and the tree cannot follow (sglang_sparse_radix.refusals.RULES).
ATTENTION_RULES = (
    Rule("prefill_attention_backend", (None, BACKEND), "planes are built in prefill"),
    Rule("decode_attention_backend", (None, BACKEND), "planes are built in prefill"),
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16", None), "scores read unquantized keys"),
    Rule("enable_mixed_chunk", _OFF, "decode rows of a mixed batch would run dense"),
    Rule("enable_dp_attention", _OFF, "idle ranks are not planned yet"),
    Rule("enable_two_batch_overlap", _OFF, "the plan covers one batch at a time"),
    Rule("enable_single_batch_overlap", _OFF, "the plan covers one batch at a time"),
    Rule("enable_lora", _OFF, "LoRA graphs take the graph variant that sparse decode needs"),
    Rule("lora_paths", (None, [], {}), "LoRA graphs take the graph variant of sparse decode"),
    Rule("enable_deterministic_inference", _OFF, "the number of KV splits depends on the batch"),
    Rule("enable_torch_compile", _OFF, "the backend cannot be traced"),
    Rule(
        "cuda_graph_backend_prefill",
        (None, "disabled", "breakable"),
        "planes are updated between the segments of a prefill graph",
    ),
)


def refuse(flag: str, value: Any, allowed: str, remedy: str) -> ConfigError:
    """The one shape of every refusal."""
    problem = f"not supported with --attention-backend {BACKEND}"
    return ConfigError(flag=flag, value=str(value), problem=problem, allowed=allowed, remedy=remedy)


def check_flags(args: argparse.Namespace, config: SparseConfig) -> None:
    """Refuse flags that cannot be combined with this backend.

    Args:
        args: parsed flags (or Engine keyword arguments as a namespace), before ``ServerArgs``.
        config: the resolved configuration.

    Raises:
        ConfigError: names the first offending flag.
    """
    for rule in (*RULES, *ATTENTION_RULES):
        value = getattr(args, rule.field, rule.allowed[0])
        if value not in rule.allowed:
            raise ConfigError(
                flag=rule.flag,
                value=str(value),
                problem=rule.why,
                allowed=rule.allowed_text,
                remedy=rule.remedy,
            )
    switch = unsupported_switch()
    if switch is not None:
        name, why = switch
        raise ConfigError(
            flag=name, value="1", problem=why, allowed="unset", remedy=f"unset {name}"
        )
    if args.page_size not in (None, config.page_size):
        raise refuse(
            "--page-size",
            args.page_size,
            f"unset or {config.page_size}",
            "set page_size (16, 32 or 64) in --sparse-config instead",
        )


def check_model(model: ModelConfig, model_path: str) -> None:
    """Refuse models whose attention is not plain MHA or GQA over the whole context.

    Raises:
        ConfigError: names the model and the property that is not supported.
    """
    plain = "Llama- or Qwen-shaped models with full MHA or GQA attention"
    if compat.is_mla(model):
        raise refuse(
            "--model-path",
            model_path,
            plain,
            "this model uses latent attention (MLA): serve it dense",
        )
    window = compat.sliding_window(model)
    if window is not None:
        raise refuse(
            "--model-path",
            model_path,
            plain,
            "this model uses sliding-window attention: serve it dense",
        )
    if model.attention_chunk_size is not None:
        raise refuse(
            "--model-path", model_path, plain, "this model uses chunked attention: serve it dense"
        )
    if model.is_encoder_decoder:
        raise refuse(
            "--model-path", model_path, plain, "this model is an encoder-decoder: serve it dense"
        )
    if compat.has_recurrent_layers(model):
        raise refuse(
            "--model-path", model_path, plain, "this model has recurrent layers: serve it dense"
        )
    if model.head_dim not in (64, 128):
        raise refuse(
            "--model-path",
            model_path,
            "head_dim 64 or 128",
            f"this model has {model.head_dim}: serve it dense",
        )
    if getattr(model, "v_head_dim", model.head_dim) != model.head_dim:
        raise refuse("--model-path", model_path, "equal key and value head_dim", "serve it dense")
    if not model.is_generation:
        raise refuse(
            "--model-path",
            model_path,
            "generative models",
            "embedding models do not decode: serve it dense",
        )


def check_layer(layer: Any) -> None:
    """Refuse what only the layer itself reveals: its own window, cross attention.

    Raises:
        ConfigError: names the layer and the property.
    """
    where = f"layer {layer.layer_id}"
    if layer.sliding_window_size > -1:
        raise refuse(
            "--model-path",
            where,
            "full attention",
            "this layer uses a sliding window: serve it dense",
        )
    if layer.is_cross_attention:
        raise refuse(
            "--model-path", where, "self attention", "this layer attends across: serve it dense"
        )
    if layer.qk_head_dim != layer.v_head_dim:
        raise refuse("--model-path", where, "equal key and value head_dim", "serve it dense")
