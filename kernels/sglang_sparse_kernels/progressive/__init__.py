# SPDX-License-Identifier: Apache-2.0
"""Attention over ranked units that stops when a share of the attention mass is reached."""

from .api import progressive_decode_attention, rank_units, remaining_bounds
from .types import (
    COUNTERS,
    MAX_RANKED_UNITS,
    MICROBATCHES,
    ProgressiveWorkspace,
    make_progressive_workspace,
    num_items,
    progressive_row_bytes,
)

__all__ = [
    "COUNTERS",
    "MAX_RANKED_UNITS",
    "MICROBATCHES",
    "ProgressiveWorkspace",
    "make_progressive_workspace",
    "num_items",
    "progressive_decode_attention",
    "progressive_row_bytes",
    "rank_units",
    "remaining_bounds",
]
