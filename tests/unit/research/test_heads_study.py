# SPDX-License-Identifier: Apache-2.0
"""The study of streaming heads cuts the preset's heads and as many random ones."""

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from sglang_sparse.calibrate.lserve import Settings, choose
from sglang_sparse.config import FirstDense, configs_dir, load_preset
from sglang_sparse.research import heads_study
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.tables import cells_of

MODEL = configs_dir() / "reference" / "model"
REPORT = configs_dir() / "reference" / "lserve-report"


def test_arms_stream_as_many_heads_as_the_preset() -> None:
    config = load_preset("reference", "lserve")
    masks = heads_study.masks_of(config, 4, seed=3)
    assert list(masks) == ["dense", "found", "random 1", "random 2", "random 3"]
    assert not masks["dense"].any()
    found = [tuple(row.nonzero().flatten().tolist()) for row in masks["found"]]
    assert tuple(found) == config.heads.streaming
    dense = config.model_copy(update={"layers": FirstDense(n=1)})
    assert not heads_study.masks_of(dense, 4, seed=3)["found"][0].any()
    for draw in (1, 2, 3):
        assert masks[f"random {draw}"].sum() == masks["found"].sum()
        assert not torch.equal(masks[f"random {draw}"], masks["found"])
    with pytest.raises(ValueError, match="no head streams"):
        heads_study.masks_of(load_preset("reference", "psa"), 4, seed=3)


def test_cut_heads_see_the_window_that_a_decoder_has() -> None:
    model = load(MODEL).eval()
    prompt = torch.randint(300, 2000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = Decoder(model, [prompt], room=3)
    decoder.window = Policy("window", budget=48, sink=16, recent=32)
    cut = torch.zeros(6, 4, dtype=torch.bool)
    cut[2, 1] = cut[4] = True
    decoder.generate(Policy(), end=-1, cut=cut)
    # The mean over heads and two steps, which see 301 and 302 tokens.
    whole = torch.full((6,), 301.5)
    whole[2] = (3 * 301.5 + 48) / 4
    whole[4] = 48
    torch.testing.assert_close(decoder.row_tokens[:, 0].float(), whole)


def test_the_command_measures_each_arm_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "heads.json", tmp_path / "table.md"
    arguments = ["--model", str(MODEL), "--count", "1", "--lengths", "512", "--tasks", "passkey"]
    files = ["--out", str(out), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", ["heads_study", *arguments, *files])
    heads_study.main()
    result = json.loads(out.read_text())
    assert [cell["arm"] for cell in result["cells"]] == list(result["streaming"])
    assert result["cells"][0]["exact"] == 1.0
    assert capsys.readouterr().out.endswith(table.read_text())
    assert table.read_text().splitlines()[2] == "| 512 | dense | 0 | 100.0 | 100.0 |"


def test_the_committed_table_is_that_of_the_committed_cells_and_heads() -> None:
    result = json.loads(gzip.decompress((REPORT / "arms.json.gz").read_bytes()))
    result["cells"] = cells_of(result)
    table = heads_study.summary(result)
    assert table in (REPORT / "README.md").read_text()
    config = load_preset("reference", "lserve")
    assert result["window"] == dict(zip(("sink", "local"), config.heads.window, strict=True))
    masks = heads_study.masks_of(config, 4, seed=7)
    assert result["streaming"] == {arm: int(mask.sum()) for arm, mask in masks.items()}


# The KV heads that move predictions by 0.001 nats and more when they stream alone; the first reads
# all needles (the ablation in the model's card).
READS_NEEDLES = (5, 3)
NEEDED = {READS_NEEDLES, (0, 3), (1, 0), (1, 2), (4, 1), (2, 2), (5, 1)}
SHUT = (0, 3)  # the one that the trained gates shut, with 0.00103 nats the least needed


def test_found_heads_hold_dense_within_two_points_and_random_ones_do_not() -> None:
    cells = cells_of(json.loads(gzip.decompress((REPORT / "arms.json.gz").read_bytes())))
    masks = heads_study.masks_of(load_preset("reference", "lserve"), 4, seed=7)
    drawn = {arm: bool(masks[arm][READS_NEEDLES]) for arm in masks if arm.startswith("random")}
    assert set(drawn.values()) == {True, False}
    for length in {cell["length"] for cell in cells}:
        mean = {
            arm: 100 * sum(exact) / len(exact)
            for arm in {cell["arm"] for cell in cells}
            if (exact := [c["exact"] for c in cells if (c["length"], c["arm"]) == (length, arm)])
        }
        assert mean["found"] >= mean["dense"] - 2, length
        for arm, cut in drawn.items():
            assert mean[arm] < mean["dense"] - (20 if cut else 2), (length, arm)


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "heads.csv").open()))


def test_the_needed_heads_are_those_that_the_report_says_and_none_streams_in_the_preset() -> None:
    found = {
        (int(row["layer"]), int(row["head"]))
        for row in rows_of(REPORT)
        if float(row["divergence left out"]) > 0.001
    }
    assert found == NEEDED
    streaming = load_preset("reference", "lserve").heads.streaming
    streams = {(layer, head) for layer, heads in enumerate(streaming) for head in heads}
    assert len(streams) == 10
    assert not streams & NEEDED


def test_gradients_agree_with_leaving_heads_out_and_gates_keep_the_needed_heads_open() -> None:
    truth, gates = rows_of(REPORT), rows_of(REPORT / "gates")
    left_out = [float(row["divergence left out"]) for row in truth]
    found = {
        name: spearmanr([float(row["score"]) for row in rows], left_out).statistic
        for name, rows in (("gradient", truth), ("gates", gates))
    }
    assert min(found.values()) >= 0.75
    report = (REPORT / "README.md").read_text()
    assert all(f"| `{name}` | {one:.2f} |" in report for name, one in found.items())
    # 14 gates are shut, so their heads tie.
    is_open = [float(row["score"]) > 0 for row in gates]
    assert is_open.count(False) == 14
    shut = {
        (int(row["layer"]), int(row["head"]))
        for row, one in zip(gates, is_open, strict=True)
        if not one
    }
    assert shut & NEEDED == {SHUT}


def test_the_preset_holds_the_heads_that_score_least() -> None:
    heads = load_preset("reference", "lserve").heads
    rows = list(csv.DictReader((REPORT / "heads.csv").open()))
    scores = torch.tensor([float(row["score"]) for row in rows]).view(6, 4)
    asked = Settings("", None, [], Path(), sparsity=heads.calibration.sparsity)
    assert tuple(map(tuple, choose(asked, scores))) == heads.streaming
