# SPDX-License-Identifier: Apache-2.0
"""Gives SGLang a CPU platform, so that the real server runs on machines without an accelerator.

SGLang's own ``--device cpu`` needs compiled AMX kernels that PyPI does not carry. An out-of-tree
platform that reports a plain CPU makes every operator take its native PyTorch form instead.
Entry point: ``sglang.srt.platforms``; :func:`activate` returns None wherever an accelerator is,
so installing this package never changes what a GPU machine does. The class is in
:mod:`sglang_sparse.native_cpu`: SGLang calls :func:`activate` while it imports what that needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_sparse import compat, devices

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig

CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"

# SGLang would size its pools to fill the host's memory, and its scheduler would spin while idle.
MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 16


def activate() -> str | None:
    """Dotted name of the CPU platform class, or None where something else should serve."""
    return compat.current().CPU_PLATFORM if devices.is_plain_cpu() else None


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Which cores each rank runs on, as SGLang reads it: ``0,1|2,3``.

    SGLang itself wants a NUMA node for each rank. If there are fewer cores than ranks, ranks share
    cores.
    """
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def build_multimem(original: Callable[..., Any], gatherer: Any, x: torch.Tensor) -> Any:
    """AROUND hook on ``triton_symm_mem_ag.MultimemAllGatherer._build``, which a CPU skips.

    It would look for symmetric memory of GPUs for half a minute, at the server's first token.
    """
    return None if x.device.type == "cpu" else original(gatherer, x)


def keep_heads(original: Callable[..., Any], model: ModelConfig, *args: Any, **named: Any) -> Any:
    """AROUND hook on ``configs/update_config.py: adjust_config_with_unaligned_cpu_tp``.

    It would add empty heads to a model whose KV heads ranks do not divide. Only SGLang's own CPU
    engine loads weights for these. Without them ranks have copies of KV heads, as on GPUs.
    """
    return model if devices.is_plain_cpu() else original(model, *args, **named)
