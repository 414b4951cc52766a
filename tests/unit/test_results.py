# SPDX-License-Identifier: Apache-2.0
"""The README's measurements are those of the committed JSON files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_decode_table_is_rendered_from_the_committed_results(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", readme)
    script, results = (
        ROOT / "loadtest" / "render_latency.py",
        ROOT / "loadtest" / "results" / "h200",
    )
    subprocess.run([sys.executable, str(script), str(results), str(readme)], check=True)
    assert readme.read_text() == (ROOT / "README.md").read_text()
