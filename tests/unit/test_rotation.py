# SPDX-License-Identifier: Apache-2.0
"""Which models' rotations a cache can take over: SGLang's own rotary embeddings, on the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_sparse.config import ConfigError

DIM, ROWS = 64, 100
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000,
}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """SGLang's layers read the server's arguments."""
    from live_server import base_args
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(prepare_server_args(base_args()))


def runner_of(*ropes: Any, dim: int = DIM, **config: Any) -> Any:
    """What the check reads of a runner: a model whose layers attend after such rotations.

    ``config``: of the model's Hugging Face configuration, 1,024 positions unless it says otherwise.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = []
    for i, rope in enumerate(ropes):
        layer = nn.Module()
        layer.attn = RadixAttention(2, dim, dim**-0.5, num_kv_heads=2, layer_id=i)
        if rope is not None:
            layer.rotary_emb = rope
        layers.append(layer)
    return SimpleNamespace(
        server_args=SimpleNamespace(model_path="some/model"),
        model=nn.ModuleList(layers),
        model_config=SimpleNamespace(
            head_dim=dim,
            hf_text_config=SimpleNamespace(**{"max_position_embeddings": 1024} | config),
        ),
        device="cpu",
        dtype=torch.float32,
    )


def rope_of(scaling: dict[str, Any] | None = None, **changes: Any) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    arguments = {"rotary_dim": DIM, "max_position": 1024, "base": 10000, "is_neox_style": True}
    return get_rope(DIM, rope_scaling=scaling, dtype=torch.float32, **arguments | changes)


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_the_table_rotates_as_the_model_does(scaling: dict[str, Any] | None) -> None:
    from sglang_sparse.backend.rotation import rotation_table
    from sglang_sparse_kernels.cascade.reference import rotate

    rope = rope_of(scaling)
    table = rotation_table(runner_of(rope, rope), ROWS)
    assert table.shape == (ROWS, DIM)
    x = torch.randn(ROWS, DIM)
    turned, _ = rope(torch.arange(ROWS), x.clone(), x.clone())
    torch.testing.assert_close(rotate(x, table), turned)


@pytest.mark.parametrize(
    ("ropes", "problem"),
    [
        (lambda: [rope_of(YARN)], "changes vectors at position 0"),
        (lambda: [rope_of(is_neox_style=False)], "rotates otherwise"),
        (lambda: [rope_of(rotary_dim=32)], "is not such a table"),
        (lambda: [rope_of(), rope_of(base=500)], "has 2 rotary embeddings"),
        (lambda: [rope_of(), None], "has no rotary embedding"),
    ],
)
def test_other_rotations_are_refused_by_name(ropes: Any, problem: str) -> None:
    from sglang_sparse.backend.rotation import rotation_table

    with pytest.raises(ConfigError, match=problem) as refused:
        rotation_table(runner_of(*ropes()), ROWS)
    assert str(refused.value).startswith("--model-path some/model")


def test_a_cache_beyond_the_models_positions_is_refused() -> None:
    from sglang_sparse.backend.rotation import rotation_table

    rope = rope_of(max_position=64)
    most = rope.cos_sin_cache.shape[0]
    with pytest.raises(ConfigError, match=f"at most {most} tokens held"):
        rotation_table(runner_of(rope), most + 1)


# What SGLang's own context length of such a model is.
@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        (LLAMA3, 64),
        ({"rope_type": "other", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_a_table_lengthened_to_the_context_length_is_no_more_that_the_model_knows(
    scaling: dict[str, Any] | None, most: int
) -> None:
    from sglang_sparse.backend.rotation import rotation_table

    rope = rope_of(max_position=64)
    rope._ensure_cos_sin_cache_length(100_000)
    assert rope.cos_sin_cache.shape[0] > 100_000
    runner = runner_of(rope, max_position_embeddings=64, rope_scaling=scaling)
    assert rotation_table(runner, most).shape == (most, DIM)
    with pytest.raises(ConfigError, match=f"at most {most} tokens held"):
        rotation_table(runner, most + 1)


def test_models_that_write_kv_in_their_rope_kernel_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_sparse import compat
    from sglang_sparse.backend.rotation import rotation_table

    runner = runner_of(rope_of())
    rotation_table(runner, ROWS)
    monkeypatch.setattr(compat, "writes_kv_in_rope", lambda model: model is runner.model)
    with pytest.raises(ConfigError, match="writes K and V inside its RoPE kernel") as refused:
        rotation_table(runner, ROWS)
    assert str(refused.value).startswith("--model-path some/model")


def test_models_that_write_kv_in_their_rope_kernel_are_told_apart() -> None:
    from sglang.srt.models import llama, qwen3_moe

    from sglang_sparse import compat

    for module, name, writes in (
        (llama, "LlamaForCausalLM", False),
        (qwen3_moe, "Qwen3MoeForCausalLM", True),
    ):
        model = object.__new__(getattr(module, name))
        assert compat.writes_kv_in_rope(model) is writes
