# SPDX-License-Identifier: Apache-2.0
"""Which planes lie beside the KV pages, for which layers, and exactly how many bytes they take."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from sglang_sparse_kernels.common import FP8
from sglang_sparse_kernels.planes import PlaneBuffers, PlaneShape
from sglang_sparse_radix.planes import Plane

ALLOWED_PAGE_SIZES: Final = (16, 32, 64)
ALLOWED_KV_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, FP8)


def every_layer(layer: int) -> bool:
    """All layers read planes."""
    return True


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """The planes of one preset.

    Attributes:
        planes: what is kept, each once.
        read_by: whether a layer, named by its global id, reads planes; only those have any.

    Raises:
        ValueError: two planes have entries of logical pages of different sizes.
    """

    planes: tuple[Plane, ...] = ()
    read_by: Callable[[int], bool] = field(default=every_layer, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", tuple(dict.fromkeys(self.planes)))
        if len(self._logical_pages) > 1:
            raise ValueError(
                f"planes of logical pages of {_listing(self._logical_pages)} tokens; allowed: one "
                "size"
            )

    @property
    def _logical_pages(self) -> list[int]:
        return sorted({plane.logical_page for plane in self.planes} - {1})

    def layers(self, first: int, count: int) -> tuple[int, ...]:
        """Global ids of the layers that have planes, of `count` layers from `first` on."""
        return tuple(layer for layer in range(first, first + count) if self.read_by(layer))

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> PlaneBuffers:
        """Zeroed planes of a pool."""
        tensors: dict[str, torch.Tensor] = {}
        for plane in self.planes:
            tensors |= plane.allocate(shape, device)
        return PlaneBuffers(**tensors, logical_page=(*self._logical_pages, 16)[0])

    def validate_page_size(self, page_size: int) -> None:
        """Refuse a physical page size that the planes cannot be indexed by.

        Raises:
            ValueError: `page_size` is not 16, 32 or 64, or a logical page does not divide it.
        """
        if page_size not in ALLOWED_PAGE_SIZES:
            raise ValueError(
                f"--page-size is {page_size}; the KV planes allow {_listing(ALLOWED_PAGE_SIZES)}: "
                "start with --page-size 64"
            )
        for logical_page in self._logical_pages:
            if page_size % logical_page:
                raise ValueError(
                    f"logical_page is {logical_page}; it must divide --page-size {page_size}"
                )

    def validate_kv_dtype(self, kv_dtype: torch.dtype) -> None:
        """Refuse a KV dtype that the planes are not defined for.

        Raises:
            ValueError: `kv_dtype` is not bfloat16, float16, float32 or fp8 e4m3.
        """
        if kv_dtype not in ALLOWED_KV_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ALLOWED_KV_DTYPES)
            raise ValueError(
                f"--kv-cache-dtype resolves to {str(kv_dtype).removeprefix('torch.')}; "
                f"the KV planes allow {names}: start with --kv-cache-dtype bfloat16 or fp8_e4m3"
            )

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        """Exact plane bytes of one physical page in one layer.

        Args:
            head_num: KV heads local to the tensor-parallel rank.
            head_dim: channels a head.
            page_size: tokens a physical page (P).
            kv_dtype: dtype of the K rows, which those of some planes follow from.

        Raises:
            ValueError: page size or dtype not allowed.
        """
        self.validate_page_size(page_size)
        self.validate_kv_dtype(kv_dtype)
        return sum(p.bytes_per_page(head_num, head_dim, page_size, kv_dtype) for p in self.planes)


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
