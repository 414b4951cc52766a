# SPDX-License-Identifier: Apache-2.0
"""Metadata planes beside the KV rows, and their update where K was written."""

from .api import update_planes
from .reference import (
    by_page,
    cuboid_mean,
    dequantize_sketch,
    quantize_sketch,
    sketch_values,
)
from .types import (
    SCALE_DTYPE,
    SKETCH_DTYPES,
    KeySketch,
    PageCuboids,
    PlaneBuffers,
    PlaneShape,
    SketchFormat,
    has_scale,
    pages_per_run,
    tokens_per_element,
)

__all__ = [
    "SCALE_DTYPE",
    "SKETCH_DTYPES",
    "KeySketch",
    "PageCuboids",
    "PlaneBuffers",
    "PlaneShape",
    "SketchFormat",
    "by_page",
    "cuboid_mean",
    "dequantize_sketch",
    "has_scale",
    "pages_per_run",
    "quantize_sketch",
    "sketch_values",
    "tokens_per_element",
    "update_planes",
]
