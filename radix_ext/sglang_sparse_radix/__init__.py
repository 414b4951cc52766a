# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool and radix cache with selection planes beside the KV pages.

Importing this package imports neither SGLang nor the pool: `planes_spec` is plain, the rest
(`pool`, `allocator`, `radix_cache`) is imported where SGLang is running.
"""

from sglang_sparse_radix.planes_spec import PlaneSpec, plane_bytes_per_token

__all__ = ["PlaneSpec", "plane_bytes_per_token"]
