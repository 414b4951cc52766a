# SPDX-License-Identifier: Apache-2.0
"""What SGLang 0.5.17 asks an out-of-tree platform for."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_sparse import pools
from sglang_sparse.compat.v0517.cpu import CpuPlatform, build_oot_mha_kv_pool
from sglang_sparse_radix.planes import PageBounds
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 8


@pytest.mark.parametrize("draft", [False, True])
def test_the_pool_class_builds_through_sglangs_platform_path(monkeypatch, draft):
    pool_class = bind_pool_class(PlaneSpec((PageBounds(),)), "torch")
    monkeypatch.setattr(pools, "kv_pool_class", lambda: pool_class)
    monkeypatch.setattr(kv_cache_configurator, "current_platform", CpuPlatform())
    kvc = KVCacheConfigurator.__new__(KVCacheConfigurator)
    fields = {
        "kv_cache_dtype": torch.bfloat16,
        "model_config": SimpleNamespace(get_num_kv_heads=lambda ranks: HEADS, head_dim=DIM),
        "layer_info": SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        "device": "cpu",
        "page_size": PAGE,
        "is_draft_worker": draft,
    }
    with (
        get_context().override_server_args(page_size=PAGE, device="cpu") as server_args,
        get_parallel().override(attn_tp_size=1),
    ):
        for name, value in (fields | {"server_args": server_args}).items():
            setattr(kvc, name, value)
        original = KVCacheConfigurator._build_oot_mha_kv_pool
        pool = build_oot_mha_kv_pool(original, kvc, max_total_num_tokens=4 * PAGE)
    # A draft model has no planes, and the next pool has them again.
    assert type(pool) is (MHATokenToKVPool if draft else pool_class)
    assert CpuPlatform().get_mha_kv_pool_cls() is pool_class
