# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: tiles of consecutive queries share a selection (Kascade, section 3.4)."""

from .api import tile_attention, tile_mean, tile_score
from .types import TilePlan, plan_tiles, tile_budget, tile_tokens_of

__all__ = [
    "TilePlan",
    "plan_tiles",
    "tile_attention",
    "tile_budget",
    "tile_mean",
    "tile_score",
    "tile_tokens_of",
]
