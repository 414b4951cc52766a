# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the Triton interpreter where there is no GPU, and the `gpu` marker."""

from __future__ import annotations

import os

import pytest
from machine import HAS_GPU

if not HAS_GPU:
    # Triton reads this when a kernel is decorated, hence before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
