# SPDX-License-Identifier: Apache-2.0
"""Scripts of folders that are no packages, as modules: load tests, GPU checks, documentation."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADTEST = ROOT / "loadtest"
DOCS = ROOT / "docs"
GPU_CHECKS = ROOT / "tests" / "gpu"
for folder in (LOADTEST, LOADTEST / "programs", DOCS, GPU_CHECKS):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
