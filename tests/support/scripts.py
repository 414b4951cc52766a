# SPDX-License-Identifier: Apache-2.0
"""Scripts of folders that are no packages, as modules: the load tests and the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADTEST = ROOT / "loadtest"
DOCS = ROOT / "docs"
for folder in (LOADTEST, LOADTEST / "programs", DOCS):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
