# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size, as the variants that SGLang 0.5.23 captures and picks itself.

Seams: ``layers/attention/graph_variants.py: AttentionGraphVariants``,
``create_attention_graph_variants``; ``model_executor/runner/decode_cuda_graph_runner.py:
DecodeCudaGraphRunner._resolve_attention_variant``, which SGLang calls before it plans a batch and
again before it replays one that was planned earlier, within a forward or, for drafts, before it;
``model_executor/runner_utils/capture_mode.py: get_capture_attention_variant``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from sglang_sparse.graph_variants import VARIANTS, Variant
from sglang_sparse.launch import selecting_launch_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class SparseGraphVariants:
    """The labels of SGLang's ``AttentionGraphVariants``: a dense and a sparse graph.

    It has no ``select``: the runner's backend chooses, see :func:`resolve_attention_variant`.
    """

    capture_labels: ClassVar[tuple[str, ...]] = VARIANTS


def create_attention_graph_variants(original: Callable[[Any], Any], hf_config: Any) -> Any:
    """AROUND hook on ``graph_variants.create_attention_graph_variants``."""
    from sglang_sparse.compat.models import current_server_args

    if selecting_launch_of(current_server_args()) is None:
        return original(hf_config)
    return SparseGraphVariants()


def resolve_attention_variant(
    original: Callable[..., str | None], runner: Any, forward_batch: ForwardBatch, bs: int
) -> str | None:
    """AROUND hook on ``DecodeCudaGraphRunner._resolve_attention_variant``: the backend chooses."""
    if not isinstance(runner.attention_graph_variants, SparseGraphVariants):
        return original(runner, forward_batch, bs)
    variant: Variant = runner.attn_backend.select_variant(forward_batch)
    return variant


def variant_being_captured() -> Variant:
    """The variant that SGLang's capture loop is at."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

    return cast("Variant", get_capture_attention_variant())
