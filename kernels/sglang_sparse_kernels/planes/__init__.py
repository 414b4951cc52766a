# SPDX-License-Identifier: Apache-2.0
"""Metadata planes beside the KV rows, and their update where K was written."""

from .api import update_planes
from .reference import cuboid_mean, dequantize_sketch, quantize_sketch
from .types import SKETCH_DTYPES, PlaneBuffers, SketchFormat

__all__ = [
    "SKETCH_DTYPES",
    "PlaneBuffers",
    "SketchFormat",
    "cuboid_mean",
    "dequantize_sketch",
    "quantize_sketch",
    "update_planes",
]
