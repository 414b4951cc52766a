# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool and radix cache with selection planes beside the KV pages.

Importing this package imports neither SGLang nor the pool: `planes*` are plain, the rest
(`pool`, `allocator`, `radix_cache`) is imported where SGLang is running.
"""

from sglang_sparse_radix.planes import PageBounds, PageDigest, Plane, SketchPlane
from sglang_sparse_radix.planes_spec import PlaneSpec, plane_bytes_per_token

__all__ = [
    "PageBounds",
    "PageDigest",
    "Plane",
    "PlaneSpec",
    "SketchPlane",
    "plane_bytes_per_token",
]
