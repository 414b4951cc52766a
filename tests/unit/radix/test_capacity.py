# SPDX-License-Identifier: Apache-2.0
"""How many tokens SGLang's own sizing gives a server of an 8B model, in bf16 and in fp8 KV."""

import inspect

import pytest
import torch
from radix_parts import configurator_of, tiny_model_config
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

from sglang_sparse.config import ConfigError, list_presets, resolve_with_source
from sglang_sparse.config.model import Geometry
from sglang_sparse.launch import SparseLaunch, attach
from sglang_sparse.pools import compute_cell_size
from sglang_sparse.state_pools import resolve_pool_config
from sglang_sparse_kernels.common import FP8

PAGE, FREE_BYTES = 64, 40 << 30
SHAPE = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096,
}  # fmt: skip


def sizing_of(kvc):
    """SGLang's sizing of one pool, with the bytes of planes."""
    sizing = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    sizing.kv_cache_dtype_str = kvc.kv_cache_dtype_str
    sizing._fixed_overhead_bytes = 0  # scratch of sharded pages, from 0.5.23 on
    # Another test of this process may have loaded the plugin.
    original = inspect.unwrap(DefaultPoolConfigurator._compute_cell_size)
    sizing._cell_size = compute_cell_size(original, sizing, kvc, 32)
    return sizing


@pytest.fixture
def tokens_of(tmp_path):
    """``max_total_num_tokens`` of a method, config and KV dtype, as the hooked SGLang has it."""
    model = tiny_model_config(tmp_path, **SHAPE)

    def tokens(method: str | None, change: str | None, kv_dtype: torch.dtype) -> int:
        with configurator_of(model, PAGE, kv_dtype) as kvc:
            if method is not None:
                geometry = Geometry.from_hf_config(model.hf_config.to_dict(), name="8b")
                resolved = resolve_with_source(method, change, geometry)
                attach(kvc.server_args, SparseLaunch(resolved))
            return sizing_of(kvc).calculate_pool_sizes(FREE_BYTES, PAGE).max_total_num_tokens

    return tokens


INT4 = 1 / 2 + 2 / 128  # bytes of a channel, with its part of the scale


# Planes halve with KV, but for the scales of a sketch in int4.
@pytest.mark.parametrize(
    ("method", "times"),
    [
        (None, 2.0),
        ("kascade", 2.0),
        ("page_minmax", 2.0),
        ("lserve", 2.0),
        ("lserve_paper", 2.0),
        ("psa", 2.0),
        ("kascade_sketch", (32 * 4 + 5) / (32 * 2 + 5 * INT4)),
        ("sparcas", (32 * 4 + 30) / (32 * 2 + 30 * INT4)),
        ("psa_sketch", (32 * 4 + 30) / (32 * 2 + 30 * INT4)),
    ],
)
def test_fp8_kv_holds_about_twice_as_many_tokens(tokens_of, method, times):
    wide, narrow = tokens_of(method, None, torch.bfloat16), tokens_of(method, None, FP8)
    assert narrow == pytest.approx(times * wide, abs=2 * PAGE)
    assert narrow >= 1.95 * wide


def test_every_method_that_selects_is_among_them():
    selecting = {ref.name for ref in list_presets() if ref.model == "llama-3.1-8b"}
    (marks,) = test_fp8_kv_holds_about_twice_as_many_tokens.pytestmark
    assert {method for method, _ in marks.args[1]} == {None, *selecting}


@pytest.mark.parametrize(
    ("method", "storage", "layers", "channel"),
    [("sparcas", "fp8", 30, 1), ("kascade_sketch", "fp8", 5, 1)],
)
def test_the_element_type_of_a_sketch_beside_fp8_kv_is_a_choice(
    tokens_of, method, storage, layers, channel
):
    change = f'{{"score": {{"storage": "{storage}"}}}}'
    wide, narrow = tokens_of(method, change, torch.bfloat16), tokens_of(method, change, FP8)
    assert wide == tokens_of(method, None, torch.bfloat16)
    times = (32 * 4 + layers) / (32 * 2 + layers * channel)
    assert narrow == pytest.approx(times * wide, abs=2 * PAGE)


def test_states_are_not_made_for_a_checkpoint_that_makes_auto_fp8(tmp_path):
    model = tiny_model_config(tmp_path, **SHAPE)
    geometry = Geometry.from_hf_config(model.hf_config.to_dict(), name="8b")
    with configurator_of(model, PAGE, FP8) as kvc:
        attach(kvc.server_args, SparseLaunch(resolve_with_source("cascade", None, geometry)))
        with pytest.raises(ConfigError, match=r"^--kv-cache-dtype auto: .*fp8_e4m3, .*bfloat16$"):
            resolve_pool_config(pytest.fail, kvc, 0)
