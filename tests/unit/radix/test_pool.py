# SPDX-License-Identifier: Apache-2.0
"""The pool with planes: allocation, accounting, updates, and what it refuses."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from radix_parts import DIM, HEADS, LAYERS, configurator_of, make_pool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

from sglang_sparse_kernels.common import FP8, take
from sglang_sparse_kernels.planes import by_page
from sglang_sparse_radix.planes import PageBounds, PageDigest, SketchPlane
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import SparseMHATokenToKVPool, bind_pool_class, extra_cell_bytes

ALL = PlaneSpec((PageBounds(), PageDigest(), SketchPlane("int8")))
P = 16


def fill(pool, page_table, lengths, seed=0):
    """Write random K and V for rows of `lengths` tokens and update their planes."""
    random = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = page_table[row, positions // P].long() * P + positions % P
        for layer_id in range(LAYERS):
            layer = RadixAttention(HEADS, DIM, 1.0, num_kv_heads=HEADS, layer_id=layer_id)
            rows = torch.randn((2, length, HEADS, DIM), generator=random).to(pool.dtype)
            pool.set_kv_buffer(layer, slots, rows[0], rows[1])
    end = torch.tensor(lengths, dtype=torch.int32)
    pool.update_planes(page_table, torch.zeros_like(end), end, max_new_tokens=max(lengths))


@pytest.fixture
def with_planes_bytes():
    spec = PlaneSpec((PageBounds(), SketchPlane("fp8")))
    return spec, make_pool(spec, page_size=P, num_pages=7)


def test_pool_reports_exactly_the_bytes_of_its_tensors(with_planes_bytes):
    _, pool = with_planes_bytes
    tensors = [*pool.k_buffer, *pool.v_buffer, *pool.planes.tensors().values()]
    assert sum(pool.get_kv_size_bytes()) == sum(t.nbytes for t in tensors)
    assert pool.plane_bytes() == sum(t.nbytes for t in pool.planes.tensors().values())
    assert pool.get_kv_size_bytes()[1] == sum(t.nbytes for t in pool.v_buffer)
    assert pool.mem_usage == sum(pool.get_kv_size_bytes()) / (1 << 30)


def test_planes_cover_every_page_the_padding_page_included(with_planes_bytes):
    spec, pool = with_planes_bytes
    assert pool.num_pages == 8
    page_bytes = spec.bytes_per_page(HEADS, DIM, P, pool.dtype)
    assert pool.plane_bytes() == LAYERS * pool.num_pages * page_bytes


def test_planes_that_the_spec_leaves_out_are_not_allocated():
    pool = make_pool(PlaneSpec((PageBounds(),)), page_size=P, num_pages=2)
    assert list(pool.planes.tensors()) == ["page_min", "page_max"]
    assert make_pool(PlaneSpec(), page_size=P, num_pages=2).plane_bytes() == 0


def test_plane_bytes_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="sglang_sparse_radix.pool"):
        make_pool(PlaneSpec((SketchPlane("fp8"),)), page_size=P, num_pages=7)
    assert "KV planes are allocated. planes: key_sketch" in caplog.text
    assert "25.0% on top of K and V" in caplog.text


def test_unused_pages_hold_zeros_never_nan():
    pool = make_pool(ALL, page_size=P, num_pages=3)
    assert all((plane.float() == 0).all() for plane in pool.planes.tensors().values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
@pytest.mark.parametrize("sketch", [None, "fp8", "int8", "int4", "bf16"])
def test_update_makes_planes_equal_recomputation(dtype, sketch):
    spec = PlaneSpec(
        (PageBounds(), PageDigest(), *([] if sketch is None else [SketchPlane(sketch)]))
    )
    pool = make_pool(spec, page_size=P, num_pages=8, dtype=dtype)
    page_table = torch.tensor([[3, 1, 5], [2, 7, 0]], dtype=torch.int32)
    fill(pool, page_table, [40, 17])
    pages, rows = torch.tensor([3, 1, 5, 2, 7]), torch.tensor([16, 16, 8, 16, 1])
    assert pool.verify_planes(pages, rows) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_verification_finds_any_single_corrupted_entry(dtype):
    pool = make_pool(ALL, page_size=P, num_pages=4, dtype=dtype)
    page_table = torch.tensor([[2, 4]], dtype=torch.int32)
    fill(pool, page_table, [32])
    pages = torch.tensor([2, 4])
    for name, plane in pool.planes.tensors().items():
        paged = name == "key_sketch"
        entry = by_page(plane[1], P)[0, 4, 0, 0] if paged else plane[1, 4].view(-1)
        high = entry[3:4].view(torch.uint8)[-1:]  # an exponent's upper bits, or an integer's
        high ^= 0x40
        wrong = pool.verify_planes(pages)
        assert [(w.plane, w.layer, w.page, w.wrong_entries) for w in wrong] == [(name, 1, 4, 1)]
        high ^= 0x40
    assert pool.verify_planes(pages) == []


def test_keys_and_values_are_stored_divided_by_their_scales_and_planes_hold_what_is_stored():
    pool = make_pool(
        PlaneSpec((PageBounds(), SketchPlane("fp8"))), page_size=P, num_pages=4, dtype=FP8
    )
    table = torch.tensor([[2, 4]], dtype=torch.int32)
    rows = 100 * torch.randn((2, 20, HEADS, DIM), generator=torch.Generator().manual_seed(3))
    slots = table[0].long().repeat_interleave(P)[:20] * P + torch.arange(20) % P
    for layer_id in range(LAYERS):
        layer = RadixAttention(HEADS, DIM, 1.0, num_kv_heads=HEADS, layer_id=layer_id)
        # The pool divides what it is given in place.
        k, v = rows.bfloat16().clone()
        pool.set_kv_buffer(layer, slots, k, v, torch.tensor(4.0), torch.tensor(2.0))
    start, end = torch.tensor([[0], [20]], dtype=torch.int32)
    pool.update_planes(table, start, end, max_new_tokens=20)
    assert pool.verify_planes(torch.tensor([2, 4]), torch.tensor([P, 4])) == []
    assert pool.k_buffer[0].dtype == torch.uint8
    for buffer, given, scale in (
        (pool.get_key_buffer(0), rows[0], 4.0),
        (pool.get_value_buffer(0), rows[1], 2.0),
    ):
        stored = take(buffer, slots)
        assert torch.equal(stored.float(), (given.bfloat16() / scale).to(FP8).float())
    least = take(pool.get_key_buffer(0), slots[:P]).float().amin(0)
    assert torch.equal(take(pool.planes.page_min[0], torch.tensor([2]))[0].float(), least)


def test_verification_finds_rows_written_without_an_update():
    pool = make_pool(ALL, page_size=P, num_pages=4)
    fill(pool, torch.tensor([[2, 4]], dtype=torch.int32), [32])
    pool.k_buffer[0][4 * P + 3] *= 2
    assert {w.page for w in pool.verify_planes(torch.tensor([2, 4]))} == {4}


def test_a_reused_page_forgets_what_its_last_owner_left():
    pool = make_pool(ALL, page_size=P, num_pages=4)
    fill(pool, torch.tensor([[3]], dtype=torch.int32), [16], seed=1)
    fill(pool, torch.tensor([[3]], dtype=torch.int32), [5], seed=2)
    assert pool.verify_planes(torch.tensor([3]), torch.tensor([5])) == []


def test_class_builds_through_sglangs_cuda_path(model_config):
    with configurator_of(model_config, P) as configurator:
        pool = configurator._build_mha_kv_pool(
            max_total_num_tokens=4 * P,
            mha_pool_class=bind_pool_class(ALL, "torch"),
        )
    assert isinstance(pool, SparseMHATokenToKVPool)
    assert (pool.num_pages, pool.plane_spec, pool.impl) == (5, ALL, "torch")


def test_only_layers_that_read_planes_have_them():
    last = LAYERS - 1
    some = replace(ALL, read_by=lambda layer: layer == last)
    every, pool = (make_pool(spec, page_size=P, num_pages=5) for spec in (ALL, some))
    assert LAYERS * pool.plane_bytes() == every.plane_bytes()
    assert (pool.plane_layers, pool.plane_of(last)) == ((last,), 0)
    with pytest.raises(ValueError, match="not in tuple"):
        pool.plane_of(0)
    table, lengths = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32), [P + 3, 2 * P]
    for one in (every, pool):
        fill(one, table, lengths)
    for name, plane in pool.planes.tensors().items():
        assert torch.equal(plane[0].float(), every.planes.tensors()[name][last].float()), name
    pages, valid = torch.tensor([3, 1, 2, 4]), torch.tensor([P, 3, P, P])
    assert pool.verify_planes(pages, valid) == []
    pool.k_buffer[last][3 * P] += 1
    assert {wrong.layer for wrong in pool.verify_planes(pages, valid)} == {last}


SOME = replace(ALL, read_by=lambda layer: layer > 0)


@pytest.mark.parametrize(
    "spec", [ALL, SOME, PlaneSpec((SketchPlane("fp8"),)), PlaneSpec((PageBounds(),))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_cell_size_plus_extra_bytes_is_the_memory_that_a_pool_takes(spec, dtype, model_config):
    sizing = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    sizing.kv_cache_dtype_str = "auto"
    with configurator_of(model_config, P, dtype) as configurator:
        cell = sizing._compute_cell_size(configurator, LAYERS)
        cell += extra_cell_bytes(spec, configurator, LAYERS)
    # With the padding page whole runs.
    pool = make_pool(spec, page_size=P, num_pages=15, dtype=dtype)
    assert sum(pool.get_kv_size_bytes()) == cell * pool.num_pages * P


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, i: pool.move_kv_cache(i, i),
        lambda pool, i: pool.get_cpu_copy(i),
        lambda pool, i: pool.load_cpu_copy([], i),
        lambda pool, i: pool.get_contiguous_buf_infos(),
        lambda pool, i: pool.set_kv_buffer_prefix_valid(None, i, i, i, i),
        lambda pool, i: pool.finalize_backing(None),
    ],
)
def test_operations_that_would_leave_planes_wrong_are_refused(call):
    pool = make_pool(ALL, page_size=P, num_pages=2)
    with pytest.raises(RuntimeError, match="not supported by the sparse KV planes") as error:
        call(pool, torch.tensor([16]))
    assert "\n" not in str(error.value)


def build(**changes):
    arguments = {
        "size": 2 * P,
        "page_size": P,
        "dtype": torch.bfloat16,
        "head_num": HEADS,
        "head_dim": DIM,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return bind_pool_class(ALL, "torch")(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_head_dim": 2 * DIM}, "v_head_dim 16 with head_dim 8"),
        ({"dtype": torch.float8_e5m2}, "--kv-cache-dtype resolves to float8_e5m2"),
        ({"quant_method": SimpleNamespace(name="fp4")}, "quantized KV"),
        ({"kv_cache_layout": "page_major_layer_major"}, "--enable-page-major-kv-layout"),
        ({"post_capture_active": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ],
)
def test_pools_that_planes_are_not_defined_for_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        build(**changes)


def test_hnd_layout_is_refused():
    from sglang.srt.environ import envs

    with (
        envs.SGLANG_USE_HND_KVCACHE.override(True),
        pytest.raises(RuntimeError, match="unset SGLANG_USE_HND_KVCACHE"),
    ):
        build()


def test_page_size_and_impl_are_checked():
    with pytest.raises(ValueError, match="--page-size is 8"):
        build(page_size=8)
    with pytest.raises(ValueError, match="triton, cpu, torch"):
        bind_pool_class(ALL, "cuda")
    with pytest.raises(RuntimeError, match="bind_pool_class"):
        SparseMHATokenToKVPool(32, 16, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)


def test_no_inherited_writer_or_mover_is_left_unreviewed():
    """A new public method of SGLang's pool is a possible writer of K rows: look at it, list it."""
    reviewed_as_harmless = {
        "cpu_copy_carries_mamba",
        "get_device_pool_infos",  # describes buffers to host pools, whose flags are refused
        "get_dequant_workspace",
        "get_flashinfer_decode_dequant_workspace_kv_buffer",
        "get_flashinfer_dequant_workspace_kv_buffer",
        "get_key_buffer",
        "get_kv_buffer",
        "get_kv_buffer_shape",
        "get_kv_cache_quant_method",
        "get_raw_kv_buffer",
        "get_v_head_dim",
        "get_value_buffer",
        "hicache_write_back_staging",
        "host_capacity_bytes",
        "host_capacity_tokens",
        "host_pool_decls",
        "host_transfer_translate",
        "is_quantized_kv_cache",
        "layer_shard_enabled",
        "maybe_get_custom_mem_pool",
        "post_capture_active",
        "post_capture_backed_bytes",
        "register_layer_transfer_counter",  # loads from the host: reads wait, planes follow
        "requires_physical_write_loc",
        "set_kv_buffer",  # the forward pass; `update_planes` follows
    }
    inherited = {name for name in dir(MHATokenToKVPool) if not name.startswith("_")}
    assert inherited - set(vars(SparseMHATokenToKVPool)) - reviewed_as_harmless == set()
