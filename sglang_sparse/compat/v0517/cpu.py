# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.17 on a CPU: what it takes to keep it from Triton and NCCL there.

Seams: ``platforms/interface.py: SRTPlatform``, ``mem_cache/kv_cache_configurator.py:
KVCacheConfigurator._build_oot_mha_kv_pool``, ``utils/common.py: support_triton``,
``mem_cache/pool_host/mha.py: get_mha_host_pool_cls``, ``distributed/parallel_state.py:
init_model_parallel_group``.
"""

from collections.abc import Callable
from typing import Any

from sglang_sparse.native_cpu import NativeCpuPlatform


class CpuPlatform(NativeCpuPlatform):
    """The CPU platform with pool and allocator, which 0.5.17 asks an out-of-tree platform for."""

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sglang_sparse.pools import kv_pool_class

        return MHATokenToKVPool if _of_a_draft_model else kv_pool_class()

    def get_paged_allocator_cls(self) -> type:
        from sglang_sparse_radix.allocator import TorchPagedTokenToKVPoolAllocator

        return TorchPagedTokenToKVPoolAllocator


_of_a_draft_model = False


def build_oot_mha_kv_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """AROUND hook on ``KVCacheConfigurator._build_oot_mha_kv_pool``: a draft model has no planes.

    It asks the platform for a class without saying for which model.
    """
    global _of_a_draft_model
    _of_a_draft_model = configurator.is_draft_worker
    try:
        return original(configurator, **kwargs)
    finally:
        _of_a_draft_model = False


def support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """AROUND hook on ``utils.common.support_triton``: the sparse backend on a CPU has no Triton."""
    from sglang_sparse.checks import BACKEND
    from sglang_sparse.compat.models import current_server_args
    from sglang_sparse.pools import implementation

    if backend == BACKEND:
        return implementation(current_server_args().device) == "triton"
    return original(backend)


def get_mha_host_pool_cls(original: Callable[..., type], device_pool: Any) -> type:
    """AROUND hook on ``pool_host.mha.get_mha_host_pool_cls``: one of plain copies on the CPU."""
    if str(device_pool.device) != "cpu":
        return original(device_pool)
    from sglang_sparse_radix.host_pool import PlainHostPool

    return PlainHostPool


def init_model_parallel_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on ``distributed.parallel_state.init_model_parallel_group``.

    On the CPU platform ranks speak through gloo, without communicators of a GPU.
    """
    from sglang.srt.platforms import current_platform

    if isinstance(current_platform, NativeCpuPlatform):
        kwargs |= dict.fromkeys(_GPU_COMMUNICATORS, False)
    return original(*args, **kwargs)


_GPU_COMMUNICATORS = (
    "use_pynccl",
    "use_custom_allreduce",
    "use_mscclpp_allreduce",
    "use_torch_symm_mem_allreduce",
)
