# SPDX-License-Identifier: Apache-2.0
"""Capacity of several servers at once, each on its own GPU, within a fixed time.

    python loadtest/capacity_gpus.py --out A 0=dense 1=kascade 2=page_minmax 3=sparcas
    python loadtest/capacity_gpus.py --out B --limit-from A/dense.json 0=kascade_sketch 1=psa

Each server has a Llama-3.1-8B shape with dummy weights and its preset as shipped. All of them start
together. Without `--limit-from` one of them is dense, and the others wait for its unloaded step.
With `--resume` the searches continue from the reports in the folder. Each GPU runs one
`capacity.py --start LABEL`. `capacity.py --combine` makes one page of the reports of all runs.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from compare_latency import METHODS

HERE = Path(__file__).parent
LABELS = ("dense", *METHODS)
# Requests that run at once; every number of them fits into a decode graph.
RUNNING = 128
# Prefill graphs as SGLang has them by default, for the lengths of this scenario's questions.
FLAGS = (
    f"--max-running-requests {RUNNING} "
    "--cuda-graph-backend-prefill=breakable --cuda-graph-bs-prefill 64 128 256 512"
)
_STOP_SECONDS = 15.0  # for the last report, and the end of the server


def assignment(text: str) -> tuple[str, str]:
    """`type` of an argument: GPU=LABEL."""
    device, _, label = text.partition("=")
    if not device.isdigit() or label not in LABELS:
        raise argparse.ArgumentTypeError(f"{text!r} is not GPU=LABEL; labels: {', '.join(LABELS)}")
    return device, label


def command(device: str, label: str, args: argparse.Namespace) -> list[str]:
    """Command line of one GPU's search."""
    limit = args.limit_from
    if limit is None and label != "dense":
        limit = args.out / "dense.json"
    return [
        *(
            sys.executable,
            str(HERE / "capacity.py"),
            "--start",
            label,
            "--out",
            str(args.out),
            "--no-page",
        ),
        *("--scenario", args.scenario, "--model", str(args.model), "--logs", str(args.logs)),
        *("--port", str(args.port + 100 * int(device)), "--max-batch", str(RUNNING)),
        *("--flags", f"{FLAGS} {args.flags}".strip(), "--burst", str(args.burst)),
        *("--seconds", str(args.seconds), "--drain", str(args.drain)),
        *("--least-rate", str(args.least_rate), "--most-rate", str(args.most_rate)),
        *("--total", str(args.total - _STOP_SECONDS)),
        *(() if limit is None else ("--limit-from", str(limit), "--limit-wait", str(args.total))),
        *(("--commit", args.commit) if args.commit else ()),
        *(("--resume",) if args.resume else ()),
    ]


def summary(path: Path) -> str:
    """One line of a report."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return f"{path.stem}: no report ({error})"
    step, trials = 1000 * report["unloaded"]["step_s"], len(report["trials"])
    return f"{path.stem}: step {step:.2f} ms, {trials} trials, {report['capacity']}"


def main() -> None:
    """Run every search at once; exits with status 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("assignments", type=assignment, nargs="+", metavar="GPU=LABEL")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--logs", type=Path, help="folder of the logs; the same by default")
    parser.add_argument("--limit-from", type=Path, help="report of an earlier run's dense server")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--scenario", default="shared_32k")
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--total", type=float, default=570.0, help="seconds, starts included")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, a trial")
    parser.add_argument("--drain", type=float, default=15.0)
    parser.add_argument("--least-rate", type=float, default=3.0)
    parser.add_argument("--most-rate", type=float, default=40.0)
    parser.add_argument("--burst", type=int, default=96)
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--flags", default="", help="more flags of every server, as text")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    args.logs = args.logs or args.out
    if args.limit_from is None and "dense" not in {label for _, label in args.assignments}:
        parser.error("--limit-from is missing: no server here is dense")
    for folder in (args.out, args.logs):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        for _, label in args.assignments:  # nobody is to wait for an earlier run's step
            (args.out / f"{label}.json").unlink(missing_ok=True)
    deadline = time.monotonic() + args.total
    running = {}
    for device, label in args.assignments:
        line = command(device, label, args)
        print(f"GPU {device}: {shlex.join(line)}", flush=True)
        with (args.logs / f"capacity-{label}.log").open("wb") as output:
            running[label] = subprocess.Popen(
                line, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
            )  # fmt: skip
    needed = args.limit_from is None and running["dense"]
    while time.monotonic() < deadline and any(p.poll() is None for p in running.values()):
        if needed and needed.poll():
            break  # the others wait in vain
        time.sleep(0.5)
    failed = []
    for label, process in running.items():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # ends its server
        status = process.wait()
        if status:
            log = (args.logs / f"capacity-{label}.log").read_text(errors="replace")
            failed.append(f"{label} ended with status {status}:\n{log[-2500:]}")
    for label in running:
        print(summary(args.out / f"{label}.json"), flush=True)
    print("\n".join(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
