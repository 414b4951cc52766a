# SPDX-License-Identifier: Apache-2.0
"""Per-page metadata kept beside the KV rows."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..common import FP8, PAGE_SIZES, Device, check_contiguous, check_dtype, check_shape

SketchFormat = Literal["fp8", "int8", "int4", "bf16"]

SKETCH_DTYPES: dict[str, torch.dtype] = {
    "fp8": FP8,
    "int8": torch.int8,
    "int4": torch.uint8,
    "bf16": torch.bfloat16,
}
FP8_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX = 7.0
SCALE_DTYPE = torch.float16
"""Dtype of a token's scale in a sketch of integers."""
SCALE_MAX = 65504.0
INT4_ZERO = 8
"""Added to a 4-bit integer before it is stored, so that it is not negative."""


RUN_TOKENS = 128
"""Tokens of one channel that lie side by side, so that memory is read in runs of 128 bytes."""


def pages_per_run(page_size: int) -> int:
    """Number of physical pages in a run: neighbours by number, which share each channel's row."""
    return RUN_TOKENS // page_size


def has_scale(dtype: torch.dtype) -> bool:
    """Whether a sketch of this element type goes with a scale for each token."""
    return dtype in (torch.int8, torch.uint8)


def tokens_per_element(dtype: torch.dtype) -> int:
    """Tokens in one element of a sketch of this element type."""
    return 2 if dtype == torch.uint8 else 1


@dataclass(frozen=True)
class PlaneShape:
    """Shape of the KV pool that the planes lie beside. ``num_pages`` includes the padding page."""

    num_layers: int
    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class PageCuboids:
    """A cuboid around the keys of each logical page of one layer, channel by channel.

    Attributes:
        low: [pages * P / unit, H, D], contiguous, its lower ends.
        high: the same, its upper ends.
        unit: tokens a logical page; divides ``page_size``.
        page_size: tokens a physical page (P).
    """

    low: torch.Tensor
    high: torch.Tensor
    unit: int
    page_size: int

    def check(self, dim: int) -> None:
        """Raise ValueError unless these can be scored for queries of head dimension ``dim``."""
        check_shape("low", self.low, (-1, -1, dim))
        check_shape("high", self.high, tuple(self.low.shape))
        check_contiguous("low", self.low)
        check_contiguous("high", self.high)
        if self.page_size not in PAGE_SIZES or self.page_size % self.unit:
            raise ValueError(
                f"unit={self.unit} must divide page_size={self.page_size}, one of {PAGE_SIZES}"
            )


@dataclass(frozen=True)
class KeySketch:
    """The sketch of one layer's keys, as :class:`PlaneBuffers` holds it.

    Attributes:
        values: [runs, H, D, tokens a run] float8_e4m3fn, int8 or bfloat16, or half as many uint8
            for 4-bit integers ("torch" also float64), contiguous.
        scale: float16 [pages, H, P] for integers, else None.
        page_size: tokens a physical page (P).
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    page_size: int

    def check(self, dim: int) -> None:
        """Raise ValueError unless this can be scored for queries of head dimension ``dim``."""
        dtype = self.values.dtype
        check_shape("sketch", self.values, (-1, -1, dim, -1))
        check_dtype("sketch", self.values, *SKETCH_DTYPES.values(), torch.float64)
        check_contiguous("sketch", self.values)
        run = self.values.shape[3] * tokens_per_element(dtype)
        if self.page_size not in PAGE_SIZES or run % self.page_size:
            raise ValueError(
                f"page_size={self.page_size} is not one of {PAGE_SIZES} that divide {run}"
            )
        if has_scale(dtype) != (self.scale is not None):
            raise ValueError("a scale goes with a sketch of integers, and only with it")


@dataclass(frozen=True)
class PlaneBuffers:
    """Planes of all layers, indexed by physical page; planes that nobody reads are None.

    L layers, H KV heads, D head dimension, P physical page size, u ``logical_page``.

    Attributes:
        page_min: [L, pages * P / u, H, D] in K's dtype, smallest key of a logical page.
        page_max: the same shape and dtype, largest key of a logical page.
        page_mean_low, page_mean_high: the same shape and dtype, ends of the cuboid-mean digest of a
            logical page (:func:`cuboid_mean`), rounded.
        key_sketch: [L, runs, H, D, 128], float8_e4m3fn, int8 or bfloat16: K with the token axis
            innermost, so that one channel of a page is contiguous. A run holds 128 / P pages with
            neighbouring numbers; :func:`by_page` finds a page in it. In 4 bits it is uint8
            [L, runs, H, D, 64]: the low and high half of a byte hold tokens t and t + P / 2 of a
            page, each with 8 added.
        key_sketch_scale: [L, pages, H, P] float16, scale of each token. Only sketches of integers
            have it.
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
        shape: PlaneShape,
        *,
        page_minmax: bool,
        key_sketch: SketchFormat | None,
        page_mean: bool = False,
        logical_page: int = 16,
        device: Device = "cpu",
    ) -> "PlaneBuffers":
        """Zeroed planes of a pool of ``shape``."""
        layers, pages, size = shape.num_layers, shape.num_pages, shape.page_size
        heads, dim = shape.num_heads, shape.head_dim
        bounds = (layers, pages * (size // logical_page), heads, dim)
        dtype = None if key_sketch is None else SKETCH_DTYPES[key_sketch]
        elements = 0 if dtype is None else RUN_TOKENS // tokens_per_element(dtype)
        sketch = (layers, -(-pages // pages_per_run(size)), heads, dim, elements)
        scale = (layers, pages, heads, size)

        def per_logical_page(kept: bool) -> torch.Tensor | None:
            return torch.zeros(bounds, dtype=shape.kv_dtype, device=device) if kept else None

        return cls(
            page_min=per_logical_page(page_minmax),
            page_max=per_logical_page(page_minmax),
            page_mean_low=per_logical_page(page_mean),
            page_mean_high=per_logical_page(page_mean),
            key_sketch=None if dtype is None else torch.zeros(sketch, dtype=dtype, device=device),
            key_sketch_scale=(
                None
                if dtype is None or not has_scale(dtype)
                else torch.zeros(scale, dtype=SCALE_DTYPE, device=device)
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
