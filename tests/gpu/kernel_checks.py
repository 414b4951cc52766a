# SPDX-License-Identifier: Apache-2.0
"""The tests of kernels as a part of the GPU check, in as many processes as asked for."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from local import has_gpu

ROOT = Path(__file__).parents[2]
_UNIT = ROOT / "tests" / "unit"
KERNEL_TESTS = [_UNIT / "kernels", _UNIT / "radix" / "test_host_kv.py"]
MOST_SHOWN = 40
Part = dict[str, Any]
Environment = dict[str, str]


def part(checked: int, failures: list[str], **facts: Any) -> Part:
    """The report of one part: it passed if something was checked and nothing failed."""
    ok = checked > 0 and not failures
    return {"ok": ok, "checked": checked, "failed": len(failures),
            "failures": failures[:MOST_SHOWN], **facts}  # fmt: skip


def kernels(args: argparse.Namespace, environment: dict[str, str]) -> Part:
    """Run the kernel tests in processes of their own, each with a share of the files, and count."""
    tests: list[Path] = args.kernel_tests
    files = [file for path in tests for file in sorted(path.rglob("test_*.py")) or [path]]
    shares = [files[i :: args.workers] for i in range(min(args.workers, len(files)))]
    run_share = partial(share_of_kernels, logs=args.logs, environment=environment)
    with ThreadPoolExecutor(len(shares)) as pool:
        found = list(pool.map(run_share, range(len(shares)), shares))
    total = {name: sum(each[name] for each in found) for name in ("failed", "skipped")}
    listed = {
        name: [line for each in found for line in each[name]][:MOST_SHOWN]
        for name in ("failures", "skipped_tests")
    }
    checked = sum(each["checked"] for each in found)
    return part(checked, listed["failures"], compiled=has_gpu()) | total | listed


def share_of_kernels(
    number: int, files: list[Path], *, logs: Path, environment: Environment
) -> Part:
    """What one process of kernel tests found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "--no-header"]
        command += ["-p", "no:cacheprovider", f"--junitxml={path}"]
        command += ["--durations=40"]
        # Processes share the cores: with threads of their own they wait for each other.
        env = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        if has_gpu():
            env.pop("TRITON_INTERPRET", None)
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        (logs / f"kernels-{number}.log").write_text(done.stdout + done.stderr)
        if not path.exists():
            tail = (done.stdout + done.stderr)[-1500:]
            failures = [f"pytest ended with status {done.returncode}: {tail}"]
            return part(0, failures, skipped=0, skipped_tests=[])
        found = counted(ElementTree.parse(path).getroot())
    if done.returncode and not found["failures"]:
        found |= {"ok": False, "failed": 1, "failures": [f"pytest ended with {done.returncode}"]}
    return found


def counted(root: ElementTree.Element) -> Part:
    """The part that a JUnit report describes."""
    failures, skipped, checked = [], [], 0
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [e for e in case if e.tag in ("failure", "error")]
        if any(e.tag == "skipped" for e in case):
            skipped.append(name)
            continue
        checked += 1
        failures += [f"{name}: {(e.get('message') or '').splitlines()[0:1]}" for e in wrong[:1]]
    return part(checked, failures, skipped=len(skipped), skipped_tests=skipped[:MOST_SHOWN])
