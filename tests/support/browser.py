# SPDX-License-Identifier: Apache-2.0
"""The system's Chromium, for the tests that drive a browser."""

import os
import shutil

import pytest


def chromium() -> str:
    """Where Chromium is; `.ci/run` installs it, and must have."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    if os.environ.get("CI"):
        raise RuntimeError("no Chromium: `apt-get install chromium`, as .ci/run does")
    pytest.skip("needs Chromium: `apt-get install chromium`")
