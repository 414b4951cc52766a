# SPDX-License-Identifier: Apache-2.0
"""Per-page metadata kept beside the KV rows."""

from dataclasses import dataclass
from typing import Literal

import torch

SketchFormat = Literal["fp8", "int8", "bf16"]

SKETCH_DTYPES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
}
FP8_MAX = 448.0
INT8_MAX = 127.0


@dataclass(frozen=True)
class PlaneBuffers:
    """Planes of all layers, indexed by physical page; planes that nobody reads are None.

    L layers, H KV heads, D head dimension, P physical page size, u ``logical_page``.

    Attributes:
        page_min: [L, pages * P / u, H, D] in K's dtype, smallest key of a logical page.
        page_max: the same shape and dtype, largest key of a logical page.
        page_mean_low, page_mean_high: the same shape and dtype, ends of the cuboid-mean digest of a
            logical page (:func:`cuboid_mean`).
        key_sketch: [L, pages, H, D, P], float8_e4m3fn, int8 or bfloat16: K of a page with the
            token axis innermost, so that one channel of a page is contiguous.
        key_sketch_scale: [L, pages, H, P] float32, scale of each token, for int8 alone.
        logical_page: tokens a logical page (u).
    """

    page_min: torch.Tensor | None = None
    page_max: torch.Tensor | None = None
    page_mean_low: torch.Tensor | None = None
    page_mean_high: torch.Tensor | None = None
    key_sketch: torch.Tensor | None = None
    key_sketch_scale: torch.Tensor | None = None
    logical_page: int = 16

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        page_minmax: bool,
        key_sketch: SketchFormat | None,
        page_mean: bool = False,
        logical_page: int = 16,
        device: torch.device | str = "cpu",
    ) -> "PlaneBuffers":
        """Zeroed planes of ``num_pages`` physical pages, padding pages counted in."""
        bounds = (num_layers, num_pages * (page_size // logical_page), num_heads, head_dim)
        sketch = (num_layers, num_pages, num_heads, head_dim, page_size)
        scale = (num_layers, num_pages, num_heads, page_size)

        def per_logical_page(kept: bool) -> torch.Tensor | None:
            return torch.zeros(bounds, dtype=kv_dtype, device=device) if kept else None

        return cls(
            page_min=per_logical_page(page_minmax),
            page_max=per_logical_page(page_minmax),
            page_mean_low=per_logical_page(page_mean),
            page_mean_high=per_logical_page(page_mean),
            key_sketch=(
                torch.zeros(sketch, dtype=SKETCH_DTYPES[key_sketch], device=device)
                if key_sketch
                else None
            ),
            key_sketch_scale=(
                torch.zeros(scale, dtype=torch.float32, device=device)
                if key_sketch == "int8"
                else None
            ),
            logical_page=logical_page,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The planes that exist, by name."""
        named = {
            "page_min": self.page_min,
            "page_max": self.page_max,
            "page_mean_low": self.page_mean_low,
            "page_mean_high": self.page_mean_high,
            "key_sketch": self.key_sketch,
            "key_sketch_scale": self.key_sketch_scale,
        }
        return {name: plane for name, plane in named.items() if plane is not None}

    def num_bytes(self) -> int:
        """Bytes that all planes take together."""
        return sum(plane.nbytes for plane in self.tensors().values())
