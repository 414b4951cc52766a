# SPDX-License-Identifier: Apache-2.0
"""What SGLang 0.5.17 asks an out-of-tree platform for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_sparse_radix.planes import PageBounds
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import SparseMHATokenToKVPool, bind_pool_class

PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 8


def test_the_pool_class_builds_through_sglangs_platform_path(monkeypatch):
    pool_class = bind_pool_class(PlaneSpec((PageBounds(),)), "torch")
    platform = SimpleNamespace(get_mha_kv_pool_cls=lambda: pool_class)
    monkeypatch.setattr(kv_cache_configurator, "current_platform", platform)
    kvc = KVCacheConfigurator.__new__(KVCacheConfigurator)
    fields = {
        "kv_cache_dtype": torch.bfloat16,
        "model_config": SimpleNamespace(get_num_kv_heads=lambda ranks: HEADS, head_dim=DIM),
        "layer_info": SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        "device": "cpu",
        "page_size": PAGE,
        "is_draft_worker": False,
    }
    with (
        get_context().override_server_args(page_size=PAGE, device="cpu") as server_args,
        get_parallel().override(attn_tp_size=1),
    ):
        for name, value in (fields | {"server_args": server_args}).items():
            setattr(kvc, name, value)
        pool = kvc._build_oot_mha_kv_pool(max_total_num_tokens=4 * PAGE)
    assert isinstance(pool, SparseMHATokenToKVPool)
