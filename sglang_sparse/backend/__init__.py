# SPDX-License-Identifier: Apache-2.0
"""The attention backend ``sparse``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_sparse.backend.attention import SparseAttentionBackend


def create_backend(runner: Any) -> SparseAttentionBackend:
    """Factory for SGLang's attention registry; ``runner`` is a ``ModelRunner``."""
    from sglang_sparse.backend.attention import SparseAttentionBackend

    return SparseAttentionBackend(runner)
