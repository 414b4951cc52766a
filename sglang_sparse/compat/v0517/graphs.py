# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size in SGLang 0.5.17, which captures one and knows no variants.

Seam: ``model_executor/runner/decode_cuda_graph_runner.py: DecodeCudaGraphRunner``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_sparse.graph_variants import VARIANTS, Variant
from sglang_sparse.launch import selecting_launch_of

capturing: Variant = "dense"


def capture_one_stream(
    original: Callable[..., None], runner: Any, stream_idx: int | None = None
) -> None:
    """AROUND hook on ``DecodeCudaGraphRunner._capture_one_stream``: capture once a variant."""
    global capturing
    if selecting_launch_of(runner.model_runner.server_args) is None:
        original(runner, stream_idx)
        return
    for variant in VARIANTS:
        capturing = variant
        original(runner, stream_idx)


def make_graph_key(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on ``DecodeCudaGraphRunner._make_graph_key``: the variant is part of the key.

    The runner asks for the key after ``init_forward_metadata_out_graph`` chose the variant.
    """
    key = original(runner, *args, **kwargs)
    if selecting_launch_of(runner.model_runner.server_args) is None:
        return key
    return replace(key, variant_label=runner.attn_backend.variant)
