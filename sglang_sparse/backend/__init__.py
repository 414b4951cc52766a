# SPDX-License-Identifier: Apache-2.0
"""The attention backend ``sparse``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse.launch import bounded_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


def create_backend(runner: Any) -> AttentionBackend:
    """Factory for SGLang's attention registry; ``runner`` is a ``ModelRunner``."""
    if bounded_of(runner.server_args) is not None:
        from sglang_sparse.backend.retained import RetainedAttentionBackend

        return RetainedAttentionBackend(runner)
    from sglang_sparse.backend.attention import SparseAttentionBackend

    return SparseAttentionBackend(runner)
