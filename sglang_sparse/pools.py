# SPDX-License-Identifier: Apache-2.0
"""Hooks that put the pool with planes where SGLang would build its own, and count its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse import compat
from sglang_sparse.checks import BACKEND
from sglang_sparse.launch import SparseLaunch, launch_of

if TYPE_CHECKING:
    import torch

    from sglang_sparse_kernels.common import Impl
    from sglang_sparse_radix.planes_spec import PlaneSpec


def plane_spec(launch: SparseLaunch) -> PlaneSpec:
    """The planes that this configuration reads, of the layers that read them, and no other."""
    from sglang_sparse_radix.planes_spec import PlaneSpec

    config = launch.config
    planes = (*config.score.planes(), *config.budget.planes(config.score))
    return PlaneSpec(planes, read_by=lambda layer: config.layers.role(layer).selects)


def implementation(device: str) -> Impl:
    """``torch`` on a CPU, ``triton`` elsewhere; follows the server's device, never a fallback."""
    return "torch" if device == "cpu" else "triton"


def kv_pool_class() -> type:
    """The pool class of this process: with planes for a sparse server, SGLang's own otherwise."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_sparse_radix.pool import bind_pool_class

    server_args = compat.current_server_args()
    launch = launch_of(server_args)
    if launch is None:
        return MHATokenToKVPool
    return bind_pool_class(plane_spec(launch), implementation(server_args.device))


def build_mha_kv_pool(
    original: Callable[..., Any], configurator: Any, *, mha_pool_class: type, **kwargs: Any
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._build_mha_kv_pool``: swap the pool class."""
    if launch_of(configurator.server_args) is not None:
        mha_pool_class = kv_pool_class()
    return original(configurator, mha_pool_class=mha_pool_class, **kwargs)


def compute_cell_size(
    original: Callable[..., int], configurator: Any, kvc: Any, num_layers: int
) -> int:
    """AROUND hook on ``DefaultPoolConfigurator._compute_cell_size``: KV bytes plus plane bytes.

    Bytes of one token over all local layers, so that ``max_total_num_tokens`` stays honest.
    """
    cell: int = original(configurator, kvc, num_layers)
    launch = launch_of(kvc.server_args)
    if launch is None:
        return cell
    from sglang_sparse_radix.pool import extra_cell_bytes

    return cell + extra_cell_bytes(plane_spec(launch), kvc, num_layers)


def support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """AROUND hook on ``utils.common.support_triton``: the sparse backend on a CPU has no Triton."""
    if backend == BACKEND:
        return implementation(compat.current_server_args().device) == "triton"
    return original(backend)


def get_last_loc(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    """AROUND hook on ``mem_cache.allocation.get_last_loc``: its PyTorch form on the CPU."""
    if req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)
