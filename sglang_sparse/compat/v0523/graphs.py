# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size, as the variants that SGLang 0.5.23 captures and picks itself.

Seams: ``layers/attention/graph_variants.py: AttentionGraphVariants``,
``create_attention_graph_variants``; ``model_executor/runner_utils/capture_mode.py:
get_capture_attention_variant``; ``model_executor/forward_context.py: get_attn_backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from sglang_sparse.graph_variants import VARIANTS, Variant
from sglang_sparse.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class SparseGraphVariants:
    """SGLang's ``AttentionGraphVariants`` with a dense and a sparse graph."""

    capture_labels: ClassVar[tuple[str, ...]] = VARIANTS

    def select(self, forward_batch: ForwardBatch) -> Variant:
        """The graph of a decode batch, which the backend then plans."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        variant: Variant = get_attn_backend().select_variant(forward_batch)
        return variant


def create_attention_graph_variants(original: Callable[[Any], Any], hf_config: Any) -> Any:
    """AROUND hook on ``graph_variants.create_attention_graph_variants``."""
    from sglang_sparse.compat.models import current_server_args

    if launch_of(current_server_args()) is None:
        return original(hf_config)
    return SparseGraphVariants()


def variant_being_captured() -> Variant:
    """The variant that SGLang's capture loop is at."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

    return cast("Variant", get_capture_attention_variant())
