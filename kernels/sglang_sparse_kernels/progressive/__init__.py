# SPDX-License-Identifier: Apache-2.0
"""Attention over ranked units that stops when a share of the attention mass is reached."""

from .api import progressive_decode_attention, rank_units, residual_bounds
from .rounds import attend_round, begin_rounds
from .rounds_state import Rounds
from .types import (
    COUNTERS,
    MAX_RANKED_UNITS,
    MICROBATCHES,
    MORE_TOKENS,
    ROUNDS,
    MassStop,
    ProgressiveWorkspace,
    StopState,
    make_progressive_workspace,
    num_chunks,
    num_stop_checks,
    progressive_row_bytes,
)

__all__ = [
    "COUNTERS",
    "MAX_RANKED_UNITS",
    "MICROBATCHES",
    "MORE_TOKENS",
    "ROUNDS",
    "MassStop",
    "ProgressiveWorkspace",
    "Rounds",
    "StopState",
    "attend_round",
    "begin_rounds",
    "make_progressive_workspace",
    "num_chunks",
    "num_stop_checks",
    "progressive_decode_attention",
    "progressive_row_bytes",
    "rank_units",
    "residual_bounds",
]
