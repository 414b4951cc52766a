# SPDX-License-Identifier: Apache-2.0
"""What a `PlaneSpec` accepts, and that its byte counts are those of the tensors."""

import pytest
import torch

from sglang_sparse_kernels.common import FP8
from sglang_sparse_kernels.planes import PlaneShape
from sglang_sparse_radix import PlaneSpec, plane_bytes_per_token
from sglang_sparse_radix.planes import PageBounds, PageDigest, SketchPlane

SPECS = (
    PlaneSpec(),
    PlaneSpec((PageBounds(),)),
    PlaneSpec((SketchPlane("fp8"),)),
    PlaneSpec((SketchPlane("int8"),)),
    PlaneSpec((SketchPlane("int4"),)),
    PlaneSpec((SketchPlane("auto"),)),
    PlaneSpec((PageBounds(), SketchPlane("bf16"))),
    PlaneSpec((PageBounds(), PageDigest())),
)


@pytest.mark.parametrize("page_size", [1, 8, 48, 128])
def test_page_size_that_planes_cannot_use_is_refused_in_one_line(page_size):
    with pytest.raises(ValueError, match=rf"--page-size is {page_size}; .* 16, 32 or 64") as error:
        PlaneSpec((PageBounds(),)).validate_page_size(page_size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8])
def test_other_quantised_kv_is_refused_naming_what_is_allowed(dtype):
    allowed = r"bfloat16, float16, float32, float8_e4m3fn: .*--kv-cache-dtype bfloat16 or fp8_e4m3"
    with pytest.raises(ValueError, match=allowed):
        PlaneSpec().validate_kv_dtype(dtype)


def test_a_page_that_no_whole_number_of_blocks_fills_is_refused():
    with pytest.raises(ValueError, match="logical_page is 32; it must divide --page-size 16"):
        PlaneSpec((PageDigest(32),)).validate_page_size(16)


def test_unknown_plane_choices_are_refused_naming_what_is_allowed():
    with pytest.raises(ValueError, match="logical_page is 8; allowed: 16, 32 or 64"):
        PageBounds(8)
    with pytest.raises(ValueError, match="storage is 'int3'; allowed: 'auto', 'fp8', 'int8', "):
        SketchPlane("int3")


def test_planes_of_pages_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match="logical pages of 16 or 32 tokens; allowed: one size"):
        PlaneSpec((PageBounds(16), PageDigest(32)))


def test_a_plane_that_two_choices_read_is_kept_once():
    assert PlaneSpec((PageBounds(32), PageBounds(32))).planes == (PageBounds(32),)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8])
def test_bytes_a_page_and_a_token_are_those_of_the_allocation(spec, page_size, dtype):
    layers, heads, dim, pages = 3, 2, 64, 8  # whole runs of the sketch
    planes = spec.allocate(PlaneShape(layers, pages, page_size, heads, dim, dtype), "cpu")
    page_bytes = spec.bytes_per_page(heads, dim, page_size, dtype)
    assert planes.num_bytes() == layers * pages * page_bytes
    token_bytes = plane_bytes_per_token(
        spec,
        head_num=heads,
        head_dim=dim,
        page_size=page_size,
        kv_dtype=dtype,
        num_layers=layers,
    )
    assert token_bytes * pages * page_size == planes.num_bytes()


def test_plane_shares_of_the_kv_pool_are_those_that_the_design_states():
    def share(plane, kv_dtype):
        geometry = {"head_num": 8, "head_dim": 128, "page_size": 64, "kv_dtype": kv_dtype}
        kv = 2 * 8 * 128 * kv_dtype.itemsize
        return plane_bytes_per_token(PlaneSpec((plane,)), num_layers=1, **geometry) / kv

    for plane, beside_bf16, beside_fp8 in (
        (PageBounds(), 1 / 16, 1 / 16),
        (PageDigest(32), 1 / 32, 1 / 32),
        (SketchPlane("fp8"), 1 / 4, 1 / 2),
        (SketchPlane("int4"), (1 / 2 + 2 / 128) / 4, (1 / 2 + 2 / 128) / 2),
        (SketchPlane("auto"), 1 / 4, (1 / 2 + 2 / 128) / 2),
    ):
        assert share(plane, torch.bfloat16) == beside_bf16
        assert share(plane, FP8) == beside_fp8


def test_an_uneven_geometry_is_rounded_up():
    spec = PlaneSpec((PageBounds(),))
    geometry = {"head_num": 1, "head_dim": 3, "page_size": 16, "kv_dtype": torch.bfloat16}
    assert plane_bytes_per_token(spec, num_layers=1, **geometry) == 1  # 12 bytes a page of 16
