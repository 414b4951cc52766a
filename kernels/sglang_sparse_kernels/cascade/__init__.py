# SPDX-License-Identifier: Apache-2.0
"""Cascading KV cache: attention to a bounded number of tokens, and which tokens are kept.

Paper: Cascading KV Cache, arXiv:2406.17808. A request holds sinks, a window of sub-caches, and the
stride that is being filled. Eviction happens at the ends of strides, counted from the request's
start, so what is held follows from the tokens before and not from how they arrived.
"""

from .api import append_tokens, cascade_attention, close_strides
from .types import (
    AttentionAverage,
    CascadeBatch,
    CascadeShape,
    CascadeState,
    CascadeWorkspace,
    make_cascade_state,
    make_cascade_workspace,
    state_bytes,
)

__all__ = [
    "AttentionAverage",
    "CascadeBatch",
    "CascadeShape",
    "CascadeState",
    "CascadeWorkspace",
    "append_tokens",
    "cascade_attention",
    "close_strides",
    "make_cascade_state",
    "make_cascade_workspace",
    "state_bytes",
]
