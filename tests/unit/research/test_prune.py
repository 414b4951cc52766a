# SPDX-License-Identifier: Apache-2.0
"""Pruning drops the neurons that weigh least, and nothing else."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_sparse.research import prune


def weights(layers: int, neurons: int, dead: list[int]) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": torch.randn(9, 8)}
    for layer in range(layers):
        for part, shape in (("gate", (neurons, 8)), ("up", (neurons, 8)), ("down", (8, neurons))):
            found[f"model.layers.{layer}.mlp.{part}_proj.weight"] = torch.randn(shape)
        found[f"model.layers.{layer}.mlp.up_proj.weight"][dead] = 0.0
    return found


def mlp(of: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    gate, up, down = (
        of[f"model.layers.{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")
    )
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_neurons_that_add_nothing_go_first() -> None:
    before = weights(2, 13, dead=[0, 4, 12])
    after = prune.prune(before, 2, 10)
    x = torch.randn(5, 8)
    for layer in range(2):
        assert after[f"model.layers.{layer}.mlp.down_proj.weight"].shape == (8, 10)
        torch.testing.assert_close(mlp(after, layer, x), mlp(before, layer, x))
    assert after["model.embed_tokens.weight"] is before["model.embed_tokens.weight"]


def test_the_command_writes_a_narrower_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    save_file(weights(1, 7, [2]), model / "model.safetensors")
    config = {"num_hidden_layers": 1, "intermediate_size": 7, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text(name)
    arguments = ["prune", "--model", str(model), "--out", str(out), "--neurons"]
    monkeypatch.setattr(sys, "argv", [*arguments, "6"])
    prune.main()
    assert json.loads((out / "config.json").read_text()) == config | {"intermediate_size": 6}
    assert load_file(out / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"].shape[0] == 6
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    monkeypatch.setattr(sys, "argv", [*arguments, "8"])
    with pytest.raises(SystemExit, match="--neurons 8; allowed: 1 to 7"):
        prune.main()
