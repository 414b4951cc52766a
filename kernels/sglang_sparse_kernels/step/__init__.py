# SPDX-License-Identifier: Apache-2.0
"""One decode step of one layer: a list of stages over one context."""

from .frames import AttendFrames, AttendFramesUntil, Fetch
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
from .types import Stage, StepContext, decode_step

__all__ = [
    "Attend",
    "AttendFrames",
    "AttendFramesUntil",
    "AttendUntil",
    "BoundResidual",
    "ExactScore",
    "Fetch",
    "FindStop",
    "PageScore",
    "Rank",
    "Select",
    "SketchScore",
    "Stage",
    "StepContext",
    "decode_step",
]
