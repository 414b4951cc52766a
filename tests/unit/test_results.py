# SPDX-License-Identifier: Apache-2.0
"""The README's measurements are those of the committed JSON files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("folder", "name"),
    [("h200", "results"), ("h200-anchors", "anchors"), ("h200-first-token", "first-token")],
)
def test_the_decode_tables_are_rendered_from_the_committed_results(
    tmp_path: Path, folder: str, name: str
) -> None:
    readme = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", readme)
    script = ROOT / "loadtest" / "render_latency.py"
    results = ROOT / "loadtest" / "results" / folder
    subprocess.run([sys.executable, str(script), str(results), str(readme), name], check=True)
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_capacity_tables_are_rendered_from_the_committed_results(tmp_path: Path) -> None:
    """Every page with the markers holds that table, and none where nothing was measured."""
    committed, results = ROOT / "loadtest" / "results" / "capacity-h200", tmp_path / "results"
    begin, end = "<!-- capacity:begin -->", "<!-- capacity:end -->"
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    tables = [p.read_text().split(begin)[1].split(end)[0] for p in pages if begin in p.read_text()]
    expected = ""
    if committed.exists():
        shutil.copytree(committed, results)
        subprocess.run([sys.executable, ROOT / "loadtest" / "report.py", results], check=True)
        expected = (results / "capacity.md").read_text()
        assert expected == (committed / "capacity.md").read_text()
        assert tables, "no page shows the committed capacity"
    assert {table.strip() for table in tables} <= {expected.strip()}


def test_the_kernel_table_is_rendered_from_the_committed_results(tmp_path: Path) -> None:
    readme, report = tmp_path / "README.md", tmp_path / "bench.json"
    shutil.copy(ROOT / "README.md", readme)
    bench = ROOT / "kernels" / "bench"
    (plot,) = re.findall(r"kernels/bench/results/h200/(bench-\w+)\.png", readme.read_text())
    shutil.copy(bench / "results" / "h200" / f"{plot}.json", report)
    subprocess.run([sys.executable, bench / "render.py", report, readme], check=True)
    assert readme.read_text() == (ROOT / "README.md").read_text()
