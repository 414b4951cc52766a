# SPDX-License-Identifier: Apache-2.0
"""The load tests by name: `python loadtest capacity` runs `loadtest/capacity.py`."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {
    "capacity": "capacity.py",
    "soak": "soak.py",
    "programs": "programs/compare.py",
    "latency": "decode_latency.py",
    "short": "short.py",
}


def main() -> None:
    """Run the script that the first argument names with the other arguments."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in SCRIPTS:
        sys.exit(f"usage: python loadtest {{{','.join(SCRIPTS)}}} ...")
    sys.argv = [f"loadtest {name}", *arguments]
    runpy.run_path(str(HERE / SCRIPTS[name]), run_name="__main__")


if __name__ == "__main__":
    main()
