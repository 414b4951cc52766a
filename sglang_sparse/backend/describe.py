# SPDX-License-Identifier: Apache-2.0
"""The facts of a server, gathered for the banner, the metrics and ``/server_info``."""

import torch

from sglang_sparse import __version__, compat
from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.heads import Heads
from sglang_sparse.choices.build import Build
from sglang_sparse.config.axes import AXES
from sglang_sparse.facts import Facts
from sglang_sparse.graph_variants import VARIANTS
from sglang_sparse.launch import SparseLaunch
from sglang_sparse_kernels.common import FP8
from sglang_sparse_kernels.planes import SKETCH_DTYPES

_WORDS = {dtype: word for word, dtype in SKETCH_DTYPES.items()}


def gather_facts(
    launch: SparseLaunch,
    build: Build,
    heads: Heads,
    decode: DecodeSteps,
    extend: ExtendSteps,
    *,
    max_context: int,
    inner: str,
    captures_graphs: bool,
) -> Facts:
    """The facts of a server, gathered without waiting for its device.

    Args:
        launch: its resolved flags.
        build: its buffers.
        heads: attention heads of this rank.
        decode, extend: its batches so far.
        max_context: tokens of the longest request that the model takes.
        inner: name of the dense backend.
        captures_graphs: whether decode is captured in CUDA graphs.
    """
    config, pool, resolved = launch.config, build.pool, launch.resolved
    layers: dict[str, list[int]] = {}
    for layer in range(pool.start_layer, pool.end_layer):
        layers.setdefault(config.layers.role(layer).name, []).append(layer)
    streaming = {
        role: sum(len(config.heads.streams_in(layer)) for layer in ids)
        for role, ids in layers.items()
        if not role.startswith("dense")
    }
    low, high = config.request_range
    axes = config.model_dump(mode="json", include=set(AXES))
    planes = pool.planes.tensors()
    return Facts(
        version=__version__,
        method=resolved.method,
        source=resolved.source,
        preset_hash=resolved.hash,
        axes={axis: axes[axis] for axis in AXES},
        inner_backend=inner,
        implementation=build.impl,
        min_sparse_tokens=config.min_sparse_tokens,
        longest_row=compat.longest_row(max_context, pool.size, pool.page_size),
        page_size=pool.page_size,
        unit=config.unit,
        kv_heads=pool.head_num,
        first_kv_head=heads.first_kv,
        total_kv_heads=heads.total_kv,
        ranks=heads.ranks,
        layers=layers,
        streaming_heads=streaming,
        request_budget={"unit": config.budget.key, "least": low, "most": high},
        graphs={
            "decode": "captured" if captures_graphs else "off",
            "variants": list(VARIANTS) if captures_graphs else [],
        },
        plane_bytes={name: plane.nbytes for name, plane in planes.items()},
        plane_dtypes={
            name: _WORDS.get(plane.dtype, _name(plane.dtype)) for name, plane in planes.items()
        },
        kv_cache_dtype=_name(pool.dtype),
        kv_bytes=sum(pool.get_kv_size_bytes()) - pool.plane_bytes(),
        state_bytes=build.nbytes() + decode.nbytes(),
        step_tokens=build.limits.queries,
        decode_steps={**decode.planned},
        prefill_batches={**extend.planned},
        sglang=compat.sglang_version(),
        sglang_tested=list(compat.TESTED_SGLANG),
    )


def _name(kv_dtype: torch.dtype) -> str:
    """The value of ``--kv-cache-dtype`` that asks for rows of this dtype."""
    return "fp8_e4m3" if kv_dtype == FP8 else str(kv_dtype).removeprefix("torch.")
