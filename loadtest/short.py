# SPDX-License-Identifier: Apache-2.0
"""A short version of every load test, on the model that the repository ships.

    make loadtest                                  # or: python loadtest/short.py --out FOLDER

Numbers of a run this short, on whatever machine it is, say that everything works, and nothing
about capacity.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import soak
from capacity import Settings, measure
from local import local_server
from report import write_report
from scenarios import Scenario

HERE = Path(__file__).parent
# scenario -> (shape, further flags); seven seconds each
RUNS: dict[str, tuple[str | None, list[str]]] = {
    "shared_documents": ("ramp", []),
    "multi_turn_chat": ("step", []),
    "long_decode": ("soak", []),
    "mixed_lengths": (None, ["--arrivals", "poisson", "--rate", "0.5"]),
    "bursts": ("burst", []),
}
SECONDS = 7


def locust(url: str, scenario: str, out: Path, seconds: int = SECONDS, users: int = 2) -> Path:
    """One headless run; returns Locust's table of statistics.

    Raises:
        subprocess.CalledProcessError: Locust failed, or a request did.
    """
    shape, flags = RUNS[scenario]
    files = [HERE / "locustfile.py", *([HERE / "shapes" / f"{shape}.py"] if shape else [])]
    users = 1 if "poisson" in flags else users
    command = [
        *(sys.executable, "-m", "locust", "--headless", "-f", ",".join(map(str, files))),
        *("--host", url, "--scenario", scenario, "--users", str(users), "--spawn-rate", str(users)),
        *("--run-time", f"{seconds}s", "--stop-timeout", "60", "--csv", str(out / scenario)),
        *("--records", str(out / f"{scenario}.jsonl"), "--only-summary", *flags),
    ]
    subprocess.run(command, check=True)
    return out / f"{scenario}_stats.csv"


def summary(stats: Path) -> dict[str, Any]:
    """Median and 99th percentile of each kind of event in Locust's table."""
    with stats.open() as file:
        rows = [row for row in csv.DictReader(file) if row["Type"]]
    return {
        row["Type"]: {
            "count": int(row["Request Count"]),
            "failed": int(row["Failure Count"]),
            "p50": float(row["50%"]),
            "p99": float(row["99%"]),
        }
        for row in rows
    }


def main() -> None:
    """Everything once; exits with status 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "loadtest")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.json*"):
        old.unlink()
    begin = time.monotonic()
    settings = Settings(
        seconds=4, drain=6, first_rate=1.0, most_rate=4.0, bisections=1, limit=12, seed=1
    )
    scenario = Scenario.load("shared_documents")
    with local_server("dense", out) as dense, local_server("sparcas", out, soak.VERIFY) as sparse:
        found = {name: summary(locust(sparse.url, name, out)) for name in RUNS}
        for label, server in (("dense", dense), ("sparcas", sparse)):
            measure(server.url, label, scenario, settings, out)
        command = [sys.executable, str(HERE / "programs" / "compare.py"), "--repeats", "60"]
        command += ["--dense", dense.url, "--sparse", sparse.url]
        subprocess.run([*command, "--out", str(out / "programs.json")], check=True)
        outcome = soak.soak(sparse, 10, seed=1)
    page = write_report(out)
    (out / "locust.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "soak.json").write_text(json.dumps(outcome, indent=1) + "\n")
    for name, kinds in found.items():
        print(name, {kind: round(values["p50"], 1) for kind, values in kinds.items()})
    empty = [name for name, kinds in found.items() if "E2E" not in kinds]
    if empty:
        print(f"nothing was answered in time: {', '.join(empty)}")
    print(f"soak: {'ok' if outcome['ok'] else outcome}")
    print(f"{time.monotonic() - begin:.0f} seconds; report: {page}")
    sys.exit(0 if outcome["ok"] and not empty else 1)


if __name__ == "__main__":
    main()
