# SPDX-License-Identifier: Apache-2.0
"""A mean of models is one of their weights, and only of models of one shape."""

import sys
from pathlib import Path

import pytest
import torch

from sglang_sparse.research import average
from sglang_sparse.research.export import export, load
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.tasks import FileEncoder

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"
SHAPE = ModelConfig(hidden_size=32, intermediate_size=24, layers=2, heads=4, kv_heads=2, head_dim=8)


def test_each_weight_is_the_mean_of_those_of_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, folders = FileEncoder(MODEL), [tmp_path / name for name in ("a", "b", "c")]
    for seed, folder in enumerate(folders):
        export(ReferenceModel(SHAPE, seed), folder, encoder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((MODEL / name).read_bytes())
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["average", *map(str, folders), "--out", str(out)])
    average.main()
    states, mean = [load(folder).state_dict() for folder in folders], load(out).state_dict()
    assert mean.keys() == states[0].keys()
    for name, found in mean.items():
        right = sum(state[name].double() for state in states) / len(states)
        # Weights are stored in bf16: 8 bits of mantissa, rounded to nearest.
        torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-7)
    assert any(not torch.equal(mean[name], states[0][name]) for name in mean)
    assert (out / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    before = (folders[1] / "model.safetensors").read_bytes()
    for models, into, why in (
        (folders, folders[1], "is one of the models"),
        ([tmp_path / "none"], out, "No such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["average", *map(str, models), "--out", str(into)])
        with pytest.raises(SystemExit, match=why):
            average.main()
    assert (folders[1] / "model.safetensors").read_bytes() == before


def test_models_of_two_shapes_have_no_mean() -> None:
    other = ModelConfig(**{**vars(SHAPE), "layers": 1})
    with pytest.raises(ValueError, match="of one shape can be averaged, not of 2"):
        average.average([ReferenceModel(SHAPE, 0), ReferenceModel(other, 1)])
