# SPDX-License-Identifier: Apache-2.0
"""Plane updates: the definition against loops, the kernel bit for bit against the definition."""

from dataclasses import replace

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, dot_rounding
from kernel_cases import DEVICE, Batch, poison

from sglang_sparse_kernels import PlaneBuffers, PlaneShape, quantize_sketch, update_planes
from sglang_sparse_kernels.planes import by_page, sketch_values

SKETCHES = ("fp8", "int8", "int4", "bf16")


def fresh_planes(batch: Batch, sketch: str | None, mean: bool = False) -> PlaneBuffers:
    planes = PlaneBuffers.allocate(
        PlaneShape(
            batch.layers, batch.num_pages, batch.page_size, batch.heads, batch.dim, batch.k[0].dtype
        ),
        page_minmax=True,
        page_mean=mean,
        key_sketch=sketch,
        device=DEVICE,
    )
    poison(planes)
    return planes


def update(batch: Batch, planes: PlaneBuffers, start: list[int], end: list[int], impl: str) -> None:
    update_planes(
        batch.k,
        batch.k_ptrs,
        planes,
        batch.plan.page_table,
        torch.tensor(start, dtype=torch.int32, device=DEVICE),
        torch.tensor(end, dtype=torch.int32, device=DEVICE),
        page_size=batch.page_size,
        max_new_tokens=max(1, *(e - s for s, e in zip(start, end, strict=True))),
        impl=impl,
    )


def as_bytes(planes: PlaneBuffers) -> dict[str, torch.Tensor]:
    return {name: plane.view(torch.uint8) for name, plane in planes.tensors().items()}


@pytest.mark.parametrize("sketch", SKETCHES)
def test_reference_equals_a_loop_over_tokens(sketch: str) -> None:
    batch = Batch([70, 33], page_size=32, layers=2, seed=3)
    planes, want = fresh_planes(batch, sketch), fresh_planes(batch, sketch)
    start, end = [17, 0], [70, 33]
    update(batch, planes, start, end, "torch")
    for row, (first, last) in enumerate(zip(start, end, strict=True)):
        for position in range(first // 16 * 16, last):
            page = int(batch.plan.page_table[row, position // 32])
            offset = position % 32
            for layer in range(2):
                keys = batch.k[layer][page * 32 + offset]
                entry = page * 2 + offset // 16
                for plane, pick in ((want.page_min, torch.minimum), (want.page_max, torch.maximum)):
                    old = plane[layer, entry]
                    plane[layer, entry] = keys if position % 16 == 0 else pick(old, keys)
                if position < first:
                    continue
                quantized, scale = quantize_sketch(keys, want.key_sketch.dtype)
                if sketch == "int4":
                    byte = by_page(want.key_sketch, 32)[
                        layer, page // 4, page % 4, ..., offset % 16
                    ]
                    low, high = byte & 15, byte >> 4
                    low, high = (quantized, high) if offset < 16 else (low, quantized)
                    byte.copy_(low + 16 * high)
                    want.key_sketch_scale[layer, page, :, offset] = scale
                    continue
                byte = want.key_sketch.element_size()
                view = torch.uint8 if byte == 1 else torch.int16
                paged = by_page(want.key_sketch, 32).view(view)
                paged[layer, page // 4, page % 4, ..., offset] = quantized.view(view)
                if scale is not None:
                    want.key_sketch_scale[layer, page, :, offset] = scale
    for name, plane in as_bytes(planes).items():
        assert torch.equal(plane, as_bytes(want)[name]), name


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize(
    ("page_size", "dim", "dtype", "start", "end"),
    [
        (64, 64, torch.bfloat16, [0, 62, 100, 5], [1, 63, 111, 5]),
        (32, 128, torch.float16, [30, 0, 17, 0], [130, 63, 49, 0]),
        (16, 64, torch.bfloat16, [256, 15, 0, 1], [257, 31, 111, 30]),
        (64, 128, torch.float16, [128, 3, 63, 0], [257, 3, 64, 30]),
    ],
)
def test_kernel_equals_the_reference_bit_for_bit(
    sketch: str, page_size: int, dim: int, dtype: torch.dtype, start: list, end: list
) -> None:
    batch = Batch([257, 63, 111, 30], page_size=page_size, dim=dim, dtype=dtype, layers=2, seed=dim)
    got, want = fresh_planes(batch, sketch), fresh_planes(batch, sketch)
    update(batch, got, start, end, "triton")
    update(batch, want, start, end, "torch")
    for name, plane in as_bytes(got).items():
        assert torch.equal(plane, as_bytes(want)[name]), name


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("sketch", SKETCHES)
def test_decode_after_prefill_equals_recomputation(impl: str, sketch: str) -> None:
    batch = Batch([75, 1, 34], page_size=32, layers=2, seed=11)
    grown, whole = fresh_planes(batch, sketch), fresh_planes(batch, sketch)
    last = [75, 1, 34]
    first = [70, 0, 30]
    update(batch, grown, [0, 0, 0], first, impl)
    while first != last:
        step = [min(a + 1, b) for a, b in zip(first, last, strict=True)]
        update(batch, grown, first, step, impl)
        first = step
    update(batch, whole, [0, 0, 0], last, "torch")
    for name, plane in as_bytes(grown).items():
        assert torch.equal(plane, as_bytes(whole)[name]), name


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("sketch", ["fp8", "int8", "int4"])
def test_extreme_keys_saturate_and_zero_keys_stay_zero(impl: str, sketch: str) -> None:
    batch = Batch([16], page_size=16, seed=1)
    page = int(batch.plan.page_table[0, 0])
    rows = batch.k[0][page * 16 : page * 16 + 16]
    rows[0] = 0
    rows[1, :, :8] = torch.tensor([448.0, -448, 460, 1e4, -1e4, 464, 1e-3, -2e-3], device=DEVICE)
    planes = fresh_planes(batch, sketch)
    update(batch, planes, [0], [16], impl)
    stored = sketch_values(by_page(planes.key_sketch, 16)[0, 0, page], torch.float32)
    assert not stored.isnan().any()
    assert (stored[..., 0] == 0).all()
    if sketch == "fp8":
        assert stored[0, :6, 1].tolist() == [448, -448, 448, 448, -448, 448]
    else:
        most = 127 if sketch == "int8" else 7
        assert (stored[0, 3, 1], stored[0, 4, 1]) == (most, -most)
        assert planes.key_sketch_scale[0, page, 0, 0] == 0


def naive_cuboid(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The digest of keys [n, H, D], one at a time in float64."""
    low, high = keys[0].double(), keys[0].double()
    for key in keys[1:].double():
        low, high = torch.minimum(low, key), torch.maximum(high, key)
    centre = (low + high) / 2
    far = sum((key - centre).abs() for key in keys.double()) / len(keys)
    return centre - far, centre + far


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("unit", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_equal_a_loop_after_prefill_and_decode(
    impl: str, unit: int, dtype: torch.dtype
) -> None:
    batch = Batch([111, 1, 63], layers=2, dtype=dtype, seed=unit)
    planes = replace(fresh_planes(batch, None, mean=True), logical_page=unit)
    for first, last in (
        ([0, 0, 0], [108, 0, 63]),
        ([108, 0, 5], [110, 1, 5]),
        ([110, 1, 5], [111, 1, 5]),
    ):
        update(batch, planes, first, last, impl)
    for row, length in enumerate(batch.lengths):
        for block in range(-(-length // unit)):
            page = int(batch.plan.page_table[row, block * unit // 64])
            within = block * unit % 64
            count = min(unit, length - block * unit)
            for layer in range(2):
                keys = batch.k[layer][page * 64 + within :][:count]
                entry = page * (64 // unit) + within // unit
                size = keys.abs().max().double()
                for plane, want in zip(
                    (planes.page_mean_low, planes.page_mean_high), naive_cuboid(keys), strict=True
                ):
                    # Rounded once to the plane's dtype, after float32 sums of `unit` distances.
                    slack = UNIT_ROUNDOFF[dtype] * want.abs() + dot_rounding(size, unit)
                    assert ((plane[layer, entry].double() - want).abs() <= slack).all()
                assert torch.equal(planes.page_min[layer, entry], keys.amin(0))


def test_a_kernel_never_falls_back_without_pointers() -> None:
    batch = Batch([20])
    planes = fresh_planes(batch, "fp8")
    length = torch.tensor([20], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="needs k_ptrs"):
        update_planes(
            batch.k,
            None,
            planes,
            batch.plan.page_table,
            length - 1,
            length,
            page_size=64,
            max_new_tokens=1,
            impl="triton",
        )
