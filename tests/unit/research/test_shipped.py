# SPDX-License-Identifier: Apache-2.0
"""The table of shipped presets is of the presets, on the same prompts."""

import json
import sys
from pathlib import Path

import pytest

from sglang_sparse.config import configs_dir
from sglang_sparse.research import shipped


def test_the_command_measures_presets_beside_dense_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "shipped.json", tmp_path / "table.md"
    arguments = ["--model", str(configs_dir() / "reference" / "model"), "--count", "2"]
    arguments += ["--lengths", "700", "--tasks", "passkey", "--presets", "sparcas", "kascade"]
    monkeypatch.setattr(
        sys, "argv", ["shipped", *arguments, "--out", str(out), "--table", str(table)]
    )
    shipped.main()
    cells = json.loads(out.read_text())["cells"]
    assert [cell["preset"] for cell in cells] == ["dense", "sparcas", "kascade"]
    assert cells[2]["policy"]["anchors"]
    assert all(cell["exact"] == 1.0 for cell in cells)
    assert capsys.readouterr().out.endswith(table.read_text())
    head, _, row = table.read_text().splitlines()
    assert head == "| task | tokens | dense | sparcas | kascade |"
    assert row.startswith("| passkey | 700 | 100 (")
