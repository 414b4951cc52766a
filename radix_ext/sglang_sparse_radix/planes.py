# SPDX-License-Identifier: Apache-2.0
"""The kinds of plane. Each object names its tensors, their bytes, and the values they must hold.

The values are recomputed here from the K rows of a page, straight from the definition of the plane.
This uses neither the update kernels nor their references, so that a check shares no code with them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch

from sglang_sparse_kernels.common import FP8, computable, take
from sglang_sparse_kernels.planes import (
    SCALE_DTYPE,
    SKETCH_DTYPES,
    PlaneShape,
    SketchFormat,
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
        logical_page: tokens that an entry covers; 1 if each token has its own.
    """

    @property
    def logical_page(self) -> int: ...

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Its tensors, zeroed, by their names in ``PlaneBuffers``; the layer axis first."""

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

    Each is `[L, pages * P // logical_page, H, D]` in the KV dtype.

    Raises:
        ValueError: `logical_page` is not allowed.
    """

    names: ClassVar[tuple[str, str]]
    logical_page: int = 16

    def __post_init__(self) -> None:
        if self.logical_page not in ALLOWED_LOGICAL_PAGES:
            raise ValueError(f"logical_page is {self.logical_page}; allowed: 16, 32 or 64")

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> dict[str, torch.Tensor]:
        entries = shape.num_pages * (shape.page_size // self.logical_page)
        size = (shape.num_layers, entries, shape.num_heads, shape.head_dim)
        return {name: torch.zeros(size, dtype=shape.kv_dtype, device=device) for name in self.names}

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        entries = page_size // self.logical_page
        return 2 * entries * head_num * head_dim * kv_dtype.itemsize

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
    to the next number of its dtype.
    """

    names: ClassVar[tuple[str, str]] = ("page_mean_low", "page_mean_high")

    def expected(self, rows: torch.Tensor, written: torch.Tensor) -> dict[str, Expected]:
        keys, unwritten, defined = self._grouped(rows.double(), written)
        low, high = _ends(keys, unwritten)
        centre = (low + high) / 2
        counts = (~unwritten).sum(2)
        distances = (keys - centre[:, :, None]).abs().masked_fill(unwritten, 0)
        spread = distances.sum(2) / counts
        size = keys.abs().amax((1, 2, 3, 4)).view(-1, 1, 1, 1)
        info = torch.finfo(rows.dtype)
        return {
            name: Expected(
                values,
                defined,
                # Subnormal numbers are spaced like the smallest normal one.
                info.eps * values.abs().clamp(min=info.tiny) + 66 * 2.0**-24 * size,
            )
            for name, values in zip(self.names, (centre - spread, centre + spread), strict=True)
        }


@dataclass(frozen=True, slots=True)
class SketchPlane:
    """A copy of the keys with the dimension before the token, in fewer bits (SparCas).

    It is `[L, runs, H, D, 128]`. A run is 128 / P pages, and `"int4"` holds two tokens in a byte.
    Integers have a scale for each token and head, float16 `[L, pages, H, P]`. `"auto"` takes fewer
    bits than K: fp8 beside keys of 16 bits or more, int4 beside fp8.

    Raises:
        ValueError: unknown `storage`.
    """

    storage: SketchFormat | Literal["auto"] = "auto"
    logical_page: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.storage not in ("auto", *SKETCH_DTYPES):
            names = ", ".join(map(repr, ("auto", *SKETCH_DTYPES)))
            raise ValueError(f"storage is {self.storage!r}; allowed: {names}")

    def dtype_of(self, kv_dtype: torch.dtype) -> torch.dtype:
        """Element type of the sketch of keys of ``kv_dtype``."""
        if self.storage == "auto":
            return SKETCH_DTYPES["int4" if kv_dtype == FP8 else "fp8"]
        return SKETCH_DTYPES[self.storage]

    def allocate(self, shape: PlaneShape, device: torch.device | str) -> dict[str, torch.Tensor]:
        dtype = self.dtype_of(shape.kv_dtype)
        runs = -(-shape.num_pages // pages_per_run(shape.page_size))
        elements = RUN_TOKENS // tokens_per_element(dtype)
        values = (shape.num_layers, runs, shape.num_heads, shape.head_dim, elements)
        found = {"key_sketch": torch.zeros(values, dtype=dtype, device=device)}
        if has_scale(dtype):
            scale = (shape.num_layers, shape.num_pages, shape.num_heads, shape.page_size)
            found["key_sketch_scale"] = torch.zeros(scale, dtype=SCALE_DTYPE, device=device)
        return found

    def bytes_per_page(
        self, head_num: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
    ) -> int:
        dtype = self.dtype_of(kv_dtype)
        elements = page_size // tokens_per_element(dtype)
        scale = page_size * head_num * SCALE_DTYPE.itemsize if has_scale(dtype) else 0
        return elements * head_num * head_dim * dtype.itemsize + scale

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
        dtype = self.dtype_of(rows.dtype)
        if not has_scale(dtype):
            if dtype == FP8:
                keys = keys.clamp(-_FP8_MAX, _FP8_MAX)
            return {"key_sketch": Expected(_comparable(keys.to(dtype)), seen)}
        most = _INT8_MAX if dtype == torch.int8 else _INT4_MAX
        largest = keys.abs().amax(2)
        # A tensor divisor: CUDA multiplies by the reciprocal of a scalar one, which rounds twice.
        scale = (largest / torch.full_like(largest, most)).clamp(max=_SCALE_MAX).half()  # [N, H, P]
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
