# SPDX-License-Identifier: Apache-2.0
"""Which metadata planes lie beside the KV pages, and exactly how many bytes they take.

A plane is selection metadata derived from K alone and indexed by the same physical page as the KV
rows it describes. `PlaneSpec` names the planes that a preset reads; only those are allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from sglang_sparse_kernels.planes import (
    SCALE_DTYPE,
    SKETCH_DTYPES,
    SketchFormat,
    has_scale,
    tokens_per_element,
)

ALLOWED_PAGE_SIZES: Final = (16, 32, 64)
ALLOWED_LOGICAL_PAGES: Final = (16, 32, 64)
ALLOWED_KV_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def every_layer(layer: int) -> bool:
    """All layers read planes."""
    return True


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """The planes of one preset.

    Attributes:
        page_minmax: keep `page_min` and `page_max`, each `[L, pages * P // logical_page, H, D]` in
            the dtype of K.
        page_mean: keep `page_mean_low` and `page_mean_high`, of the same shape and dtype: the ends
            of each logical page's cuboid-mean digest.
        logical_page: tokens that an entry of these covers; divides the physical page size P.
        key_sketch: format of the dimension-major `key_sketch`, `[L, runs, H, D, 128]`, or None for
            no sketch. A run is 128 / P pages; `"int4"` holds two tokens a byte. Integers add
            `key_sketch_scale`, float16 `[L, pages, H, P]`.
        read_by: whether a layer, named by its global id, reads planes; L counts only those that do.

    Raises:
        ValueError: one line naming the field, its value and what is allowed.
    """

    page_minmax: bool = False
    page_mean: bool = False
    logical_page: int = 16
    key_sketch: SketchFormat | None = None
    read_by: Callable[[int], bool] = field(default=every_layer, compare=False)

    def __post_init__(self) -> None:
        if self.logical_page not in ALLOWED_LOGICAL_PAGES:
            raise ValueError(
                f"logical_page is {self.logical_page}; allowed: {_listing(ALLOWED_LOGICAL_PAGES)}"
            )
        if self.key_sketch is not None and self.key_sketch not in SKETCH_DTYPES:
            raise ValueError(
                f"key_sketch is {self.key_sketch!r}; allowed: {_listing((None, *SKETCH_DTYPES))}"
            )

    def layers(self, first: int, count: int) -> tuple[int, ...]:
        """Global ids of the layers that have planes, of `count` layers from `first` on."""
        return tuple(layer for layer in range(first, first + count) if self.read_by(layer))

    @property
    def is_empty(self) -> bool:
        """True when no plane is kept."""
        return not (self.page_minmax or self.page_mean) and self.key_sketch is None

    @property
    def sketch_dtype(self) -> torch.dtype | None:
        """Element type of `key_sketch`, None without one."""
        return None if self.key_sketch is None else SKETCH_DTYPES[self.key_sketch]

    def validate_page_size(self, page_size: int) -> None:
        """Refuse a physical page size that the planes cannot be indexed by.

        Raises:
            ValueError: `page_size` is not 16, 32 or 64, or `logical_page` does not divide it.
        """
        if page_size not in ALLOWED_PAGE_SIZES:
            raise ValueError(
                f"--page-size is {page_size}; the KV planes allow {_listing(ALLOWED_PAGE_SIZES)}: "
                "start with --page-size 64"
            )
        if (self.page_minmax or self.page_mean) and page_size % self.logical_page:
            raise ValueError(
                f"logical_page is {self.logical_page}; it must divide --page-size {page_size}"
            )

    def validate_kv_dtype(self, kv_dtype: torch.dtype) -> None:
        """Refuse a KV dtype that the planes are not defined for.

        Raises:
            ValueError: `kv_dtype` is not bfloat16, float16 or float32 (a quantised pool, for one).
        """
        if kv_dtype not in ALLOWED_KV_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ALLOWED_KV_DTYPES)
            raise ValueError(
                f"--kv-cache-dtype resolves to {str(kv_dtype).removeprefix('torch.')}; "
                f"the KV planes allow {names}: start with --kv-cache-dtype bfloat16"
            )

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        """Exact plane bytes of one physical page in one layer.

        Args:
            head_num: KV heads local to the tensor-parallel rank.
            head_dim: channels a head.
            page_size: tokens a physical page (P).
            kv_dtype: dtype of the K rows; also that of the planes of logical pages.

        Raises:
            ValueError: page size or dtype not allowed.
        """
        self.validate_page_size(page_size)
        self.validate_kv_dtype(kv_dtype)
        row = head_num * head_dim
        total = 0
        pairs = int(self.page_minmax) + int(self.page_mean)
        if pairs:
            total += pairs * 2 * (page_size // self.logical_page) * row * kv_dtype.itemsize
        if self.sketch_dtype is not None:
            elements = page_size // tokens_per_element(self.sketch_dtype)
            total += elements * row * self.sketch_dtype.itemsize
        if self.sketch_dtype is not None and has_scale(self.sketch_dtype):
            total += page_size * head_num * SCALE_DTYPE.itemsize
        return total


def plane_bytes_per_token(
    spec: PlaneSpec,
    *,
    head_num: int,
    head_dim: int,
    page_size: int,
    kv_dtype: torch.dtype,
    num_layers: int,
) -> int:
    """Plane bytes of one token over all layers, for SGLang's memory sizing.

    Exact for every geometry whose `head_num * head_dim * itemsize` is a multiple of 8 (so for all
    real models); otherwise rounded up, so that the pool is never promised bytes that it does not
    have. As in SGLang's own cell size, the padding page is not counted.

    Args:
        spec: planes kept.
        head_num, head_dim, page_size, kv_dtype: as in `PlaneSpec.bytes_per_page`.
        num_layers: layers of this rank that have planes.

    Raises:
        ValueError: page size or dtype not allowed.
    """
    page_bytes = num_layers * spec.bytes_per_page(head_num, head_dim, page_size, kv_dtype)
    return -(-page_bytes // page_size)


def _listing(values: Iterable[object]) -> str:
    """`a, b or c`, for one-line errors."""
    names = [repr(value) for value in values]
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
