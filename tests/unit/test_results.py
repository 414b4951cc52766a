# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results.md are rendered from the committed JSON files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"


def rendered(tmp_path: Path, script: Path, source: Path, *arguments: str) -> str:
    """A copy of the page after a script has filled in its table."""
    page = tmp_path / "results.md"
    shutil.copy(PAGE, page)
    subprocess.run([sys.executable, script, source, page, *arguments], check=True)
    return page.read_text()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("capacity-h200", "capacity"), ("h200-beyond-memory", "beyond-memory")],
)
def test_capacity_tables_are_rendered_from_the_committed_results(
    tmp_path: Path, folder: str, name: str
) -> None:
    """Every page with the markers holds that table, and none where nothing was measured."""
    committed, results = ROOT / "loadtest" / "results" / folder, tmp_path / "results"
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
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


@pytest.mark.parametrize(
    ("report", "name"),
    [("h200/bench-eb399a9.json.gz", "kernels"), ("h100/bench-c741855.json.gz", "kernels-h100")],
)
def test_kernel_tables_are_rendered_from_the_committed_results(
    report: str, name: str, tmp_path: Path
) -> None:
    bench = ROOT / "kernels" / "bench"
    assert f"kernels/bench/results/{report}" in PAGE.read_text()
    source = bench / "results" / report
    assert rendered(tmp_path, bench / "render.py", source, name) == PAGE.read_text()
