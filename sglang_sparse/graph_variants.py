# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size: one dense, one sparse.

A captured graph cannot branch, and kernels that only find out that they have nothing to do still
cost a launch in every layer. So each batch size is captured twice, and a batch whose rows are all
short replays the dense graph: the inner backend's kernels, as if this package were not there, plus
one plane update a step. Which graph is known on the host, from ``seq_lens_cpu``, without a sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from sglang_sparse.launch import launch_of

Variant = Literal["dense", "sparse"]
VARIANTS: tuple[Variant, ...] = ("sparse", "dense")


def capture_one_stream(
    original: Callable[..., None], runner: Any, stream_idx: int | None = None
) -> None:
    """AROUND hook on ``DecodeCudaGraphRunner._capture_one_stream``: capture once a variant."""
    if launch_of(runner.model_runner.server_args) is None:
        original(runner, stream_idx)
        return
    for variant in VARIANTS:
        runner.attn_backend.variant_to_capture = variant
        original(runner, stream_idx)


def make_graph_key(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on ``DecodeCudaGraphRunner._make_graph_key``: the variant is part of the key.

    The runner asks for the key after ``init_forward_metadata_out_graph`` chose the variant.
    """
    key = original(runner, *args, **kwargs)
    if launch_of(runner.model_runner.server_args) is None:
        return key
    return replace(key, variant_label=runner.attn_backend.variant)
