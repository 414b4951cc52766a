# SPDX-License-Identifier: Apache-2.0
"""Correctness on a GPU: compiled kernels, served answers and a soak, in one JSON report.

    make gpu-check                              # or: python tests/gpu
    python tests/gpu --parts kernels,served     # some of the parts
    python tests/gpu --devices 0,1,2            # every part on a GPU of its own, at once
    python tests/gpu --merge a.json b.json --out both.json

- `kernels`: the tests of `tests/unit/kernels`, compiled, and steps over KV in host memory beside
  steps over resident KV.
- `served`: the reference model with every method, decode graphs and the overlap scheduler: a full
  budget against dense, batches against their rows alone (:mod:`served_checks`).
- `cascade`: the same of servers that hold a bounded number of tokens (:mod:`cascade_checks`).
- `placed`: the same of servers with all KV in host memory, and their own budgets against KV on the
  device.
- `evicted`: prompts that went to host memory and came back, against a server that evicts nothing
  (:mod:`evicted_checks`).
- `windows`: the same of servers whose streaming heads hold sinks and windows only
  (:mod:`window_checks`).
- `soak`: mixed load with aborts, disconnects, cancellations and flushes, then SGLang's memory check
  and every plane compared with recomputation; `--soak-method cascade`: every state slot is free
  again (`loadtest/soak.py`).

The report is written anew after each part. The exit status is 1 unless every part asked for passed.
Without a GPU everything runs on the CPU, kernels in Triton's interpreter, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import cascade_checks
import evicted_checks
import served_checks
import server_host
import soak
import window_checks
from compare_latency import output_of
from documents import cut_documents
from kernel_checks import KERNEL_TESTS, Part, kernels, part
from local import ENVIRONMENT, METHODS, MODEL, has_gpu, local_servers
from served_checks import RESIDENT, Outcome

from sglang_sparse.tasks import FileEncoder, TaskSuite

ROOT = Path(__file__).parents[2]
DRAFTERS = ROOT / "tests" / "support" / "drafters.py"
PACKAGES = ("sglang", "sglang-sparse", "sglang-kernel", "torch", "triton", "flashinfer-python")
Urls = dict[str, str]


def serve(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """Start dense and every method, and compare what they answer."""
    return compared(served_checks.configurations(), args, environment)


def prompt(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """The same of servers whose prompts select blocks."""
    return compared(served_checks.prompting_configurations(), args, environment)


def draft(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """The same of servers that draft tokens."""
    with tempfile.TemporaryDirectory() as folder:
        # Not in this process: PyTorch starts threads, and servers may be forked from here.
        subprocess.run([sys.executable, str(DRAFTERS), folder], check=True)
        return compared(served_checks.drafting_configurations(Path(folder)), args, environment)


def place(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """The same of servers with all KV in host memory."""
    return compared(served_checks.placed_configurations(), args, environment)


def compared(
    flags_of: dict[str, list[str]], args: argparse.Namespace, environment: dict[str, str]
) -> Part:
    """Start dense and the servers of the methods asked for, and compare what they answer."""
    chosen = {
        name: flags
        for name, flags in flags_of.items()
        if name == "dense" or name.split()[0] in args.methods
    }

    def check(outcome: Outcome, urls: Urls, asked: Asked) -> None:
        for name, url in urls.items():
            try:
                if name.endswith(RESIDENT):
                    method = name.removesuffix(RESIDENT)
                    served_checks.check_twins(outcome, method, urls, asked.prompts, asked.dense[1])
                    continue
                served_checks.check_method(
                    outcome, name, url, asked.prompts, asked.dense, has_gpu()
                )
            except Exception as error:  # the other servers are still to be checked
                outcome.check(False, f"{name}: {type(error).__name__}: {error}"[:1500])

    return beside_dense(chosen, check, args, environment)


def cascade(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """Start dense and servers of bounded states, and compare what they answer."""
    dense = {"dense": served_checks.configurations()["dense"]}

    def check(outcome: Outcome, urls: Urls, asked: Asked) -> None:
        cascade_checks.check(outcome, urls, asked.suite, asked.prompts, asked.dense, has_gpu())

    return beside_dense(dense | cascade_checks.configurations(), check, args, environment)


def windows(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """Start dense and servers whose streaming heads hold windows only, and compare them."""
    dense = {"dense": served_checks.configurations()["dense"]}

    def check(outcome: Outcome, urls: Urls, asked: Asked) -> None:
        window_checks.check(outcome, urls, asked.prompts, asked.dense, has_gpu())

    return beside_dense(dense | window_checks.configurations(), check, args, environment)


def evict(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """Start dense, servers that evict prompts to the host and servers that do not, and compare."""
    dense = {"dense": served_checks.configurations()["dense"]}

    def check(outcome: Outcome, urls: Urls, asked: Asked) -> None:
        evicted_checks.check(outcome, urls, asked.prompts, asked.dense)

    flags = dense | evicted_checks.configurations(args.methods)
    return beside_dense(flags, check, args, environment | soak.VERIFY)


class Asked(NamedTuple):
    """What a dense server was asked, and its answers with their noise."""

    suite: TaskSuite
    prompts: list[list[int]]
    dense: tuple[list[served_checks.Answer], float]


def beside_dense(
    flags_of: dict[str, list[str]],
    check: Callable[[Outcome, Urls, Asked], None],
    args: argparse.Namespace,
    environment: dict[str, str],
) -> Part:
    """Start servers, ask the dense one, and let ``check`` compare the others with it."""
    configurations = {
        name: [*flags, *args.server_flags.split()] for name, flags in flags_of.items()
    }
    suite = TaskSuite(FileEncoder(MODEL), split="heldout")
    prompts = cut_documents(suite, served_checks.LENGTHS, args.documents)
    outcome = Outcome()
    settings = dict.fromkeys(configurations, environment)
    with local_servers(
        settings, args.logs, fork=args.fork, configurations=configurations
    ) as servers:
        urls = {name: server.url for name, server in servers.items()}
        dense = served_checks.check_dense(outcome, urls.pop("dense"), prompts)
        check(outcome, urls, Asked(suite, prompts, dense))
    return part(outcome.checked, outcome.failures, ties=outcome.ties, prompts=len(prompts),
                servers=list(configurations), facts=outcome.facts)  # fmt: skip


def soaked(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """Soak one server."""
    method = args.soak_method
    configurations = {method: [*soak.SERVERS[method], *args.server_flags.split()]}
    settings = {method: {**environment, **soak.VERIFY}}
    with local_servers(
        settings, args.logs, fork=args.fork, configurations=configurations
    ) as servers:
        found = soak.soak(servers[method], 60 * args.minutes, seed=1)
    failures = [*found["faults"], *found["bad_log_lines"]]
    if not found["ok"] and not failures:
        names = {"alive", "planes", "slots", "snapshots", "rss_growth_mib"} & found.keys()
        failures.append(f"soak: { ({name: found[name] for name in sorted(names)}) }")
    facts = {k: v for k, v in found.items() if k not in ("ok", "faults", "rss_mib")}
    return part(sum(found["requests"].values()), failures, **facts)


PARTS: dict[str, Callable[[argparse.Namespace, dict[str, str]], Part]] = {
    "kernels": kernels,
    "served": serve,
    "prompts": prompt,
    "drafts": draft,
    "cascade": cascade,
    "placed": place,
    "evicted": evict,
    "windows": windows,
    "soak": soaked,
}


def installed(name: str) -> str | None:
    """Version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def heading(commit: str | None) -> dict[str, Any]:
    """What was checked, and on what."""
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, capture_output=True)
    return {
        "commit": commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "modified": None if commit else changed.returncode != 0,
        "device": output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "cpu",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"python": platform.python_version(), **{n: installed(n) for n in PACKAGES}},
    }


def finish(report: dict[str, Any], out: Path) -> None:
    """Say whether all is well, and write the report."""
    parts = report["parts"]
    report["ok"] = all(name in parts and parts[name]["ok"] for name in report["asked"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


def merge(paths: list[Path], out: Path) -> dict[str, Any]:
    """One report of parts that ran by themselves.

    Raises:
        ValueError: they are of different code or machines, or have a part in common.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    first = reports[0]
    merged = {**first, "asked": [], "parts": {}}
    for path, report in zip(paths, reports, strict=True):
        for name in ("commit", "modified", "device", "driver", "versions"):
            if report[name] != first[name]:
                raise ValueError(f"{path}: {name} is {report[name]}, not {first[name]}")
        for name in report["asked"]:
            if name in merged["asked"]:
                raise ValueError(f"{path}: {name} is in an earlier report too")
            merged["asked"].append(name)
        merged["parts"] |= report["parts"]
    finish(merged, out)
    return merged


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every part asked for; the report is written after each of them."""
    report: dict[str, Any] = {**heading(args.commit), "asked": args.parts, "parts": {}}
    lock = threading.Lock()

    def one(number: int) -> None:
        name, begin = args.parts[number], time.monotonic()
        chosen = {"CUDA_VISIBLE_DEVICES": args.devices[number]} if args.devices else {}
        try:
            found = PARTS[name](args, chosen)
        except Exception as error:  # a part that breaks fails, and the others go on
            found = part(0, [f"{type(error).__name__}: {error}"[:3000]])
        found["seconds"] = round(time.monotonic() - begin, 1)
        with lock:
            report["parts"][name] = found
            finish(report, args.out)
            show(name, found)

    if args.devices:
        with ThreadPoolExecutor(len(args.parts)) as pool:
            list(pool.map(one, range(len(args.parts))))
    else:
        for number in range(len(args.parts)):
            one(number)
    return report


def prepare() -> None:
    """Import what forked servers need."""
    os.environ |= ENVIRONMENT
    server_host.import_sglang()


def show(name: str, found: Part) -> None:
    """A line for a part, and one for each failure."""
    word = "passed" if found["ok"] else "FAILED"
    print(f"{name}: {word}, {found['checked']} checked, {found['failed']} failed", flush=True)
    for failure in found["failures"]:
        print(f"  {failure}", flush=True)


def names_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """`type` of an argument: some of the allowed names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown or len(set(names)) != len(names):
            raise argparse.ArgumentTypeError(f"{text!r} is not some of {', '.join(allowed)}")
        return names

    return parse


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add(
        "--parts",
        type=names_of(tuple(PARTS)),
        default=list(PARTS),
        help=f"{','.join(PARTS)}; by default all",
    )
    add("--out", type=Path, default=ROOT / "build" / "gpu-check.json")
    add("--logs", type=Path, help="folder of logs; that of --out by default")
    add("--devices", type=lambda text: text.split(","),
        help="a GPU for each part, in order; the parts then run at once")  # fmt: skip
    add("--commit", help="what is checked, where there is no git checkout")
    add("--merge", type=Path, nargs="+", metavar="REPORT", help="make one report of several")
    add("--workers", type=int, default=1, help="processes of the kernel tests")
    add("--kernel-tests", type=Path, nargs="+", default=KERNEL_TESTS)
    add("--methods", type=names_of(METHODS), default=list(METHODS), help="of the served checks")
    add("--documents", type=int, default=4, help="of five prompts each, for the served checks")
    add("--server-flags", default="", help="more flags of every server, as text")
    add("--soak-method", choices=soak.METHODS, default="sparcas")
    add("--minutes", type=float, default=10.0, help="of the soak")
    args = parser.parse_args()
    if args.devices and len(args.devices) != len(args.parts):
        parser.error(f"--devices: {len(args.parts)} parts need as many devices")
    args.logs = args.logs or args.out.parent
    # Forked servers start in a fraction of the time; a process with CUDA or threads cannot fork.
    args.fork = not has_gpu() and not args.devices
    return args


def main() -> None:
    """Check, or merge reports; exits with status 1 unless all is well."""
    args = parse()
    if args.merge:
        try:
            report = merge(args.merge, args.out)
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"error: --merge: {error}")
    else:
        args.logs.mkdir(parents=True, exist_ok=True)
        if args.fork and set(args.parts) - {"kernels"}:
            prepare()
        report = run(args)
    print(f"{'ok' if report['ok'] else 'NOT ok'}: {args.out}")
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
