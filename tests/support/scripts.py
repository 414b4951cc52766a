# SPDX-License-Identifier: Apache-2.0
"""The load-test scripts as modules; their folder is no package."""

from __future__ import annotations

import sys
from pathlib import Path

LOADTEST = Path(__file__).parents[2] / "loadtest"
for folder in (LOADTEST, LOADTEST / "programs"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
