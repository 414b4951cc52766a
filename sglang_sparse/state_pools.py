# SPDX-License-Identifier: Apache-2.0
"""Hooks that size and build a pool of state slots, for a retention that bounds what is held.

Memory is divided into state slots, one for each request that may run. What SGLang counts in tokens
is so much that every slot can have a request of the whole context length.

Seams (``mem_cache/kv_cache_configurator.py: KVCacheConfigurator``):
``_resolve_memory_pool_config``, ``_build_token_to_kv_pool``, ``_profile_available_bytes``,
``_apply_token_constraints``; ``model_executor/pool_configurator.py: MemoryPoolConfig``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse.checks import refuse
from sglang_sparse.launch import bounded_of
from sglang_sparse.pools import refuse_fp8

if TYPE_CHECKING:
    from sglang_sparse.choices.interfaces import BoundedRetention

# As many requests as SGLang itself would run at most, however small their states are.
MOST_SLOTS = 4096
_INT32_BYTES = FLOAT_BYTES = 4


def heads_of_rank(model: Any) -> tuple[int, int]:
    """(query heads, KV heads) of this rank. Ranks hold what their own heads keep."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel().attn_tp_size
    return model.num_attention_heads // ranks, model.get_num_kv_heads(ranks)


def _state_bytes(retention: BoundedRetention, configurator: Any) -> int:
    from sglang_sparse_kernels.cascade import state_bytes

    model = configurator.model_config
    return state_bytes(
        retention.shape(),
        layers=configurator.layer_info.num_effective_layers,
        kv_heads=heads_of_rank(model)[1],
        dim=model.head_dim,
        dtype=configurator.kv_cache_dtype,
    )


def slot_bytes(retention: BoundedRetention, configurator: Any) -> int:
    """Device bytes of one more running request: its state, its logits, its row of token slots."""
    model = configurator.model_config
    logits = heads_of_rank(model)[0] * retention.shape().rows * FLOAT_BYTES
    rows = model.context_len * _INT32_BYTES
    return int(_state_bytes(retention, configurator) + logits + rows)


def snapshot_bytes(retention: BoundedRetention, configurator: Any) -> int:
    """Device bytes of the states of prefixes."""
    return retention.kept_prefixes * _state_bytes(retention, configurator)


def resolve_pool_config(
    original: Callable[..., Any], configurator: Any, pre_model_load_memory: int
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._resolve_memory_pool_config``: slots, then tokens.

    Raises:
        ConfigError: ``--max-running-requests`` asks for more slots than memory holds, or KV is in
            fp8.
    """
    args = configurator.server_args
    retention = bounded_of(args)
    if retention is None:
        return original(configurator, pre_model_load_memory)
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

    from sglang_sparse_kernels.common import FP8

    if configurator.kv_cache_dtype == FP8:
        raise refuse_fp8("states hold keys as they are")
    each, kept = slot_bytes(retention, configurator), snapshot_bytes(retention, configurator)
    free = configurator._profile_available_bytes(pre_model_load_memory) - kept
    fit = max(0, free // each)
    slots = min(fit, MOST_SLOTS) if args.max_running_requests is None else args.max_running_requests
    if not 0 < slots <= fit:
        raise refuse(
            "--max-running-requests",
            args.max_running_requests,
            f"1 to {fit}" if fit else "more memory",
            f"a state slot takes {each / 2**20:.1f} MiB: lower retention.window, "
            "retention.snapshots or --max-running-requests, or raise --mem-fraction-static",
        )
    page = args.page_size
    tokens = slots * (-(-configurator.model_config.context_len // page) + 1) * page
    tokens = configurator._apply_token_constraints(tokens) // page * page
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=slots,
        mem_fraction_static=args.mem_fraction_static,
    )


def build_token_to_kv_pool(
    original: Callable[..., Any], configurator: Any, *, sizes: Any, **kwargs: Any
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._build_token_to_kv_pool``: the pool of state slots."""
    retention = bounded_of(configurator.server_args)
    if retention is None:
        return original(configurator, sizes=sizes, **kwargs)
    from sglang_sparse_radix.state_pool import StateKVPool

    model, layers = configurator.model_config, configurator.layer_info
    return StateKVPool(
        sizes.max_total_num_tokens,
        shape=retention.shape(),
        slots=sizes.max_running_requests,
        snapshots=retention.kept_prefixes,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        head_num=heads_of_rank(model)[1],
        head_dim=model.head_dim,
        layer_num=layers.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=configurator.server_args.enable_memory_saver,
        start_layer=layers.start_layer,
        end_layer=layers.end_layer,
    )
