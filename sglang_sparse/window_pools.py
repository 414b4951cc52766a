# SPDX-License-Identifier: Apache-2.0
"""Hooks that size and build two pools, where streaming heads hold their windows only.

Seams: ``model_executor/model_runner.py: ModelRunner.init_kv_cache_configurator``
(reads ``is_hybrid_swa``, ``sliding_window_size``), ``model_executor/pool_configurator.py:
create_memory_pool_configurator``, ``HybridSWAPoolConfigurator``, ``mem_cache/
kv_cache_configurator.py: KVCacheConfigurator._build_token_to_kv_pool``,
``_build_token_to_kv_pool_allocator``; what one request holds follows from ``mem_cache/
unified_cache/components: SWAComponent.acquire_component_lock`` and
``managers/schedule_policy.py: PrefillAdder``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse import compat
from sglang_sparse.checks import refuse
from sglang_sparse.config import SparseConfig
from sglang_sparse.launch import SparseLaunch, windowed_launch_of
from sglang_sparse.pools import implementation, plane_spec, refuse_fp8

if TYPE_CHECKING:
    from sglang_sparse_radix.split_pool import SplitShape


def heads_of_groups(launch: SparseLaunch, kv_heads: int) -> tuple[int, int]:
    """KV heads of a layer that hold every token, and streaming ones, of ``kv_heads``."""
    streaming = len(launch.config.heads.streams_in(0))
    return kv_heads - streaming, streaming


def announce_windows(original: Callable[..., None], runner: Any, *args: Any) -> None:
    """AROUND hook on ``ModelRunner.init_kv_cache_configurator``: SGLang is to see two pools."""
    launch = windowed_launch_of(runner.server_args)
    if launch is not None and not runner.is_draft_worker:
        runner.is_hybrid_swa = True
        runner.sliding_window_size = launch.config.heads.window[1]
    original(runner, *args)


def create_configurator(original: Callable[..., Any], kvc: Any) -> Any:
    """AROUND hook on ``create_memory_pool_configurator``: sizes by heads, not by layers.

    Raises:
        ConfigError: KV is in fp8.
    """
    launch = windowed_launch_of(kvc.server_args)
    if launch is None or kvc.is_draft_worker:
        return original(kvc)
    from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator

    from sglang_sparse_kernels.common import FP8
    from sglang_sparse_radix.planes_spec import plane_bytes_per_token

    if kvc.kv_cache_dtype == FP8:
        raise refuse_fp8("windows in fp8 are not tested yet")
    model, layers = kvc.model_config, kvc.layer_info.num_effective_layers
    heads, window_heads = heads_of_groups(launch, model.get_num_kv_heads(1))
    row = 2 * model.head_dim * kvc.kv_cache_dtype.itemsize * layers
    spec = plane_spec(launch)
    planes = plane_bytes_per_token(
        spec,
        head_num=heads,
        head_dim=model.head_dim,
        page_size=kvc.page_size,
        kv_dtype=kvc.kv_cache_dtype,
        num_layers=len(spec.layers(kvc.layer_info.start_layer, layers)),
    )
    config, share = launch.config, launch.config.retention.window_share
    chunk = _chunk_of(kvc)

    class SplitPoolConfigurator(HybridSWAPoolConfigurator):
        """SGLang's division of memory between two pools, with the bytes of two groups of heads."""

        def __init__(self) -> None:
            self._full_layers_num = self._swa_layers_num = layers
            self._enable_unified_memory = False  # 0.5.23 asks
            self._swa_full_tokens_ratio = share
            self._sliding_window_size, self._page_size = (
                sum(config.heads.window),
                kvc.page_size,
            )
            self._cell_size = row * (heads + share * window_heads) + planes

        def _solve_pool_sizes(self, max_total_num_tokens: int, page_size: int) -> Any:
            _check_share(config, int(max_total_num_tokens * share), page_size, chunk)
            return super()._solve_pool_sizes(max_total_num_tokens, page_size)

    return SplitPoolConfigurator()


def tokens_of_one_request(window: tuple[int, int], page_size: int, chunk: int = 0) -> int:
    """Tokens that streaming heads may hold of one request, where nothing else is held.

    The tree locks nodes as a whole, and none is longer than a window: the sinks, and up to two
    windows. A third window is what the request computes or decodes behind them; SGLang gives back
    what left it only every ``SGLANG_SWA_EVICTION_INTERVAL`` steps, and keeps a page free.
    With fewer, a prompt may wait for a place forever (``PrefillAdder.add_chunked_req``).

    Args:
        window: sinks and local tokens.
        page_size: tokens of a page.
        chunk: tokens that a prompt waits for at once.
    """
    from sglang.srt.environ import envs

    sink, local = window
    late = max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
    return int(sink + 2 * local + max(local + late, chunk) + 2 * page_size)


def _chunk_of(kvc: Any) -> int:
    """Tokens of a prompt that wait for room at once."""
    if not compat.current().WAITS_FOR_WHOLE_CHUNKS:
        return 0
    chunk = compat.resolved(kvc.server_args).chunked_prefill_size
    return int(chunk) if (chunk or 0) > 0 else int(kvc.model_config.context_len)


def _check_share(config: SparseConfig, tokens: int, page_size: int, chunk: int) -> None:
    """Refuse a window pool of ``tokens`` that is too small to finish one request."""
    need = tokens_of_one_request(config.heads.window, page_size, chunk)
    if tokens < need:
        raise refuse(
            "--sparse-config",
            f"retention.share={config.retention.window_share:g}",
            f"a share that holds {need} tokens",
            f"{tokens} tokens of streaming heads fit: raise retention.share, or the memory of KV"
            + (", or lower --chunked-prefill-size" if chunk else ""),
        )


def build_token_to_kv_pool(
    original: Callable[..., Any], configurator: Any, *, sizes: Any, **kwargs: Any
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._build_token_to_kv_pool``: a pool a group of heads."""
    launch = windowed_launch_of(configurator.server_args)
    if launch is None or configurator.is_draft_worker:
        return original(configurator, sizes=sizes, **kwargs)
    from sglang_sparse_radix.pool import bind_pool_class
    from sglang_sparse_radix.split_pool import SplitHeadKVPool

    model, layers = configurator.model_config, configurator.layer_info
    args = configurator.server_args
    pool_class = bind_pool_class(plane_spec(launch), implementation(compat.resolved(args).device))
    return SplitHeadKVPool(
        pool_class,
        _shape(launch, sizes, model.get_num_kv_heads(1)),
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        head_dim=model.head_dim,
        layer_num=layers.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=args.enable_memory_saver,
        start_layer=layers.start_layer,
        end_layer=layers.end_layer,
    )


def _shape(launch: SparseLaunch, sizes: Any, kv_heads: int) -> SplitShape:
    from sglang_sparse_radix.split_pool import SplitShape

    heads, window_heads = heads_of_groups(launch, kv_heads)
    sink, local = launch.config.heads.window
    return SplitShape(
        tokens=sizes.full_max_total_num_tokens,
        window_tokens=sizes.swa_max_total_num_tokens,
        heads=heads,
        window_heads=window_heads,
        sink=sink,
        local=local,
    )


def build_allocator(
    original: Callable[..., Any], configurator: Any, *, token_to_kv_pool: Any, **kwargs: Any
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._build_token_to_kv_pool_allocator``: of both pools."""
    from sglang_sparse_radix.split_pool import SplitHeadKVPool, make_allocator

    if not isinstance(token_to_kv_pool, SplitHeadKVPool):
        return original(configurator, token_to_kv_pool=token_to_kv_pool, **kwargs)
    return make_allocator(token_to_kv_pool, need_sort=False)
