# SPDX-License-Identifier: Apache-2.0
"""Public plane update: validate, then dispatch to the implementation asked for."""

from collections.abc import Sequence

import torch

from ..common import FP8, IMPLS, Impl, check_choice, check_contiguous, check_dtype, check_shape
from .reference import update_planes_reference
from .types import (
    RUN_TOKENS,
    SKETCH_DTYPES,
    PlaneBuffers,
    has_scale,
    tokens_per_element,
)


def _check_planes(planes: PlaneBuffers, layers: int, heads: int, dim: int, page_size: int) -> None:
    pairs = (("page_min", "page_max"), ("page_mean_low", "page_mean_high"))
    for low, high in pairs:
        if (getattr(planes, low) is None) != (getattr(planes, high) is None):
            raise ValueError(f"{low} and {high} must both be there, or neither")
    if page_size % planes.logical_page:
        raise ValueError(f"logical_page={planes.logical_page} must divide page_size={page_size}")
    for name, plane in planes.tensors().items():
        check_contiguous(name, plane)
    entries = [
        planes.tensors()[name] for pair in pairs for name in pair if name in planes.tensors()
    ]
    for plane in entries:
        check_shape("a plane of logical pages", plane, (layers, entries[0].shape[1], heads, dim))
    if planes.key_sketch is not None:
        check_dtype("key_sketch", planes.key_sketch, *SKETCH_DTYPES.values())
        elements = RUN_TOKENS // tokens_per_element(planes.key_sketch.dtype)
        check_shape("key_sketch", planes.key_sketch, (layers, -1, heads, dim, elements))
        if has_scale(planes.key_sketch.dtype):
            if planes.key_sketch_scale is None:
                raise ValueError("a key_sketch of integers needs key_sketch_scale")
            check_shape("key_sketch_scale", planes.key_sketch_scale, (layers, -1, heads, page_size))


def update_planes(
    k_layers: Sequence[torch.Tensor],
    k_ptrs: torch.Tensor | None,
    planes: PlaneBuffers,
    page_table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    page_size: int,
    max_new_tokens: int,
    impl: Impl,
) -> None:
    """Bring the planes of all layers up to date with the K rows of positions [start, end).

    This writes the sketch of every such position. It computes the bounds and the cuboid-mean digest
    of every logical page that the range touches anew, from the rows [page start, min(page end,
    end)). One launch for the sketch and one for logical pages cover all layers.

    Args:
        k_layers: L tensors [slots, H, D] (bf16, fp16, fp8 e4m3; "torch" also fp32), contiguous,
            alike. Planes hold keys as they are stored, without a scale.
        k_ptrs: uint64 or int64 [L] on the device, ``data_ptr()`` of each of ``k_layers``. Needed
            by "triton".
        planes: the planes to write; those that are None are skipped.
        page_table: int32 [R, max_pages], physical page of each logical page of a row.
        start: int32 [R], first position whose K is new.
        end: int32 [R], one past the last position with K. A row with ``end <= start`` is skipped.
        page_size: tokens a physical page: 16, 32 or 64.
        max_new_tokens: host upper bound of ``end - start`` over the rows; 1 for decode.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, planes that do not fit K.
    """
    check_choice("impl", impl, IMPLS)
    if not k_layers:
        raise ValueError("k_layers is empty")
    keys = k_layers[0]
    check_shape("k_layers[0]", keys, (-1, -1, -1))
    check_contiguous("k_layers[0]", keys)
    _check_planes(planes, len(k_layers), keys.shape[1], keys.shape[2], page_size)
    check_shape("page_table", page_table, (start.shape[0], -1))
    check_shape("end", end, (start.shape[0],))
    for name, tensor in {"page_table": page_table, "start": start, "end": end}.items():
        check_dtype(name, tensor, torch.int32)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if impl != "triton":
        update_planes_reference(k_layers, planes, page_table, start, end, page_size=page_size)
        return
    if k_ptrs is None:
        raise ValueError("impl='triton' needs k_ptrs")
    check_shape("k_ptrs", k_ptrs, (len(k_layers),))
    check_dtype("k_ptrs", k_ptrs, torch.uint64, torch.int64)
    check_dtype("k_layers[0]", keys, torch.bfloat16, torch.float16, FP8)
    from .kernel import update_planes_triton

    update_planes_triton(
        keys,
        k_ptrs,
        planes,
        page_table,
        start,
        end,
        page_size=page_size,
        max_new_tokens=max_new_tokens,
    )
