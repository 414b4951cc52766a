# SPDX-License-Identifier: Apache-2.0
"""One decode step of one layer: a list of stages over one context."""

from .frames import (
    Ahead,
    AttendAhead,
    AttendFrames,
    AttendFramesUntil,
    Fetch,
    FetchAhead,
)
from .stages import (
    Attend,
    AttendUntil,
    BoundResidual,
    ExactScore,
    FindStop,
    PageScore,
    Rank,
    Select,
    SketchScore,
)
from .types import Stage, StepContext, decode_step, selecting_queries

__all__ = [
    "Ahead",
    "Attend",
    "AttendAhead",
    "AttendFrames",
    "AttendFramesUntil",
    "AttendUntil",
    "BoundResidual",
    "ExactScore",
    "Fetch",
    "FetchAhead",
    "FindStop",
    "PageScore",
    "Rank",
    "Select",
    "SketchScore",
    "Stage",
    "StepContext",
    "decode_step",
    "selecting_queries",
]
