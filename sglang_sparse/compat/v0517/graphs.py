# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size in SGLang 0.5.17, which captures one and knows no variants.

Seam: ``model_executor/runner/decode_cuda_graph_runner.py: DecodeCudaGraphRunner``.
"""

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
    if not _has_variants(runner):
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
    if not _has_variants(runner):
        return key
    return replace(key, variant_label=runner.attn_backend.variant)


def _has_variants(runner: Any) -> bool:
    """Whether a runner captures both variants: not for a draft model, nor where KV is fetched."""
    model = runner.model_runner
    launch = selecting_launch_of(model.server_args)
    return launch is not None and not (model.is_draft_worker or launch.config.placement.on_host)
