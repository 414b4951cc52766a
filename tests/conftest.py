# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the Triton interpreter where there is no GPU, markers, `--sglang`."""

import os
import tempfile
from pathlib import Path

import pytest
from machine import HAS_GPU
from sglang_use import hide_sglang, reaches_sglang

if not HAS_GPU:
    # Triton reads this when a kernel is decorated, hence before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--sglang used``: tests that reach SGLang. ``unused``: the others, and no SGLang."""
    parser.addoption("--sglang", choices=("used", "unused"), help="tests that reach SGLang or not")


def pytest_configure(config: pytest.Config) -> None:
    """Take SGLang away from tests that are said not to reach it."""
    if config.getoption("--sglang") == "unused":
        folder = tempfile.TemporaryDirectory(prefix="no-sglang-")
        config.add_cleanup(folder.cleanup)
        hide_sglang(Path(folder.name))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files of the other kind than `--sglang` asks for, before they are imported."""
    asked = config.getoption("--sglang")
    if asked is None or not collection_path.name.startswith("test_"):
        return None
    return True if reaches_sglang(collection_path) != (asked == "used") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
