# SPDX-License-Identifier: Apache-2.0
"""What an install must hold, and the folder names that must never shadow a package."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import sglang_sparse

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROBE = "import kernels; kernels.get_kernel; print(kernels.__file__)"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["-c", PROBE], id="python -c"),
        pytest.param(["-m", "timeit", "-n1", "-r1", PROBE], id="python -m"),
    ],
)
def test_kernels_is_the_pypi_package_from_the_repository_root(arguments: list[str]) -> None:
    # Both put the repository root first on sys.path, where a folder called kernels/ lies.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert str(ROOT / "kernels") not in run.stdout
    assert "site-packages" in run.stdout


@pytest.mark.parametrize("folder", ["kernels", "radix_ext", "configs", "loadtest", "tests", "docs"])
def test_top_level_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_entry_points_are_declared_and_installed() -> None:
    declared = {
        (group, name, value)
        for group, entries in PROJECT["project"]["entry-points"].items()
        for name, value in entries.items()
    }
    assert declared == {
        ("sglang.srt.plugins", "sglang_sparse", "sglang_sparse.plugin:load"),
        ("sglang.srt.platforms", "sglang_sparse_cpu", "sglang_sparse.platform_cpu:activate"),
    }
    installed = {
        (point.group, point.name, point.value)
        for point in distribution("sglang-sparse").entry_points
    }
    assert declared <= installed


@pytest.mark.parametrize(
    "module", ["sglang_sparse.plugin:load", "sglang_sparse.platform_cpu:activate"]
)
def test_entry_points_load(module: str) -> None:
    points = {point.value: point for point in distribution("sglang-sparse").entry_points}
    assert callable(points[module].load())


def test_every_package_folder_but_research_is_in_the_wheel() -> None:
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["exclude"] == ["sglang_sparse.research", "sglang_sparse.research.*"]
    for folder in (
        "sglang_sparse",
        "kernels/sglang_sparse_kernels",
        "radix_ext/sglang_sparse_radix",
    ):
        package = ROOT / folder
        assert str(package.parent.relative_to(ROOT)) in find["where"]
        assert package.name in find["include"]
        for file in package.rglob("*.py"):
            for parent in file.relative_to(package).parents:
                init = package / parent / "__init__.py"
                assert init.is_file(), f"{init} is missing: the wheel would lack {file}"


@pytest.mark.parametrize("module", ["sglang_sparse", "sglang_sparse.config"])
def test_importing_the_config_loads_neither_sglang_nor_torch(module: str) -> None:
    probe = f"import {module}, sys; print([m for m in ('torch', 'sglang') if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_code_file_says_its_license() -> None:
    folders = ("sglang_sparse", "kernels", "radix_ext", "loadtest", "tests", ".ci", "docs")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for file in [*files, ROOT / "Makefile", ROOT / ".ci" / "run"]:
        head = file.read_text().splitlines()[:2]
        assert "# SPDX-License-Identifier: Apache-2.0" in head, file


def test_the_version_is_the_installed_one() -> None:
    assert distribution("sglang-sparse").version == sglang_sparse.__version__
