# SPDX-License-Identifier: Apache-2.0
"""The attention backend ``sparse``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_sparse import banner
from sglang_sparse.launch import bounded_of, placed_launch_of, windowed_launch_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

logger = logging.getLogger(__name__)


def create_backend(runner: Any) -> AttentionBackend:
    """Factory for SGLang's attention registry; ``runner`` is a ``ModelRunner``.

    A draft model attends densely: its KV has no planes.
    """
    if bounded_of(runner.server_args) is not None:
        from sglang_sparse.backend.retained import RetainedAttentionBackend

        return RetainedAttentionBackend(runner)
    if runner.is_draft_worker:
        from sglang_sparse.backend.inner import dense_backend

        return dense_backend(runner)
    if windowed_launch_of(runner.server_args) is not None:
        from sglang_sparse.backend.windowed import WindowedAttentionBackend as Selecting
    elif placed_launch_of(runner.server_args) is not None:
        from sglang_sparse.backend.hosted import HostedAttentionBackend as Selecting
    else:
        from sglang_sparse.backend.attention import SparseAttentionBackend as Selecting
    backend = Selecting(runner)
    logger.info(banner.text(backend.facts()))
    return backend
