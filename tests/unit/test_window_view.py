# SPDX-License-Identifier: Apache-2.0
"""The model that serves the heads which hold every token: each count of heads agrees."""

import inspect
from typing import Any

import pytest
from live_server import MODEL
from sglang.srt.configs.model_config import ModelConfig

from sglang_sparse.backend.window_view import model_with


def counts(model: ModelConfig) -> dict[str, Any]:
    """What the model's methods say of its heads, on one rank."""
    found = {}
    for name, method in inspect.getmembers(model, inspect.ismethod):
        if name.startswith("get_") and name.endswith("_heads"):
            ranks = dict.fromkeys(inspect.signature(method).parameters, 1)
            found[name] = method(**ranks)
    return found


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_every_method_that_counts_heads_counts_those_of_the_view(heads: int) -> None:
    model = ModelConfig(str(MODEL))
    before = counts(model)
    group = model.num_attention_heads // model.num_key_value_heads
    assert model.num_key_value_heads != heads
    seen = model_with(model, heads)
    assert seen.num_attention_heads == group * heads
    assert seen.num_key_value_heads == heads
    assert seen.head_dim == model.head_dim
    for name, count in counts(seen).items():
        assert count == (group * heads if "attention" in name else heads), name
    # FlashInfer plans by these.
    assert {"get_max_num_attention_heads", "get_num_kv_heads"} <= before.keys()
    assert counts(model) == before
