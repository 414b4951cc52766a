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
