# SPDX-License-Identifier: Apache-2.0
"""Sizes of KV in host memory that do not fit are refused by name when the pool is sized."""

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_sparse import placed, placed_pools
from sglang_sparse.config import ConfigError, Geometry, resolve_with_source
from sglang_sparse.launch import SparseLaunch, launch_of
from sglang_sparse_radix import host_kv

LAYERS, HEADS, DIM, PAGE = 4, 2, 64, 16
SHAPE = Geometry(
    name="small", num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS,
    head_dim=DIM,
)  # fmt: skip
CELL = 2 * HEADS * DIM * 2 * LAYERS  # keys and values of a token in all layers, bf16
# Ends of a page are two rows of keys, for each page of 16 tokens; blocks have a place each.
ON_DEVICE = 2 * HEADS * DIM * 2 * LAYERS + 4 * HEADS * LAYERS


class Configurator:
    """What `resolve_pool_config` reads of SGLang's; `free` bytes of the device are left."""

    is_draft_worker = False
    device = "cuda"
    page_size = PAGE
    server_args = SimpleNamespace(mem_fraction_static=0.5)
    layer_info = SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS)
    model_config = SimpleNamespace(head_dim=DIM, get_num_kv_heads=lambda ranks: HEADS // ranks)
    kv_cache_dtype = torch.bfloat16

    def __init__(self, free: int) -> None:
        self.free = free

    def _profile_available_bytes(self, _: int) -> int:
        return self.free

    def _apply_token_constraints(self, tokens: int) -> int:
        return tokens

    def resolve_max_num_reqs(self, tokens: int) -> int:
        return tokens // 100


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sizes a pool by `placement`, with so much free memory of the device and of the host."""

    def size(device_bytes: int | None, host_bytes: int, *, free: int, host: int = 1 << 40) -> Any:
        placement = {"kind": "host", "device_bytes": device_bytes, "host_bytes": host_bytes}
        config = {"layers": {"kind": "every"}, "page_size": PAGE, "placement": placement}
        launch = SparseLaunch(resolve_with_source("page_minmax", json.dumps(config), SHAPE))
        monkeypatch.setattr(placed_pools, "placed_launch_of", lambda _: launch)
        monkeypatch.setattr(placed, "free_host_bytes", lambda: host)
        asked = pytest.fail  # SGLang sizes pools of the device
        return placed_pools.resolve_pool_config(asked, Configurator(free), 0)

    with get_parallel().override(attn_tp_size=1):
        yield size


def test_tokens_are_what_the_host_holds_but_for_a_page(sized: Any) -> None:
    pool = sized(1000, 11 * PAGE * CELL, free=1 << 30)
    assert pool.max_total_num_tokens == 10 * PAGE
    assert pool.max_running_requests == 10 * PAGE // 100
    assert sized(1000, 11 * PAGE * CELL - 1, free=1 << 30).max_total_num_tokens == 9 * PAGE


def test_tokens_are_no_more_than_the_device_has_planes_for(sized: Any) -> None:
    assert sized(1000, 1 << 30, free=1000 + 7 * ON_DEVICE).max_total_num_tokens == 7 * PAGE
    assert sized(1000, 1 << 30, free=999 + 7 * ON_DEVICE).max_total_num_tokens == 6 * PAGE


def test_unset_device_bytes_may_take_what_planes_leave(
    sized: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_bytes = 11 * PAGE * CELL
    assert sized(None, host_bytes, free=20 * ON_DEVICE).max_total_num_tokens == 10 * PAGE
    assert launch_of(Configurator.server_args).free == 9 * ON_DEVICE
    monkeypatch.setattr(Configurator, "device", "cpu")
    sized(None, host_bytes, free=1 << 30, host=host_bytes + 12 * ON_DEVICE)
    assert launch_of(Configurator.server_args).free == ON_DEVICE


def test_on_a_cpu_one_memory_has_all_of_it(sized: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host_bytes = 11 * PAGE * CELL
    host = host_bytes + 1000 + 7 * ON_DEVICE
    assert sized(1000, host_bytes, free=1 << 30, host=host).max_total_num_tokens == 10 * PAGE
    monkeypatch.setattr(Configurator, "device", "cpu")
    assert sized(1000, host_bytes, free=1 << 30, host=host).max_total_num_tokens == 7 * PAGE
    below = 1000 + 7 * ON_DEVICE
    with pytest.raises(ConfigError, match=rf"device_bytes={below}: .*below {below}, which are"):
        sized(below, host_bytes, free=1 << 30, host=host)


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "free", "host", "message"),
    [
        (1000, 5000, 1 << 30, 4999, r"host_bytes=5000: .*allowed: up to 4999, the free memory of"),
        (1000, 2 * PAGE * CELL - 1, 1 << 30, 1 << 40, rf"allowed: at least {2 * PAGE * CELL};"),
        (1000, 1 << 30, 999 + ON_DEVICE, 1 << 40, rf"allowed: below {999 + ON_DEVICE}, which are"),
    ],
    ids=["host", "page", "device"],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    sized: Any, device_bytes: int, host_bytes: int, free: int, host: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^--sparse-config placement\..*{message}"):
        sized(device_bytes, host_bytes, free=free, host=host)


def test_a_checkpoint_that_makes_auto_fp8_is_refused(
    sized: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Configurator, "kv_cache_dtype", torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype auto: .*fp8_e4m3, .*bfloat16$"):
        sized(1000, 11 * PAGE * CELL, free=1 << 30)


def test_memory_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(host_kv.HostMemoryError, match="it cannot be allocated"):
        host_kv.host_blocks((1 << 60,), torch.int8, pinned=False)
    assert math.prod(host_kv.host_blocks((3, 5), torch.int8, pinned=False).shape) == 15
