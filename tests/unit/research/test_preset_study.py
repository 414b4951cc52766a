# SPDX-License-Identifier: Apache-2.0
"""The study of the shipped presets measures what they say, and tells it in one table."""

import gzip
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from sglang_sparse.config import configs_dir, load_preset
from sglang_sparse.research import preset_study
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.tables import from_columns

REPORT = configs_dir() / "reference" / "psa-report"
STUDY = REPORT / "tokens" / "mass.json.gz"


def test_the_sketch_preset_is_the_studys_best_configuration() -> None:
    study = json.loads(gzip.decompress(STUDY.read_bytes()))
    best = study["base"] | study["rows"][study["best"]["mixed"]["mass"]]["policy"]
    measured = Policy(**{k: tuple(v) if isinstance(v, list) else v for k, v in best.items()})
    assert preset_study.policy_of(load_preset("reference", "psa_sketch")) == measured


def test_psa_is_measured_as_it_is_shipped() -> None:
    assert preset_study.policy_of(load_preset("reference", "psa")) == Policy(
        "page_mean", budget=768, sink=16, recent=33, page=16, dense_layers=1, epsilon=0.99,
        microbatch=32, share="min", margin=3.0,
    )  # fmt: skip
    assert preset_study.policy_of(load_preset("reference", "sparcas")) == Policy(
        "sparcas", budget=257, sink=16, recent=33, dense_layers=1
    )


def test_the_committed_table_is_that_of_the_committed_cells_and_of_todays_presets() -> None:
    raw = gzip.decompress((REPORT / "presets" / "presets.json.gz").read_bytes())
    found = from_columns(json.loads(raw))
    table = preset_study.summary(found)
    assert (REPORT / "presets" / "table.md").read_text() == table
    assert table in (REPORT / "README.md").read_text()
    for name, row in found["rows"].items():
        config = None if name == "dense" else load_preset("reference", name)
        policy = Policy() if config is None else preset_study.policy_of(config)
        # What a policy may say since then was at its default.
        measured = asdict(Policy()) | found["base"] | row["policy"]
        assert json.loads(json.dumps(measured)) == json.loads(json.dumps(asdict(policy))), name


@pytest.mark.parametrize(
    ("model", "preset"), [("reference", "kascade"), ("reference", "lserve"), ("generic", "sparcas")]
)
def test_what_no_policy_is_cannot_be_measured(model: str, preset: str) -> None:
    with pytest.raises(ValueError, match="no policy has"):
        preset_study.policy_of(load_preset(model, preset))


def test_the_command_measures_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(configs_dir() / "reference" / "model"), "--count", "1"]
    arguments += ["--lengths", "700", "--tasks", "passkey", "--presets", "psa", "psa_sketch"]
    arguments += ["--out", str(tmp_path / "found.json"), "--table", str(tmp_path / "table.md")]
    monkeypatch.setattr(sys, "argv", ["preset_study", *arguments])
    preset_study.main()
    table = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out.endswith(table)
    rows = {line.split("|")[1].strip(): line.split("|") for line in table.splitlines()[2:]}
    assert set(rows) == {"dense", "psa", "psa_sketch"}
    touched = {name: float(row[5]) for name, row in rows.items()}
    assert 28 <= touched["psa_sketch"] < touched["psa"] < touched["dense"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"]["psa"]["cells"][0]["task"] == "passkey"


def test_lserves_heads_that_select_are_measured_as_they_are_shipped() -> None:
    assert preset_study.selecting_policy(load_preset("reference", "lserve")) == Policy(
        "page_minmax", budget=512, sink=16, recent=33, page=64, logical=16, dense_layers=0
    )


@pytest.mark.parametrize("name", ["kascade", "kascade_sketch"])
def test_presets_with_anchors_are_measured_as_they_are_shipped(name: str) -> None:
    config = load_preset("reference", name)
    policy = preset_study.policy_at(config, 4096)
    assert policy.anchors == config.layers.anchors
    assert policy.budget == 1 + max(config.budget.list_size[0], math.ceil(0.1 * 4095))
    if name == "kascade":
        assert (policy.kind, policy.pool) == ("oracle", config.score.pool)
        return
    named = policy.channels, policy.reduce, policy.storage
    assert named == (config.score.channels, config.score.reduce, config.score.storage)
