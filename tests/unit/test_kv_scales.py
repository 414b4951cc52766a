# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized KV: applied on both sides of the pool, or refused by name."""

import pytest
import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_sparse import compat
from sglang_sparse.backend.kv_scales import StoredKV
from sglang_sparse.config import ConfigError
from sglang_sparse_kernels.common import FP8, take
from sglang_sparse_kernels.records import KVScales, KVView
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

HEADS, DIM, PAGE = 2, 64, 16


def layer_of(k_scale: float | None = None, v_scale: float | None = None) -> RadixAttention:
    """A layer as SGLang loads it: without scales, or with those of a checkpoint."""
    layer = RadixAttention(HEADS, DIM, 1.0, num_kv_heads=HEADS, layer_id=0)
    if k_scale is not None and v_scale is not None:
        method = BaseKVCacheMethod(None)
        method.create_weights(layer)
        layer.k_scale.fill_(k_scale)
        layer.v_scale.fill_(v_scale)
        method.process_weights_after_loading(layer)
    return layer


def test_what_is_written_divided_is_read_multiplied() -> None:
    layer = layer_of(4.0, 0.5)
    stored = StoredKV(FP8, "triton", [layer])
    pool = bind_pool_class(PlaneSpec(), "torch")(
        2 * PAGE, page_size=PAGE, dtype=FP8, head_num=HEADS, head_dim=DIM, layer_num=1,
        device="cpu", enable_memory_saver=False, start_layer=0, end_layer=1,
    )  # fmt: skip
    # Keys up to 1792 fit once divided, and values come out of fp8's subnormal numbers.
    random = torch.Generator().manual_seed(1)
    k = 400 * torch.randn((PAGE, HEADS, DIM), generator=random).clamp(-4, 4)
    v = 0.01 * torch.randn((PAGE, HEADS, DIM), generator=random)
    slots = PAGE + torch.arange(PAGE)
    pool.set_kv_buffer(layer, slots, k.clone(), v.clone(), *stored.write(layer))
    assert take(pool.get_key_buffer(0), slots).float().abs().max() > 300
    table = torch.tensor([[1]], dtype=torch.int32)
    view = KVView(pool.get_key_buffer(0), pool.get_value_buffer(0), table, PAGE, stored.read(layer))
    for got, want, scale in (
        (view.keys(slots, torch.float32), k, 4.0),
        (view.values(slots, torch.float32), v, 0.5),
    ):
        # Half a unit in the last of four binary digits, or of the subnormal numbers.
        slack = torch.maximum(2.0**-4 * want.abs(), torch.tensor(scale * 2.0**-10))
        assert ((got - want).abs() <= slack).all()


@pytest.mark.parametrize("inner", ["flashinfer", "triton", "torch_native"])
def test_layers_without_scales_are_stored_as_they_are(inner: str) -> None:
    for layer in (layer_of(), layer_of(1.0, 1.0)):
        stored = StoredKV(FP8, inner, [layer])
        assert stored.read(layer) == KVScales()


def test_torch_native_writes_and_reads_without_scales() -> None:
    layer = layer_of(4.0, 0.5)
    stored = StoredKV(FP8, "torch_native", [layer])
    assert stored.write(layer) == (None, None)
    assert stored.read(layer) == KVScales()


def test_a_backend_that_loses_scales_is_refused_by_name() -> None:
    layer, reads = layer_of(4.0, 0.5), compat.current().READS_KV_SCALES
    for inner in ("flashinfer", "triton"):
        if inner in reads:
            assert StoredKV(FP8, inner, [layer]).read(layer) == KVScales(4.0, 0.5)
            continue
        with pytest.raises(ConfigError) as refusal:
            StoredKV(FP8, inner, [layer_of(), layer])
        for word in ("k_scale 4", "layer 0", f"inner={inner}", "set inner to triton", "prefixes"):
            assert word in str(refusal.value)


def test_scales_beside_kv_that_is_not_quantized_are_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        StoredKV(torch.bfloat16, "triton", [layer_of(4.0, 0.5)])
    for word in ("--kv-cache-dtype", "bfloat16 with k_scale 4", "start with", "fp8_e4m3"):
        assert word in str(refusal.value)


def test_scales_that_are_not_positive_are_refused() -> None:
    layer = layer_of(4.0, 0.5)
    layer.k_scale_float = 0.0
    with pytest.raises(ConfigError, match="KV scales above 0"):
        StoredKV(FP8, "triton", [layer])
