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


def test_the_capacity_table_is_rendered_from_the_committed_results(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    shutil.copy(ROOT / "README.md", readme)
    shutil.copytree(ROOT / "loadtest" / "results" / "capacity-h200", results)
    subprocess.run([sys.executable, ROOT / "loadtest" / "report.py", results, readme], check=True)
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_the_kernel_table_is_rendered_from_the_committed_results(tmp_path: Path) -> None:
    readme, report = tmp_path / "README.md", tmp_path / "bench.json"
    shutil.copy(ROOT / "README.md", readme)
    bench = ROOT / "kernels" / "bench"
    (plot,) = re.findall(r"kernels/bench/results/h200/(bench-\w+)\.png", readme.read_text())
    shutil.copy(bench / "results" / "h200" / f"{plot}.json", report)
    subprocess.run([sys.executable, bench / "render.py", report, readme], check=True)
    assert readme.read_text() == (ROOT / "README.md").read_text()
