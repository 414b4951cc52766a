# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results.md are rendered from the committed JSON files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
LOADTEST = ROOT / "loadtest"
CAPACITY = LOADTEST / "results" / "capacity-h200"


def rendered(tmp_path: Path, script: Path, source: Path, *arguments: str) -> str:
    """A copy of the page after a script has filled in its table."""
    page = tmp_path / "results.md"
    shutil.copy(PAGE, page)
    subprocess.run([sys.executable, script, source, page, *arguments], check=True)
    return page.read_text()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("h200", "results"), ("h200-anchors", "anchors"), ("h200-first-token", "first-token")],
)
def test_the_decode_tables_are_rendered_from_the_committed_results(
    tmp_path: Path, folder: str, name: str
) -> None:
    source = LOADTEST / "results" / folder
    text = rendered(tmp_path, LOADTEST / "render_latency.py", source, name)
    assert text == PAGE.read_text()


def test_the_capacity_table_is_rendered_from_the_committed_results(tmp_path: Path) -> None:
    if not CAPACITY.is_dir():
        between = PAGE.read_text().split("<!-- capacity:begin -->")[1].split("<!-- capacity:end")[0]
        assert between.strip() == "Not measured yet."
        return
    reports = tmp_path / "reports"
    shutil.copytree(CAPACITY, reports)
    assert rendered(tmp_path, LOADTEST / "report.py", reports) == PAGE.read_text()


def test_the_kernel_table_is_rendered_from_the_committed_results(tmp_path: Path) -> None:
    report, bench = tmp_path / "bench.json", ROOT / "kernels" / "bench"
    plots = re.findall(r"kernels/bench/results/h200/(bench-\w+)\.png", PAGE.read_text())
    (plot,) = set(plots)
    shutil.copy(bench / "results" / "h200" / f"{plot}.json", report)
    assert rendered(tmp_path, bench / "render.py", report) == PAGE.read_text()
