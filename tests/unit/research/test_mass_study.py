# SPDX-License-Identifier: Apache-2.0
"""The study of a share of the mass: what it concludes, and that it goes on where it ended."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.research.mass_study import MassStudy, draw, policies
from sglang_sparse.research.policies import Policy

BASE = Policy("page_mean", page=32, sink=4, recent=8, share="mean", dense_layers=1)


class Runs:
    """Stands in for the model: how often a policy is right and what it touches follow from it."""

    count, seed = 10, 1

    def __init__(self) -> None:
        self.measured: list[tuple[int, int, float]] = []
        self.suite = self

    def samples(self, task: str, length: int, count: int, seed: int) -> list[Any]:
        return [SimpleNamespace(task=task, length=length, index=i) for i in range(count)]

    def prefilled(self, samples: list[Any], length: int) -> list[Any]:
        return [(part, SimpleNamespace(shares=None)) for part in (samples[:7], samples[7:])]

    def marks(self, samples: list[Any], decoder: Any, policy: Policy) -> list[bool]:
        length = samples[0].length
        if samples[0].index == 0:
            self.measured.append((length, policy.budget, policy.epsilon))
        touched, marks = float(length), [True] * len(samples)
        if policy.epsilon:
            touched = 96.0 if policy.margin is not None else 64.0
            marks = [s.task == "a" or s.index > 0 or policy.margin is not None for s in samples]
            if decoder.shares is not None:
                decoder.shares += [torch.full((len(samples), 2, 1), policy.epsilon)] * 3
        elif policy.kind != "dense":
            touched = policy.budget
            marks = [touched >= (256 if s.task == "a" else 128) or s.index % 2 > 0 for s in samples]
        decoder.row_tokens = torch.tensor([[float(length)], [float(touched)]])
        decoder.row_tokens = decoder.row_tokens.expand(2, len(samples))
        return marks

    def say(self, **entry: Any) -> None:
        """Nothing listens."""


def test_the_cheapest_policies_that_keep_the_accuracy_are_compared(tmp_path: Path) -> None:
    study = MassStudy(Runs(), BASE, tmp_path / "mass.json")
    study.run(["a", "b"], [512, 1024], policies(BASE, [64, 128, 256, 512], [0.9], [0.9], 384, 6.0))
    best = study.conclude()
    assert best["each_task"]["fixed"] == best["mixed"]["fixed"] == "fixed 256"
    assert best["each_task"]["mass"] == best["mixed"]["mass"] == "mass 0.9 scored"
    assert best["mixed"]["times_less"] == pytest.approx(256 / 96)
    whole = (256 + 768) / (96 + 768)
    assert best["mixed"]["times_less_over_all_layers"] == pytest.approx(whole)
    rows = study.result["rows"]
    assert rows["fixed 128"]["exact_by_task"] == {"a": 0.5, "b": 1.0}
    assert rows["mass 0.9 observed_min"]["kept"] == {"mixed": 0.95, "each_task": 0.9}
    assert len(rows["mass 0.9 scored"]["cells"]) == 4
    draw(study.result, tmp_path)
    assert all((tmp_path / f"mass_{name}.png").stat().st_size for name in ("accuracy", "layers"))


def test_a_study_goes_on_where_it_ended_and_takes_cells_of_others(tmp_path: Path) -> None:
    named = policies(BASE, [128], [], [], 384, 6.0)
    ours, theirs = Runs(), Runs()
    MassStudy(ours, BASE, tmp_path / "a.json").run(["a"], [512], named)
    other = MassStudy(theirs, BASE, tmp_path / "b.json")
    other.run(["a"], [1024], named)
    again = MassStudy(ours, BASE, tmp_path / "a.json")
    again.join(json.loads((tmp_path / "b.json").read_text()))
    again.run(["a"], [512, 1024], named)
    assert len(ours.measured) == len(theirs.measured) == 2
    assert [cell["length"] for cell in again.result["rows"]["dense"]["cells"]] == [512, 1024]
    with pytest.raises(ValueError, match="cannot join results of base"):
        MassStudy(ours, Policy("page_minmax"), tmp_path / "a.json")
