# SPDX-License-Identifier: Apache-2.0
"""Tests that reach SGLang are told from those that do not, and the latter run without one."""

import subprocess
import sys
from pathlib import Path

import pytest
from sglang_use import TESTS, reaches_sglang

FILES = sorted(TESTS.rglob("test_*.py"))
ONCE = ("unit/kernels", "unit/config", "unit/research", "unit/calibrate", "unit/loadtest")
EACH = ("e2e", "start", "unit/radix")


@pytest.mark.parametrize("folder", [*ONCE, *EACH])
def test_folders_that_reach_sglang_are_told_from_those_that_do_not(folder: str) -> None:
    found = {f.name: reaches_sglang(f) for f in FILES if f.is_relative_to(TESTS / folder)}
    assert found
    assert set(found.values()) == {folder in EACH}, found


@pytest.mark.parametrize(
    ("text", "reaches"),
    [
        ("import torch", False),
        ("import sglang", True),
        ("from sglang.srt import server_args", True),
        ("import sglangs", False),
        ("def test():\n    from sglang.srt.utils import common", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sglang", False),
        # A module that imports it when it is called only, and one that does at once.
        ("from sglang_sparse import compat", False),
        ("from sglang_sparse_radix.pool import SparseKVPool", True),
        ("from sglang_sparse_radix import pool", True),
        # By what stands beside, by a script, and by a mark.
        ("import beside", True),
        ("import live_server", False),
        ("import served_checks", False),
        ("import pytest\npytestmark = [pytest.mark.sglang]", True),
    ],
)
def test_what_a_file_imports_decides(tmp_path: Path, text: str, reaches: bool) -> None:
    (tmp_path / "beside.py").write_text("import sglang.srt.environ\n")
    file = tmp_path / "test_it.py"
    file.write_text(text + "\n")
    # Functions count in tests alone, so the file has to be one of them.
    assert reaches_sglang(file, tests=tmp_path) == reaches


def test_a_conftest_above_counts_for_every_file_below(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "conftest.py").write_text("import sglang\n")
    (tmp_path / "folder" / "test_it.py").write_text("")
    (tmp_path / "test_beside.py").write_text("")
    assert reaches_sglang(tmp_path / "folder" / "test_it.py", tests=tmp_path)
    assert not reaches_sglang(tmp_path / "test_beside.py", tests=tmp_path)


def test_hidden_it_can_be_imported_neither_here_nor_in_a_process(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(TESTS / "support")!r})
from pathlib import Path
from sglang_use import hide_sglang
import sglang_sparse.config
hide_sglang(Path({str(tmp_path)!r}))
for name in ("sglang", "sglang.srt.server_args"):
    try:
        __import__(name)
    except ImportError:
        print("hidden")
done = subprocess.run([sys.executable, "-c", "import sglang"], capture_output=True, text=True)
print(done.returncode, "no sglang for it" in done.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["hidden", "hidden", "1", "True"]
