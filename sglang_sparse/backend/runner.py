# SPDX-License-Identifier: Apache-2.0
"""Reads SGLang's model runner, and refuses what only shows once a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_parallel

from sglang_sparse import compat
from sglang_sparse.backend.heads import Heads
from sglang_sparse.checks import check_layer, refuse
from sglang_sparse.config import ConfigError
from sglang_sparse.launch import SparseLaunch, launch_of
from sglang_sparse.reach import check_reach
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def launch_of_runner(runner: ModelRunner) -> SparseLaunch:
    """The resolved flags; raises ConfigError if they never reached this process."""
    launch = launch_of(runner.server_args)
    if launch is None:
        raise ConfigError(
            flag="--attention-backend",
            value="sparse",
            problem="no sparse configuration reached this process",
            allowed="a start through sglang.launch_server, sglang serve or sglang.Engine",
            remedy="start it that way",
        )
    return launch


def heads_of(runner: ModelRunner) -> Heads:
    """Attention heads of this rank."""
    parallel, heads = get_parallel(), runner.model_config.get_total_num_kv_heads()
    return Heads(
        query=int(runner.model_config.num_attention_heads // parallel.attn_tp_size),
        kv=runner.token_to_kv_pool.head_num,
        dim=runner.token_to_kv_pool.head_dim,
        # With more ranks than KV heads, neighbours hold a copy of the same one.
        first_kv=int(parallel.attn_tp_rank * heads // parallel.attn_tp_size),
        total_kv=int(heads),
        ranks=int(parallel.attn_tp_size),
        rank=int(parallel.attn_tp_rank),
    )


def longest_chunk(runner: ModelRunner) -> int:
    """Most tokens of one prompt in a batch."""
    chunk = compat.resolved(runner.server_args).chunked_prefill_size or 0
    longest = int(runner.model_config.context_len)
    return min(chunk, longest) if chunk > 0 else longest


def check_runner(runner: ModelRunner) -> None:
    """Raise ConfigError for a loaded model or pool that is not supported."""
    pool, path = runner.token_to_kv_pool, runner.server_args.model_path
    resolved = launch_of_runner(runner).resolved
    check_reach(resolved, runner.model_config.context_len, runner.max_total_num_tokens)
    if not isinstance(pool, SparseMHATokenToKVPool):
        raise refuse(
            "--model-path",
            path,
            "models with the plain MHA KV pool",
            f"this model's pool is {type(pool).__name__}: serve it dense",
        )
    check_layers(runner)


def check_layers(runner: ModelRunner) -> None:
    """Refuse, with a ConfigError, models whose layers attend otherwise than the pool expects."""
    pool, path = runner.token_to_kv_pool, runner.server_args.model_path
    expected = set(range(pool.start_layer, pool.end_layer))
    layers = compat.attention_layers(runner.model)
    attending = {layer.layer_id for layer in layers}
    if attending != expected:
        raise refuse(
            "--model-path",
            path,
            "models in which every layer attends once through the KV pool",
            f"layers {sorted(attending ^ expected)} of this one do not: serve it dense",
        )
    for layer in layers:
        check_layer(layer)
