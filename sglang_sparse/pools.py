# SPDX-License-Identifier: Apache-2.0
"""Hooks that make SGLang build the pool with planes, and count the planes' bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_sparse import compat
from sglang_sparse.checks import refuse
from sglang_sparse.config import ConfigError
from sglang_sparse.launch import SparseLaunch, selecting_launch_of

if TYPE_CHECKING:
    from sglang_sparse_kernels.common import Impl
    from sglang_sparse_radix.planes_spec import PlaneSpec


def plane_spec(launch: SparseLaunch) -> PlaneSpec:
    """The planes that this configuration reads, for the layers that read them."""
    from sglang_sparse_radix.planes_spec import PlaneSpec

    config = launch.config
    planes = (*config.score.planes(), *config.budget.planes(config.score))
    return PlaneSpec(planes, read_by=lambda layer: config.layers.role(layer).selects)


def implementation(device: str) -> Impl:
    """``cpu`` on a CPU, ``triton`` elsewhere; follows the server's device, never a fallback."""
    return "cpu" if device == "cpu" else "triton"


def refuse_fp8(why: str) -> ConfigError:
    """The error of a checkpoint that asks for KV in fp8: ``auto`` is fp8 once it is loaded."""
    return ConfigError(
        flag="--kv-cache-dtype",
        value="auto",
        problem=f"this checkpoint makes it fp8_e4m3, and {why}",
        allowed="bf16 or bfloat16",
        remedy="start with --kv-cache-dtype bfloat16",
    )


def kv_pool_class() -> type:
    """The pool class of this process: with planes for a sparse server, SGLang's own otherwise."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_sparse_radix.pool import SparseMHATokenToKVPool, bind_pool_class

    server_args = compat.current_server_args()
    launch = selecting_launch_of(server_args)
    if launch is None:
        return MHATokenToKVPool
    base = SparseMHATokenToKVPool
    if launch.config.placement.on_host:
        from sglang_sparse_radix.host_kv import HostKVPool as base
    impl = implementation(compat.resolved(server_args).device)
    return bind_pool_class(plane_spec(launch), impl, base)


def build_mha_kv_pool(
    original: Callable[..., Any], configurator: Any, *, mha_pool_class: type, **kwargs: Any
) -> Any:
    """AROUND hook on ``KVCacheConfigurator._build_mha_kv_pool``: swap the pool class.

    Raises:
        ConfigError: the host lacks the memory that `placement` asks for.
    """
    launch = _planes_of(configurator)
    if launch is None:
        return original(configurator, mha_pool_class=mha_pool_class, **kwargs)
    from sglang_sparse_radix.host_kv import HostMemoryError

    try:
        return original(configurator, mha_pool_class=kv_pool_class(), **kwargs)
    except HostMemoryError as error:
        raise refuse(
            "--sparse-config",
            f"placement.host_bytes={launch.config.placement.room[1]}",
            "memory that can be pinned",
            f"{error}: lower it, or raise the limit of locked memory (ulimit -l)",
        ) from error


def compute_cell_size(
    original: Callable[..., int], configurator: Any, kvc: Any, num_layers: int
) -> int:
    """AROUND hook on ``DefaultPoolConfigurator._compute_cell_size``: KV bytes plus plane bytes.

    Bytes of one token over all local layers, so that ``max_total_num_tokens`` stays honest.
    """
    cell: int = original(configurator, kvc, num_layers)
    launch = _planes_of(kvc)
    if launch is None:
        return cell
    from sglang_sparse_radix.pool import extra_cell_bytes

    return cell + extra_cell_bytes(plane_spec(launch), kvc, num_layers)


def _planes_of(configurator: Any) -> SparseLaunch | None:
    """The launch whose planes a ``KVCacheConfigurator``'s pool has; None for a draft model's."""
    return None if configurator.is_draft_worker else selecting_launch_of(configurator.server_args)
