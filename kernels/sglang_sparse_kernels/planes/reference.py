# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the planes, from the KV rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..common import FP8, accumulate_dtype, computable, put, take
from .types import (
    FP8_MAX,
    INT4_MAX,
    INT4_ZERO,
    INT8_MAX,
    SCALE_DTYPE,
    SCALE_MAX,
    PlaneBuffers,
    has_scale,
    tokens_per_element,
)


def quantize_sketch(
    keys: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys [..., D] in the sketch's ``dtype``, with the scale of integers [...] float16 or None.

    fp8 saturates at +-448; integers are symmetric per token and head, rounding halves to even.
    4-bit integers are returned as uint8, one a byte, with 8 added.
    """
    if dtype == FP8:
        return keys.clamp(-FP8_MAX, FP8_MAX).to(dtype), None
    if has_scale(dtype):
        most, zero = (INT8_MAX, 0) if dtype == torch.int8 else (INT4_MAX, INT4_ZERO)
        keys = keys.float()
        largest = keys.abs().amax(-1)
        # A tensor divisor: CUDA multiplies by the reciprocal of a scalar one, which rounds twice.
        scale = (largest / torch.full_like(largest, most)).clamp(max=SCALE_MAX).to(SCALE_DTYPE)
        safe = torch.where(scale > 0, scale, 1.0).float()
        return ((keys / safe[..., None]).round().clamp(-most, most) + zero).to(dtype), scale
    return keys.to(dtype), None


def by_page(sketch: torch.Tensor, page_size: int) -> torch.Tensor:
    """A view [..., runs, pages a run, H, D, P] of a sketch [..., runs, H, D, tokens a run].

    In 4 bits the last axes have half as many elements.
    """
    elements = page_size // tokens_per_element(sketch.dtype)
    return sketch.unflatten(-1, (-1, elements)).movedim(-2, -4)


def sketch_values(sketch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sketch as ``dtype`` [..., P], not multiplied by its scale; in 4 bits it is [..., P / 2]."""
    if sketch.dtype != torch.uint8:
        return sketch.to(dtype)
    return torch.cat((sketch & 15, sketch >> 4), -1).to(dtype) - INT4_ZERO


def dequantize_sketch(
    sketch: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, page_size: int
) -> torch.Tensor:
    """The sketch of a layer as [pages, H, D, P] in ``dtype``, times its scale if there is one.

    Args:
        sketch: [runs, H, D, tokens a run], as in :class:`PlaneBuffers`.
        scale: [pages, H, P] or None.
        dtype: of the result.
        page_size: P.
    """
    values = sketch_values(by_page(sketch, page_size), dtype).flatten(0, 1)
    return values if scale is None else values[: len(scale)] * scale.to(dtype)[..., None, :]


def cuboid_mean(keys: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the cuboid-mean digest of blocks of keys, in at least float32.

    ArkVale (Chen et al., NeurIPS 2024; ``InferState._summarize_keys`` of its published code): the
    centre of the keys' bounding cuboid, and around it a cuboid whose half width is, channel by
    channel, the mean distance of the keys from that centre. PSA section 3.1 ranks by it.

    Args:
        keys: [N, u, H, D].
        written: bool [N, u], the rows that count; at least one a block.

    Returns:
        (low, high), each [N, H, D].
    """
    keys, shown = keys.to(accumulate_dtype(keys.dtype)), written[..., None, None]
    high = keys.masked_fill(~shown, float("-inf")).amax(1)
    low = keys.masked_fill(~shown, float("inf")).amin(1)
    centre = (high + low) / 2
    distance = (keys - centre[:, None]).abs().masked_fill(~shown, 0).sum(1)
    distance /= written.sum(1)[:, None, None]
    return centre - distance, centre + distance


class _Written(NamedTuple):
    """Where K is new: positions [start, end) of each row (:func:`update_planes`)."""

    page_table: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    page_size: int


def _flat_ranges(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, value) of every integer of the half-open ranges [start, end), rows in order."""
    lengths = (end - start).clamp(min=0).long()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=start.device), lengths)
    within = torch.arange(len(rows), device=start.device) - (lengths.cumsum(0) - lengths)[rows]
    return rows, start.long()[rows] + within


def _store_nibbles(
    plane: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, codes: torch.Tensor
) -> None:
    """Write 4-bit ``codes`` [N, H, D] of tokens at ``offsets`` of ``pages`` to a view by page."""
    half = plane.shape[-1]
    for high in (False, True):
        some = (offsets >= half) == high
        run, page = pages[some] // plane.shape[1], pages[some] % plane.shape[1]
        at = (run, page, slice(None), slice(None), offsets[some] % half)
        old, new = plane[at], codes[some]
        plane[at] = (old & 15) | (new << 4) if high else (old & 240) | new


def _update_sketch(
    k_layers: Sequence[torch.Tensor], planes: PlaneBuffers, written: _Written
) -> None:
    assert planes.key_sketch is not None
    page_table, start, end, page_size = written
    rows, positions = _flat_ranges(start, end)
    pages = page_table[rows, positions // page_size].long()
    offsets = positions % page_size
    for layer, keys in enumerate(k_layers):
        rows = computable(take(keys, pages * page_size + offsets))
        sketch, scale = quantize_sketch(rows, planes.key_sketch.dtype)
        plane = by_page(planes.key_sketch[layer], page_size)
        if plane.dtype == torch.uint8:
            _store_nibbles(plane, pages, offsets, sketch)
        else:
            every = slice(None)
            at = (pages // plane.shape[1], pages % plane.shape[1], every, every, offsets)
            put(plane, at, sketch)
        if scale is not None:
            assert planes.key_sketch_scale is not None
            planes.key_sketch_scale[layer, pages, :, offsets] = scale


def _update_logical_pages(
    k_layers: Sequence[torch.Tensor], planes: PlaneBuffers, written: _Written
) -> None:
    page_table, start, end, page_size = written
    unit = planes.logical_page
    some = end > start
    rows, logical = _flat_ranges(
        torch.where(some, start // unit, 0), torch.where(some, (end + unit - 1) // unit, 0)
    )
    first = logical * unit
    pages = page_table[rows, first // page_size].long()
    entries = pages * (page_size // unit) + first % page_size // unit
    within = torch.arange(unit, device=start.device)
    slots = (pages * page_size + first % page_size)[:, None] + within
    shown = first[:, None] + within < end[rows, None]
    hidden = ~shown[..., None, None]
    for layer, all_keys in enumerate(k_layers):
        keys = computable(take(all_keys, slots))
        if planes.page_min is not None and planes.page_max is not None:
            put(planes.page_min[layer], entries, keys.masked_fill(hidden, float("inf")).amin(1))
            put(planes.page_max[layer], entries, keys.masked_fill(hidden, float("-inf")).amax(1))
        if planes.page_mean_low is not None and planes.page_mean_high is not None:
            low, high = cuboid_mean(keys, shown)
            put(planes.page_mean_low[layer], entries, low)
            put(planes.page_mean_high[layer], entries, high)


def update_planes_reference(
    k_layers: Sequence[torch.Tensor],
    planes: PlaneBuffers,
    page_table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """See :func:`sglang_sparse_kernels.update_planes`."""
    written = _Written(page_table, start, end, page_size)
    if planes.key_sketch is not None:
        _update_sketch(k_layers, planes, written)
    if planes.page_min is not None or planes.page_mean_low is not None:
        _update_logical_pages(k_layers, planes, written)
