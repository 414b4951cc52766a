# SPDX-License-Identifier: Apache-2.0
"""`python tests/gpu` runs :mod:`gpu_check`, with the folders that it imports from."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path += [str(ROOT / "tests" / "support")]
    import scripts  # noqa: F401  # the load tests
    from gpu_check import main

    main()
