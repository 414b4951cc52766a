# SPDX-License-Identifier: Apache-2.0
"""Refusals at start. Each is one line with flag, value, what is allowed, and what to do.

Flags are checked before SGLang resolves them, so that the user reads this line and not a later
failure. The model is checked from its ``config.json``, before any weight is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_sparse import compat, devices
from sglang_sparse.config import ConfigError, SparseConfig, calibration_command
from sglang_sparse_radix.refusals import Rule, rules_for, unsupported_switch

if TYPE_CHECKING:
    import argparse

    from sglang.srt.configs.model_config import ModelConfig

BACKEND = "sparse"
MAX_GROUP = 16  # query heads a KV head that the kernels take

_OFF = (None, False)
_LORA = "that prefixes of two adapters stay apart where KV saw sparse attention is not tested"

# On top of what the planes and the tree cannot follow (sglang_sparse_radix.refusals).
ATTENTION_RULES = (
    Rule("prefill_attention_backend", (None, BACKEND), "planes are built in prefill"),
    Rule("decode_attention_backend", (None, BACKEND), "planes are built in prefill"),
    Rule(
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "fp8_e4m3", None),
        "planes and kernels read 16-bit or fp8 e4m3 keys",
    ),
    Rule(
        "quantization_param_path",
        (None,),
        "SGLang divides K and V by its scales and never multiplies by them",
    ),
    Rule("enable_mixed_chunk", _OFF, "decode rows of a mixed batch would run dense"),
    Rule("enable_dp_attention", _OFF, "idle ranks are not planned yet"),
    Rule("attn_dp_size", (1, None), "idle ranks are not planned yet"),
    Rule("enable_two_batch_overlap", _OFF, "the plan covers one batch at a time"),
    Rule("enable_single_batch_overlap", _OFF, "the plan covers one batch at a time"),
    Rule("enable_lora", _OFF, _LORA),
    Rule("lora_paths", (None, [], {}), _LORA),
    Rule("enable_deterministic_inference", _OFF, "the number of KV splits depends on the batch"),
    Rule("speculative_adaptive", _OFF, "graphs are captured for one number of draft tokens"),
    Rule("enable_multi_layer_eagle", _OFF, "drafts of several layers in turn are not tested"),
    Rule("speculative_draft_window_size", (None,), "a draft model with a window is not tested"),
    Rule("speculative_use_rejection_sampling", _OFF, "other rules of acceptance are not tested"),
    Rule("speculative_use_block_verification", _OFF, "other rules of acceptance are not tested"),
    Rule(
        "speculative_draft_kv_cache_dtype",
        (None, "auto", "bf16", "bfloat16"),
        "fp8 KV is not tested with draft tokens",
    ),
    Rule("dp_size", (1, None), "copies of the model behind one server are not tested"),
    Rule("nnodes", (1, None), "ranks on several hosts are not tested"),
    Rule("grpc_mode", _OFF, "its requests bypass the check of custom_params"),
    Rule("smg_grpc_mode", _OFF, "its requests bypass the check of custom_params"),
    Rule("grpc_port", (None,), "its requests bypass the check of custom_params"),
    Rule("sidecar", (None,), "its requests bypass the check of custom_params"),
    Rule("use_ray", _OFF, "schedulers in Ray actors load no plugins"),
    Rule("encoder_only", _OFF, "an encoder does not decode"),
    Rule("pp_size", (1, None), "what later pipeline stages count is not gathered yet"),
    Rule("enable_prefill_cp", _OFF, "context parallelism writes KV rows from other ranks"),
    Rule("enable_prefill_context_parallel", _OFF, "it writes KV rows from other ranks"),
    Rule("enable_mis", _OFF, "sparse rows do not follow the mask between items"),
    Rule("kv_canary", ("none", None), "it does not know the KV pool with planes"),
    Rule("rl_on_policy_target", (None,), "the number of KV splits depends on the batch"),
    Rule("enable_torch_compile", _OFF, "the backend cannot be traced"),
)


def refuse(flag: str, value: Any, allowed: str, remedy: str) -> ConfigError:
    """The error of every refusal in this module."""
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
    check_rules(args, (*rules_for(args), *ATTENTION_RULES))
    _check_host_tier(args)
    _check_tokenizers(args)
    if args.device is not None:
        _check_device(args.device)
    switch = unsupported_switch()
    if switch is not None:
        name, why = switch
        value = os.environ.get(name, "1")
        raise ConfigError(
            flag=name, value=value, problem=why, allowed="unset", remedy=f"unset {name}"
        )
    if args.page_size not in (None, config.page_size):
        raise refuse(
            "--page-size",
            args.page_size,
            f"unset or {config.page_size}",
            "set page_size (16, 32 or 64) in --sparse-config instead",
        )


def check_ranks(config: SparseConfig, layers: int, kv_heads: int, tp_size: int) -> None:
    """Refuse configurations whose lists heads of several tensor-parallel ranks would share.

    Args:
        config: the resolved configuration.
        layers, kv_heads: layers and KV heads of the whole model.
        tp_size: tensor-parallel ranks.

    Raises:
        ConfigError: a list is shared by heads of several ranks.
    """
    if tp_size == 1:
        return
    if config.score.lists(kv_heads) != kv_heads:
        raise refuse(
            "--tp-size", tp_size, "1 with score.pool=heads", "set score.pool to group, or drop it"
        )
    share = max(1, kv_heads // tp_size)
    for layer in range(layers):
        for head, taken in enumerate(config.layers.role(layer).heads or ()):
            if head // share != taken // share:
                raise refuse(
                    "--tp-size",
                    tp_size,
                    "ranks that no head map crosses",
                    f"head {head} of layer {layer} takes the list of head {taken}, which another "
                    f"rank has: run `{calibration_command('PATH', tp=tp_size)}`",
                )


def check_resolved(server_args: Any, config: SparseConfig) -> None:
    """Check the flags again, once SGLang has resolved them.

    SGLang rewrites flags for some models, and some can be set in several ways. So flags that were
    allowed before may now have other values.

    Raises:
        ConfigError: names the setting and its resolved value.
    """
    check_rules(server_args, (*rules_for(server_args), *ATTENTION_RULES))
    if server_args.attention_backend != BACKEND:
        raise refuse(
            "--model-path",
            server_args.model_path,
            "models that leave the backend to the user",
            f"SGLang serves this one with {server_args.attention_backend} only: serve it dense",
        )
    if server_args.page_size != config.page_size:
        raise refuse(
            "--model-path",
            server_args.model_path,
            f"models served with pages of {config.page_size} tokens",
            f"SGLang sets {server_args.page_size} for this one: serve it dense",
        )
    graphs = server_args.cuda_graph_config
    for phase, backend, fine in (
        ("prefill", graphs.prefill.backend, ("disabled", "breakable")),
        ("decode", graphs.decode.backend, ("disabled", "full")),
    ):
        if backend not in fine:
            raise refuse(
                f"--cuda-graph-backend-{phase}",
                backend,
                " or ".join(fine),
                f"set it to {fine[1]}: plans and plane updates need it",
            )
    chunk = server_args.chunked_prefill_size
    most = config.prefill.most_chunk
    if most is not None and not 0 < (chunk or 0) <= most:
        raise refuse(
            "--chunked-prefill-size",
            chunk,
            f"1 to {most} with prefill.kind={config.prefill.kind}",
            "set it, or prefill.kind to dense: a chunk's selections are kept to its last layer",
        )
    _check_device(server_args.device)
    on_cpu = server_args.device == "cpu"
    inner = ("auto", "torch_native") if on_cpu else ("auto", "flashinfer", "triton")
    if config.inner not in inner:
        raise refuse(
            "--sparse-config",
            f"inner={config.inner}",
            " or ".join(inner),
            f"set inner to auto: this server runs on {server_args.device}",
        )
    if not on_cpu and server_args.dtype in ("float32", "float"):
        raise refuse("--dtype", server_args.dtype, "auto, bfloat16 or float16", "drop it")


def _check_host_tier(args: Any) -> None:
    """Refuse KV in host memory on a version of SGLang where it was not tested."""
    if not getattr(args, "enable_hierarchical_cache", False):
        return
    if not compat.is_tested() or compat.current().hierarchical_tree_class() is None:
        raise refuse(
            "--enable-hierarchical-cache",
            True,
            f"sglang {compat.TESTED_SGLANG[0]}",
            f"drop it, or install that version: this one is {compat.sglang_version()}",
        )


def _check_tokenizers(args: Any) -> None:
    """Refuse several tokenizer processes of other servers than uvicorn, which alone was tested."""
    others = ("enable_http2", "enable_http_worker_reuseport")
    several = (args.tokenizer_worker_num or 1) > 1
    if several and any(getattr(args, name, False) for name in others):
        raise refuse(
            "--tokenizer-worker-num",
            args.tokenizer_worker_num,
            "1 with --enable-http2 or --enable-http-worker-reuseport",
            "drop one of them: processes that these start were not tested to check requests",
        )


def _check_device(device: str) -> None:
    """Refuse devices that neither the kernels nor the CPU platform serve.

    A ``--device cpu`` beside an accelerator, or with SGLANG_USE_CPU_ENGINE, is SGLang's AMX engine.
    """
    served = devices.served_device()
    if served is None:
        raise refuse(
            "--device",
            device,
            "an NVIDIA GPU, or a CPU without accelerator and SGLANG_USE_CPU_ENGINE",
            "serve it dense on this machine",
        )
    if device.split(":")[0] != served:
        raise refuse("--device", device, f"{served} on this machine", "drop it")


def check_rules(args: Any, rules: Iterable[Rule]) -> None:
    """Raise ConfigError for the first flag of ``args`` whose value its rule does not allow."""
    for rule in rules:
        value = getattr(args, rule.field, rule.allowed[0])
        if value not in rule.allowed:
            raise ConfigError(
                flag=rule.flag,
                value=str(value),
                problem=rule.why,
                allowed=rule.allowed_text,
                remedy=rule.remedy,
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
    group = model.num_attention_heads // model.get_total_num_kv_heads()
    if group > MAX_GROUP:
        raise refuse(
            "--model-path",
            model_path,
            f"1 to {MAX_GROUP} query heads a KV head",
            f"this model has {group}: serve it dense",
        )
    if getattr(model.hf_text_config, "attn_temperature_len", -1) > 0:
        raise refuse(
            "--model-path",
            model_path,
            plain,
            "this model scales logits with the position (attn_temperature_len): serve it dense",
        )
    if not model.is_generation:
        raise refuse(
            "--model-path",
            model_path,
            "generative models",
            "embedding models do not decode: serve it dense",
        )


def check_keywords(layer: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of attention that sparse rows would ignore.

    Args:
        layer: SGLang's ``RadixAttention``.
        keywords: arguments that the model passed by keyword: learned sinks, slopes, rotated halves.

    Raises:
        ConfigError: names the layer and the arguments.
    """
    given = sorted(name for name, value in keywords.items() if value is not None)
    if given:
        raise refuse(
            "--model-path",
            f"layer {layer.layer_id}",
            "attention of queries, keys and values alone",
            f"this layer also passes {', '.join(given)}: serve it dense",
        )


def check_layer(layer: Any) -> None:
    """Refuse properties that only the layer itself shows, such as a window of its own.

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
    if layer.xai_temperature_len > 0:
        raise refuse(
            "--model-path",
            where,
            "logits of one temperature",
            "this layer scales logits with the position: serve it dense",
        )
    if layer.attn_type.value != "decoder" or layer.pos_encoding_mode != "NONE":
        raise refuse(
            "--model-path",
            where,
            "causal attention with positions encoded in queries and keys",
            f"this layer has attention of type {layer.attn_type.value} and position encoding "
            f"{layer.pos_encoding_mode}: serve it dense",
        )
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise refuse(
            "--model-path",
            where,
            "logits capped by tanh, or not at all",
            f"this layer caps them by {layer.logit_capping_method}: serve it dense",
        )
