# SPDX-License-Identifier: Apache-2.0
"""The hook that sizes a KV pool in host memory: SGLang's allocator counts slots on the host.

Seams (SGLang 0.5.17, ``mem_cache/kv_cache_configurator.py: KVCacheConfigurator``):
``_resolve_memory_pool_config``, ``_profile_available_bytes``, ``_apply_token_constraints``,
``resolve_max_num_reqs``; ``model_executor/pool_configurator.py: MemoryPoolConfig``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_sparse.launch import attach, placed_launch_of
from sglang_sparse.placed import cell_bytes, free_beside, host_pages, refuse_device
from sglang_sparse.pools import plane_spec, refuse_fp8

_INT32_BYTES = 4


def resolve_pool_config(
    original: Callable[..., Any], configurator: Any, pre_model_load_memory: int
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._resolve_memory_pool_config``: tokens of the host.

    The device has ``device_bytes`` (unset: what is left), and for each token its planes and where
    its blocks lie.

    Raises:
        ConfigError: the memory of the host or of the device holds no page, or KV is in fp8.
    """
    launch = placed_launch_of(configurator.server_args)
    if launch is None or configurator.is_draft_worker:
        return original(configurator, pre_model_load_memory)
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

    from sglang_sparse_kernels.common import FP8
    from sglang_sparse_radix.pool import extra_cell_bytes

    if configurator.kv_cache_dtype == FP8:
        raise refuse_fp8("frames in fp8 are not tested yet")
    device_bytes, host_bytes = launch.config.placement.room
    page, layers = configurator.page_size, configurator.layer_info.num_effective_layers
    beside = free_beside(host_bytes)
    model, size = configurator.model_config, configurator.kv_cache_dtype.itemsize
    blocks = layers * model.get_num_kv_heads(1)
    on_host = host_pages(launch.config, cell_bytes(model, layers, size))
    free = configurator._profile_available_bytes(pre_model_load_memory)
    if configurator.device == "cpu":
        # Planes and frames lie beside the host's KV.
        free = min(free, beside)
    free -= device_bytes
    of_a_page = extra_cell_bytes(plane_spec(launch), configurator, layers) * page
    of_a_page += _INT32_BYTES * blocks
    on_device = free // of_a_page
    if on_device < 1:
        raise refuse_device(device_bytes, free + device_bytes, "free")
    tokens = configurator._apply_token_constraints(min(on_host, on_device) * page) // page * page
    if not device_bytes:
        free -= (tokens // page + 1) * of_a_page
        attach(configurator.server_args, replace(launch, free=free))
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=configurator.resolve_max_num_reqs(tokens),
        mem_fraction_static=configurator.server_args.mem_fraction_static,
    )
