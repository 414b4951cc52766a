# SPDX-License-Identifier: Apache-2.0
"""A mean of models is one of their weights, and only of models of one shape."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sglang_sparse.research import average
from sglang_sparse.research.export import export, load
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.tasks import FileEncoder, Sample, TaskSuite

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"
SHAPE = ModelConfig(hidden_size=32, intermediate_size=24, layers=2, heads=4, kv_heads=2, head_dim=8)


def write(folder: Path, seed: int) -> Path:
    """A small model of ``seed`` in ``folder``."""
    export(ReferenceModel(SHAPE, seed), folder, MODEL)
    return folder


def test_each_weight_is_the_mean_of_those_of_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c"))]
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


def test_the_share_of_wrong_answers_is_that_of_drawing_each_token_alone() -> None:
    """Of prompts of several lengths side by side, and of one alone."""
    model, suite = load(MODEL), TaskSuite(FileEncoder(MODEL))
    model.model.norm.weight.data *= 0.5  # it answers prompts as short as these too surely
    samples = [suite.sample(task, 256, 11) for task in ("joined", "sentences", "passkey")]
    assert len({len(s.prompt_ids) for s in samples}) == len(samples)
    rights = []
    for sample in samples:
        ids, right = list(sample.prompt_ids), 1.0
        for token in sample.answer_ids:
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([ids]))[0, -1])
            right *= float(torch.softmax(logits.double(), 0)[token])
            ids.append(token)
        rights.append(right)
    expected = 1 - sum(rights) / len(rights)
    assert 0.05 < expected < 0.95
    # Some twenty logits of fp32, each of sums of a few hundred terms.
    assert average.wrong(model, [samples[:2], samples[2:]]) == pytest.approx(expected, abs=1e-4)


def filled(weight: float) -> ReferenceModel:
    model = ReferenceModel(SHAPE, 0)
    for p in model.parameters():
        p.data.fill_(weight)
    return model


@pytest.mark.parametrize(
    ("weights", "chosen", "least"),
    [
        # The mean of 1.5 and -1 is 0.75 off from one, that with 4 instead 1.75, with 9 4.25.
        ((4.0, -1.0, 9.0, 1.5), [3], 0.5),
        # -1 is the best; with 4 it is 0.5 off, with 9 beside both 3.
        ((4.0, -1.0, 9.0), [1, 0], 0.5),
        # 2.5 is the best; with -1.5 it is 0.5 off, with 4 beside both 2/3.
        ((2.5, 4.0, -1.5), [0, 2], 0.5),
    ],
)
def test_greedily_the_best_comes_first_and_what_makes_the_mean_worse_stays_out(
    weights: tuple[float, ...], chosen: list[int], least: float
) -> None:
    def far_from_one(model: ReferenceModel) -> float:
        return abs(model.model.norm.weight[0].item() - 1)

    assert average.greedy([filled(w) for w in weights], far_from_one) == (chosen, least)


def test_the_command_averages_what_it_says_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write(tmp_path / str(seed), seed) for seed in range(3)]
    flags = ["--greedy", "--tasks", "passkey", "--lengths", "256", "--count", "3"]
    command = ["average", *map(str, folders), "--out", str(tmp_path / "out"), *flags]
    monkeypatch.setattr(sys, "argv", command)
    losses = iter((0.9, 0.5, 0.7, 0.6, 0.4))
    asked: list[int] = []

    def wrong(model: ReferenceModel, samples: Sequence[Sequence[Sample]]) -> float:
        asked.append(sum(map(len, samples)))
        return next(losses)

    monkeypatch.setattr(average, "wrong", wrong)
    average.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"averaged": [str(folders[1]), str(folders[0])], "wrong": 0.4}
    assert asked == [3] * 5
    pair = [load(folder) for folder in folders[:2]]
    found = load(tmp_path / "out").state_dict()
    for name, weight in average.average(pair).state_dict().items():
        assert torch.equal(found[name], weight.bfloat16().float())


def test_models_of_two_shapes_have_no_mean() -> None:
    other = ModelConfig(**{**vars(SHAPE), "layers": 1})
    with pytest.raises(ValueError, match="of one shape can be averaged, not of 2"):
        average.average([ReferenceModel(SHAPE, 0), ReferenceModel(other, 1)])
