# SPDX-License-Identifier: Apache-2.0
"""Planes recomputed from the K rows of a page, straight from their definitions.

Written without the plane-update kernel or its reference, so that a test that compares the two
shares no code with what it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_FP8_MAX = 448.0
_INT8_MAX = 127.0
_INT4_MAX = 7.0
_SCALE_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class PlaneMismatch:
    """One plane of one page that differs from recomputation."""

    plane: str
    layer: int
    page: int
    wrong_entries: int


def expected_planes(
    rows: torch.Tensor,
    valid_tokens: torch.Tensor,
    *,
    logical_page: int,
    sketch_dtype: torch.dtype | None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What each plane must hold for pages whose K rows are `rows`.

    Args:
        rows: `[N, P, H, D]`, K rows of N pages, in the KV dtype.
        valid_tokens: int64 `[N]`, written rows of each page (1..P).
        logical_page: tokens of one min/max entry.
        sketch_dtype: element type of the sketch, None to leave it out.

    Returns:
        name -> (values, mask): values shaped as the plane's slice of those pages, mask
        (broadcastable) true where the entry is defined. Entries of unwritten rows are undefined.
    """
    count, page, heads, dim = rows.shape
    written = torch.arange(page, device=rows.device) < valid_tokens[:, None]  # [N, P]
    groups = written.view(count, -1, logical_page)  # [N, P/u, u]
    grouped = rows.view(count, -1, logical_page, heads, dim)
    hidden = ~groups[..., None, None]
    any_written = groups.any(-1)[..., None, None]
    out = {
        "page_min": (grouped.masked_fill(hidden, torch.inf).amin(2), any_written),
        "page_max": (grouped.masked_fill(hidden, -torch.inf).amax(2), any_written),
    }
    out |= _expected_cuboids(grouped.double(), hidden, any_written)
    if sketch_dtype is None:
        return out
    keys = rows.permute(0, 2, 3, 1)  # [N, H, D, P]
    seen = written[:, None, None, :]
    if sketch_dtype in (torch.int8, torch.uint8):
        most = _INT8_MAX if sketch_dtype == torch.int8 else _INT4_MAX
        scale = (keys.float().abs().amax(2) / most).clamp(max=_SCALE_MAX).half()  # [N, H, P]
        safe = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
        codes = torch.round(keys.float() / safe[:, :, None]).clamp(-most, most)
        # Of 4 bits, one integer a byte: `compare_planes` unpacks what is stored.
        out["key_sketch"] = (codes.to(torch.int8), seen)
        out["key_sketch_scale"] = (scale, written[:, None, :])
    elif sketch_dtype == torch.float8_e4m3fn:
        out["key_sketch"] = (keys.float().clamp(-_FP8_MAX, _FP8_MAX).to(sketch_dtype), seen)
    else:
        out["key_sketch"] = (keys.to(sketch_dtype), seen)
    return out


def _expected_cuboids(
    keys: torch.Tensor, hidden: torch.Tensor, any_written: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Cuboid-mean digests in float64; `keys` are `[N, P/u, u, H, D]`."""
    low, high = (
        keys.masked_fill(hidden, torch.inf).amin(2),
        keys.masked_fill(hidden, -torch.inf).amax(2),
    )
    centre = (low + high) / 2
    counts = (~hidden).sum(2)
    spread = (keys - centre[:, :, None]).abs().masked_fill(hidden, 0).sum(2) / counts
    return {
        "page_mean_low": (centre - spread, any_written),
        "page_mean_high": (centre + spread, any_written),
    }


def compare_planes(
    k_layers: Sequence[torch.Tensor],
    planes: dict[str, torch.Tensor],
    pages: torch.Tensor,
    valid_tokens: torch.Tensor | None,
    *,
    page_size: int,
    logical_page: int,
) -> list[PlaneMismatch]:
    """Every (layer, page, plane) of `pages` that differs from `expected_planes`.

    Bit for bit, but for means: up to 64 distances may be added up in any order in float32, and that
    may carry an entry over to the next number of its dtype.

    Args:
        k_layers: per layer `[slots, H, D]`.
        planes: name -> `[L, ...]` tensor, second axis by physical page (min/max: by logical page).
        pages: int64 `[N]`.
        valid_tokens: int64 `[N]` or None for whole pages.
        page_size, logical_page: tokens.
    """
    if pages.numel() == 0 or not planes:
        return []
    if valid_tokens is None:
        valid_tokens = torch.full_like(pages, page_size)
    sketch = planes.get("key_sketch")
    found: list[PlaneMismatch] = []
    for layer, k_rows in enumerate(k_layers):
        rows = k_rows.view(-1, page_size, *k_rows.shape[1:])[pages]
        expected = expected_planes(
            rows,
            valid_tokens,
            logical_page=logical_page,
            sketch_dtype=None if sketch is None else sketch.dtype,
        )
        for name, plane in planes.items():
            values, mask = expected[name]
            per_page = plane[layer]
            if name == "key_sketch":
                per_page = _sketch_pages(per_page, page_size)
            if name.startswith("page_"):
                per_page = per_page.view(-1, page_size // logical_page, *per_page.shape[1:])
            if name.startswith("page_mean"):
                size = rows.abs().amax((1, 2, 3)).double().view(-1, 1, 1, 1)
                slack = torch.finfo(per_page.dtype).eps * values.abs() + 66 * 2.0**-24 * size
                wrong = ~((per_page[pages].double() - values).abs() <= slack) & mask
            else:
                wrong = (_comparable(per_page)[pages] != _comparable(values)) & mask
            for row in wrong.flatten(1).any(1).nonzero().flatten().tolist():
                found.append(
                    PlaneMismatch(name, layer, int(pages[row]), int(wrong[row].sum().item()))
                )
    return found


def _sketch_pages(plane: torch.Tensor, page_size: int) -> torch.Tensor:
    """[pages, H, D, P] of a layer's sketch, whose runs of tokens span pages; 4 bits as int8."""
    runs, heads, dim, elements = plane.shape
    packed = plane.dtype == torch.uint8
    part = page_size // 2 if packed else page_size
    by_page = plane.view(runs, heads, dim, elements // part, part).permute(0, 3, 1, 2, 4)
    paged = by_page.reshape(-1, heads, dim, part)
    return torch.cat((paged & 15, paged >> 4), -1).to(torch.int8) - 8 if packed else paged


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    # fp8 can neither be gathered nor compared on every device; its bytes can.
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
