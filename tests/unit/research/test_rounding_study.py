# SPDX-License-Identifier: Apache-2.0
"""Answers of one sum and of two, with lists of their own and with the same lists."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research import rounding_study
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy

MODEL = configs_dir() / "reference" / "model"
SPARCAS = Policy("sparcas", 64, dense_layers=1)
RESULTS = Path(__file__).parents[3] / "loadtest" / "results" / "cpu" / "rounding.json.gz"


def test_sums_of_halves_are_those_of_the_whole_but_for_rounding() -> None:
    whole = load(MODEL).eval()
    halves = rounding_study.in_halves(whole)
    x = torch.randn(5, whole.config.intermediate_size)
    for index in range(whole.config.layers):
        one, other = (model.layer(index).mlp.down_proj for model in (whole, halves))
        torch.testing.assert_close(one(x), other(x))
    rounded = x.bfloat16()
    assert not torch.equal(one(rounded), other(rounded))


def test_rows_part_at_their_first_other_token() -> None:
    logits = torch.zeros(3, 4, 10)
    said = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]])
    logits.scatter_(2, said[..., None], 3.0)
    logits[1, 2, 9] = 2.75
    other = logits.clone()
    other[1, 2, 0] = other[1, 3, 0] = 4.0
    other[2, 0, 5] = 4.0
    assert rounding_study.parted(said, logits, other) == [(2, 0.25), (0, 3.0)]


def test_a_layer_attends_to_the_lists_that_are_given() -> None:
    prompts = rounding_study.repeating(2, 300, 2048)
    whole, halves = (Decoder(load(MODEL).eval(), prompts, 4, dtype=torch.bfloat16) for _ in "ab")
    said = torch.tensor(whole.generate(SPARCAS, end=-1))
    logits, masks = rounding_study.replayed(whole, SPARCAS, said)
    assert torch.equal(logits.argmax(-1), said)
    other = Policy("window", sink=1, recent=2, dense_layers=1)
    own, windows = rounding_study.replayed(halves, other, said)
    assert not torch.equal(own, logits)
    same, kept = rounding_study.replayed(halves, other, said, masks)
    assert torch.equal(same, logits)
    assert all(
        torch.equal(a[i], b[i]) for a, b in zip(masks, kept, strict=True) for i in range(1, 6)
    )
    assert windows[0][3].sum() < masks[0][3].sum()


def test_the_command_counts_where_answers_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, table = tmp_path / "out.json", tmp_path / "table.md"
    line = ["study", "--presets", "sparcas", "--count", "2", "--length", "200", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", [*line, "--out", str(out), "--table", str(table)])
    rounding_study.main()
    found = json.loads(out.read_text())["presets"]["sparcas"]
    assert set(found) == {"own", "same"}
    assert table.read_text().splitlines()[2].startswith("| `sparcas` | ")


def test_the_published_table_is_that_of_the_raw_file() -> None:
    result = json.loads(gzip.decompress(RESULTS.read_bytes()))
    page = (Path(__file__).parents[3] / "docs" / "results.md").read_text()
    for row in rounding_study.table(result).splitlines()[2:]:
        assert row in page
