# SPDX-License-Identifier: Apache-2.0
"""The kinds of plane. Each object names its tensors, their bytes, and the values they must hold.

The values are recomputed here from the K rows of a page, straight from the definition of the plane.
This uses neither the update kernels nor their references, so that a check shares no code with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from sglang_sparse_kernels.common import FP8, computable, take
from sglang_sparse_kernels.planes import (
    SCALE_DTYPE,
    SKETCH_DTYPES,
    PlaneShape,
    SketchFormat,
    digest_dtype,
    has_scale,
    pages_per_run,
    tokens_per_element,
)
from sglang_sparse_kernels.planes.types import RUN_TOKENS

ALLOWED_LOGICAL_PAGES = (16, 32, 64)
_FP8_MAX = 448.0
_INT8_MAX = 127.0
_INT4_MAX = 7.0
_SCALE_MAX = 65504.0


class Expected(NamedTuple):
    """The values that a plane must hold for some pages.

    Attributes:
        values: by physical page, in the layout of :meth:`Plane.of_pages`.
        defined: broadcastable to ``values``, true where an entry is defined. Entries of rows that
            were not written are not.
        slack: largest allowed difference from ``values``; None if they must be equal.
    """

    values: torch.Tensor
    defined: torch.Tensor
    slack: torch.Tensor | None = None


class Plane(Protocol):
    """Selection metadata derived from K alone, by physical page.

    Attributes:
        names: of its tensors, as ``PlaneBuffers`` of the kernels has them.
        logical_page: tokens that an entry covers; 1 if each token has its own.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def logical_page(self) -> int: ...

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Its tensors, zeroed, by name; the layer axis first."""

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        """Exact bytes of one physical page in one layer."""

    def of_pages(
        self, name: str, stored: torch.Tensor, pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """``pages`` of one layer of a tensor, ``[N, ...]``, in a dtype that can be compared."""

    def expected(self, rows: torch.Tensor, written: torch.Tensor) -> dict[str, Expected]:
        """What each tensor must hold.

        Args:
            rows: `[N, P, H, D]`, K rows of N pages, in the KV dtype.
            written: bool `[N, P]`, which rows are written.
        """


@dataclass(frozen=True, slots=True)
class CuboidPlane(ABC):
    """Base of planes that hold the ends of a cuboid for each logical page and KV head.

    Each is `[L, pages * P // logical_page, H, D]` in :meth:`dtype_of` the KV dtype.

    Raises:
        ValueError: `logical_page` is not allowed.
    """

    names: ClassVar[tuple[str, str]]
    logical_page: int = 16

    def __post_init__(self) -> None:
        if self.logical_page not in ALLOWED_LOGICAL_PAGES:
            raise ValueError(f"logical_page is {self.logical_page}; allowed: 16, 32 or 64")

    def dtype_of(self, kv_dtype: torch.dtype) -> torch.dtype:
        """Of the ends: that of K, whose values they are."""
        return kv_dtype

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> dict[str, torch.Tensor]:
        entries = shape.num_pages * (shape.page_size // self.logical_page)
        size = (shape.num_layers, entries, shape.num_heads, shape.head_dim)
        dtype = self.dtype_of(shape.kv_dtype)
        return {name: torch.zeros(size, dtype=dtype, device=device) for name in self.names}

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        entries, itemsize = page_size // self.logical_page, self.dtype_of(kv_dtype).itemsize
        return 2 * entries * head_num * head_dim * itemsize

    def of_pages(
        self, name: str, stored: torch.Tensor, pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        paged = stored.view(-1, page_size // self.logical_page, *stored.shape[1:])
        return computable(take(paged, pages))

    @abstractmethod
    def expected(self, rows: torch.Tensor, written: torch.Tensor) -> dict[str, Expected]: ...

    def _grouped(
        self, rows: torch.Tensor, written: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys `[N, P/u, u, H, D]`, which are unwritten, which logical pages have any)."""
        groups = written.view(len(rows), -1, self.logical_page)
        keys = rows.view(len(rows), -1, self.logical_page, *rows.shape[2:])
        return keys, ~groups[..., None, None], groups.any(-1)[..., None, None]


def _ends(keys: torch.Tensor, unwritten: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest written key of each logical page, channel by channel."""
    low = keys.masked_fill(unwritten, torch.inf).amin(2)
    return low, keys.masked_fill(unwritten, -torch.inf).amax(2)


@dataclass(frozen=True, slots=True)
class PageBounds(CuboidPlane):
    """Smallest and largest key of a logical page, channel by channel (Quest)."""

    names: ClassVar[tuple[str, str]] = ("page_min", "page_max")

    def expected(self, rows: torch.Tensor, written: torch.Tensor) -> dict[str, Expected]:
        keys, unwritten, defined = self._grouped(computable(rows), written)
        ends = _ends(keys, unwritten)
        return {
            name: Expected(values, defined) for name, values in zip(self.names, ends, strict=True)
        }


@dataclass(frozen=True, slots=True)
class PageDigest(CuboidPlane):
    """Cuboid-mean digest of a logical page (ArkVale): centre and mean distance from it.

    Up to 64 distances are added up in float32, in any order. Rounding may therefore move an entry
    to the next number of its dtype. It is bf16 beside fp8 keys, as a mean of them is no fp8 number.
    """

    names: ClassVar[tuple[str, str]] = ("page_mean_low", "page_mean_high")

    def dtype_of(self, kv_dtype: torch.dtype) -> torch.dtype:
        return digest_dtype(kv_dtype)

    def expected(self, rows: torch.Tensor, written: torch.Tensor) -> dict[str, Expected]:
        keys, unwritten, defined = self._grouped(rows.double(), written)
        low, high = _ends(keys, unwritten)
        centre = (low + high) / 2
        counts = (~unwritten).sum(2)
        distances = (keys - centre[:, :, None]).abs().masked_fill(unwritten, 0)
        spread = distances.sum(2) / counts
        size = keys.abs().amax((1, 2, 3, 4)).view(-1, 1, 1, 1)
        info = torch.finfo(self.dtype_of(rows.dtype))
        return {
            name: Expected(
                values,
                defined,
                # Below the smallest normal number the next one is as far away as there.
                info.eps * values.abs().clamp(min=info.tiny) + 66 * 2.0**-24 * size,
            )
            for name, values in zip(self.names, (centre - spread, centre + spread), strict=True)
        }


@dataclass(frozen=True, slots=True)
class SketchPlane:
    """A copy of the keys with the dimension before the token, in fewer bits (SparCas).

    It is `[L, runs, H, D, 128]`. A run is 128 / P pages, and `"int4"` holds two tokens in a byte.
    Integers have a scale for each token and head, float16 `[L, pages, H, P]`.

    Raises:
        ValueError: unknown `storage`.
    """

    storage: SketchFormat
    logical_page: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.storage not in SKETCH_DTYPES:
            names = ", ".join(map(repr, SKETCH_DTYPES))
            raise ValueError(f"storage is {self.storage!r}; allowed: {names}")

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the sketch."""
        return SKETCH_DTYPES[self.storage]

    @property
    def names(self) -> tuple[str, ...]:
        names = ("key_sketch", "key_sketch_scale")
        return names if has_scale(self.dtype) else names[:1]

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> dict[str, torch.Tensor]:
        runs = -(-shape.num_pages // pages_per_run(shape.page_size))
        elements = RUN_TOKENS // tokens_per_element(self.dtype)
        values = (shape.num_layers, runs, shape.num_heads, shape.head_dim, elements)
        scale = (shape.num_layers, shape.num_pages, shape.num_heads, shape.page_size)
        shapes = {"key_sketch": (values, self.dtype), "key_sketch_scale": (scale, SCALE_DTYPE)}
        return {
            name: torch.zeros(shapes[name][0], dtype=shapes[name][1], device=device)
            for name in self.names
        }

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        elements = page_size // tokens_per_element(self.dtype)
        scale = page_size * head_num * SCALE_DTYPE.itemsize if has_scale(self.dtype) else 0
        return elements * head_num * head_dim * self.dtype.itemsize + scale

    def of_pages(
        self, name: str, stored: torch.Tensor, pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        if name != "key_sketch":
            return stored[pages]
        runs, heads, dim, elements = stored.shape
        packed = stored.dtype == torch.uint8
        part = page_size // 2 if packed else page_size
        paged = stored.view(runs, heads, dim, elements // part, part).permute(0, 3, 1, 2, 4)
        held = take(paged, (pages // paged.shape[1], pages % paged.shape[1]))
        if packed:
            return torch.cat((held & 15, held >> 4), -1).to(torch.int8) - 8
        return _comparable(held)

    def expected(self, rows: torch.Tensor, written: torch.Tensor) -> dict[str, Expected]:
        keys = rows.permute(0, 2, 3, 1).float()  # [N, H, D, P]
        seen = written[:, None, None, :]
        if not has_scale(self.dtype):
            if self.dtype == FP8:
                keys = keys.clamp(-_FP8_MAX, _FP8_MAX)
            return {"key_sketch": Expected(_comparable(keys.to(self.dtype)), seen)}
        most = _INT8_MAX if self.dtype == torch.int8 else _INT4_MAX
        scale = (keys.abs().amax(2) / most).clamp(max=_SCALE_MAX).half()  # [N, H, P]
        safe = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
        # Of 4 bits, one integer a byte: `of_pages` unpacks what is stored.
        codes = torch.round(keys / safe[:, :, None]).clamp(-most, most).to(torch.int8)
        return {
            "key_sketch": Expected(codes, seen),
            "key_sketch_scale": Expected(scale, written[:, None, :]),
        }


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    # fp8 cannot be compared on every device; its bytes can.
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
