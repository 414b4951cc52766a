# SPDX-License-Identifier: Apache-2.0
"""A short version of every load test, on the model that the repository ships: two minutes.

    make loadtest                                  # or: python loadtest/short.py --out FOLDER

Every scenario of `RUNS` goes to the sparse server at the same time. Then come capacity, the
frontend programs and a soak. The numbers of such a short run show that everything works. They say
nothing about capacity.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import server_host
import soak
from capacity import Settings, measure
from local import ENVIRONMENT, has_gpu, local_servers
from objectives import OWN, Objective, percentile
from report import answer, read_reports, write_report
from scenarios import Scenario

HERE = Path(__file__).parent
# scenario -> (shape, users, further flags)
RUNS: dict[str, tuple[str | None, int, list[str]]] = {
    "shared_documents": ("ramp", 2, []),
    "multi_turn_chat": ("step", 2, []),
    "long_decode": ("soak", 1, []),
    "mixed_lengths": (None, 1, ["--arrivals", "poisson", "--rate", "0.5"]),
    "bursts": ("burst", 2, []),
}
SECONDS = 5
DOCUMENTS = Scenario(
    "short_documents",
    "Two short documents, questioned again and again.",
    documents=2,
    document=(400, 500),
    question=(8, 16),
    output=(12, 12),
)
# Trials of three seconds: whatever they hold, their verdict is `undecided`.
SEARCH = Settings(seconds=3, drain=5, least_rate=1.0, most_rate=2.0, limit=14, seed=1)


def locust(url: str, scenario: str, out: Path, seconds: int = SECONDS) -> Path:
    """One headless run; returns the file of Locust's final statistics.

    Raises:
        subprocess.CalledProcessError: Locust failed, or a request did.
    """
    shape, users, flags = RUNS[scenario]
    files = [HERE / "locustfile.py", *([HERE / "shapes" / f"{shape}.py"] if shape else [])]
    command = [
        *(sys.executable, "-m", "locust", "--headless", "-f", ",".join(map(str, files))),
        *("--host", url, "--scenario", scenario, "--users", str(users), "--spawn-rate", str(users)),
        *("--run-time", f"{seconds}s", "--stop-timeout", "60"),
        *("--json-file", str(out / f"{scenario}-stats"), "--only-summary"),
        *("--records", str(out / f"{scenario}.jsonl"), *flags),
    ]
    subprocess.run(command, check=True)
    return out / f"{scenario}-stats.json"


def summary(stats: Path) -> dict[str, Any]:
    """Median and 99th percentile of each kind of event in Locust's final statistics.

    Locust's CSV files are written once a second and not at the end, so they lack the last requests.
    """
    found = {}
    for entry in json.loads(stats.read_text()):
        # How often each response time came; Locust rounds them to two digits.
        times = Counter({float(time): n for time, n in entry["response_times"].items()})
        values = list(times.elements())
        found[entry["method"]] = {
            "count": entry["num_requests"],
            "failed": entry["num_failures"],
            "p50": percentile(values, 0.5),
            "p99": percentile(values, 0.99),
        }
    return found


def run_programs(dense: str, sparse: str) -> dict[str, Any]:
    """Both frontend programs on both servers; imports SGLang."""
    sys.path.insert(0, str(HERE / "programs"))
    import compare

    found = compare.run(dense, sparse, repeats=30)
    compare.show(found)
    return found


def main() -> None:
    """Run everything once; exits with status 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "loadtest")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.json*"):
        old.unlink()
    begin = time.monotonic()
    if not has_gpu():  # importing may touch CUDA, which does not survive a fork
        os.environ |= ENVIRONMENT
        server_host.import_sglang()
    wanted = {"dense": {}, "sparcas": soak.VERIFY}
    with local_servers(wanted, out, fork=not has_gpu()) as servers:
        url = {name: server.url for name, server in servers.items()}
        with ThreadPoolExecutor(len(RUNS)) as pool:
            tables = pool.map(lambda name: summary(locust(url["sparcas"], name, out)), RUNS)
            found = dict(zip(RUNS, tables, strict=True))
        for label in wanted:
            limits = OWN if label == "dense" else Objective(report=out / "dense.json")
            measure(url[label], label, DOCUMENTS, SEARCH, out, limits)
        programs = run_programs(url["dense"], url["sparcas"])
        outcome = soak.soak(servers["sparcas"], 8, seed=1, longest=700)
    reports = read_reports([out / f"{label}.json" for label in wanted])
    page = write_report(out, reports)
    (out / "programs.json").write_text(json.dumps(programs, indent=1) + "\n")
    (out / "locust.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "soak.json").write_text(json.dumps(outcome, indent=1) + "\n")
    for name, kinds in found.items():
        print(name, {kind: round(values["p50"], 1) for kind, values in kinds.items()})
    for report in reports:
        print(f"capacity of {report['label']}, strict: {answer(report, 'strict')}")
    empty = [name for name, kinds in found.items() if "E2E" not in kinds]
    if empty:
        print(f"nothing was answered in time: {', '.join(empty)}")
    print(f"soak: {'ok' if outcome['ok'] else outcome}")
    print(f"{time.monotonic() - begin:.0f} seconds; report: {page}")
    sys.exit(0 if outcome["ok"] and not empty else 1)


if __name__ == "__main__":
    main()
