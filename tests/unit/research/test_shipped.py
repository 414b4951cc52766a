# SPDX-License-Identifier: Apache-2.0
"""The table of shipped presets is of the presets, on the same prompts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_sparse.config import configs_dir, load_preset
from sglang_sparse.research import shipped
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.export import load
from sglang_sparse.research.heads_study import streaming_heads, window_of
from sglang_sparse.research.policies import Policy, page_planes
from sglang_sparse.research.preset_study import selecting_policy
from sglang_sparse.research.study import Study
from sglang_sparse.research.tables import cells_of, pack
from sglang_sparse.tasks import FileEncoder
from sglang_sparse.tasks.encoding import END

MODEL = configs_dir() / "reference" / "model"
LSERVE, CASCADE = (load_preset("reference", name) for name in ("lserve", "cascade"))


def test_the_command_measures_presets_beside_dense_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "shipped.json", tmp_path / "table.md"
    presets = ["sparcas", "kascade", "lserve", "cascade"]
    arguments = ["--model", str(MODEL), "--count", "2", "--lengths", "700", "--tasks", "passkey"]
    arguments += ["--presets", *presets]
    monkeypatch.setattr(
        sys, "argv", ["shipped", *arguments, "--out", str(out), "--table", str(table)]
    )
    shipped.main()
    result = json.loads(out.read_text())
    cells = result["cells"]
    assert cells_of(pack(result)) == cells
    assert [cell["preset"] for cell in cells] == ["dense", *presets]
    assert cells[2]["policy"]["anchors"]
    assert cells[3]["policy"]["heads"]["streaming"] == [[*row] for row in LSERVE.heads.streaming]
    assert (cells[4]["policy"]["kind"], cells[4]["policy"]["window"]) == ("cascade", 1024)
    assert all(cell["exact"] == 1.0 for cell in cells)
    assert capsys.readouterr().out.endswith(table.read_text())
    head, _, row = table.read_text().splitlines()
    assert head == "| task | tokens | dense | sparcas | kascade | lserve | cascade |"
    assert row.startswith("| passkey | 700 | 100 (")


def test_all_presets_of_the_model_are_measured() -> None:
    assert sorted(shipped.PRESETS) == sorted(path.stem for path in MODEL.parent.glob("*.json"))


@pytest.fixture(scope="module")
def study() -> Study:
    found = Study(load(MODEL).eval(), FileEncoder(MODEL), count=3, seed=1)
    found.end = -1  # no reply ends
    return found


def test_within_the_budget_and_windows_replies_are_denses(study: Study) -> None:
    # Sinks and windows of streaming heads have 320 tokens; a cascade holds more.
    ((samples, decoder),) = study.prepare("passkey", 304)
    decoder.window = window_of(LSERVE)
    dense = decoder.generate(Policy(), -1)
    assert decoder.generate(selecting_policy(LSERVE), -1, streaming_heads(LSERVE, 4)) == dense
    retention: Any = CASCADE.retention
    cache = CascadeDecoder(study.model, retention.shape(), retention.average(), slots=3)
    assert cache.replies([s.prompt_ids for s in samples], decoder.room) == dense


def test_lserves_heads_see_their_windows_or_whole_pages(study: Study) -> None:
    parts = study.prepare("passkey", 700)
    shipped.selecting(study, LSERVE, 700).right(parts)
    ((samples, decoder),) = parts
    for row, sample in enumerate(samples):
        # Eight pages, of which the last one is not full; 64 sinks and 256 last tokens.
        begun = [-(len(sample.prompt_ids) + step) % 64 for step in range(1, decoder.room)]
        selected = 512 - sum(begun) / len(begun)
        want = [
            (len(heads) * 320 + (4 - len(heads)) * selected) / 4 for heads in LSERVE.heads.streaming
        ]
        assert decoder.row_tokens[:, row].tolist() == pytest.approx(want)
    # What was decoded is in the bounds of logical pages.
    last = decoder.prompt_lengths + decoder.room - 1
    for keys, planes in zip(decoder.k, decoder.planes, strict=True):
        for got, expected in zip(planes, page_planes(keys, last, 16), strict=True):
            torch.testing.assert_close(got, expected)


def test_a_cascading_cache_takes_as_many_prompts_as_it_has_slots(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = study.prepare("passkey", 304)
    monkeypatch.setattr(study, "end", FileEncoder(MODEL).token_id(END))
    for slots, fed in ((32, 2**17), (2, 2**17), (32, 304)):
        monkeypatch.setattr(shipped, "SLOTS", slots)
        monkeypatch.setattr(shipped, "FED_TOKENS", fed)
        assert shipped.cascading(study, CASCADE).right(parts) == 3
