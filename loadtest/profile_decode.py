# SPDX-License-Identifier: Apache-2.0
"""Profiles a decode step of a running server: kernels, launches and gaps, by SGLang's profiler.

    python loadtest/profile_decode.py --cells 120000x16 120000x1 --out profile.json

The server must share this machine's file system, since SGLang writes the trace to a folder.
"""

import argparse
import gzip
import json
import random
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from client import server_url
from decode_latency import call, generate

STEPS = 4
TOKENS = 400
LEAD_SECONDS = 0.4
TRACE_SECONDS = 60
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def short_name(kernel: str) -> str:
    """A kernel's name without return type, arguments and most template parameters."""
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", kernel)
    return re.sub(r"[<(].*", "", name)[:60]


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Times of one step in microseconds, from the trace events of ``STEPS`` steps."""
    work = sorted((e for e in events if e.get("cat") in GPU_WORK), key=lambda e: e["ts"])
    if not work:
        raise RuntimeError(
            "the trace holds no GPU work: did the batch end before the profiler ran?"
        )
    by_name: dict[str, list[float]] = {}
    for event in work:
        by_name.setdefault(short_name(event["name"]), []).append(event["dur"])
    span = work[-1]["ts"] + work[-1]["dur"] - work[0]["ts"]
    kernels = [
        {
            "name": name,
            "launches": len(times) / STEPS,
            "median_us": statistics.median(times),
            "us": sum(times) / STEPS,
        }
        for name, times in by_name.items()
    ]
    # A launch may start while the one before it ends. Such time counts once.
    busy, covered = 0.0, 0.0
    for event in work:
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(event["ts"], covered))
        covered = max(covered, end)
    busy /= STEPS
    return {
        "span_us": span / STEPS,
        "busy_us": busy,
        "gap_us": span / STEPS - busy,
        "launches": len(work) / STEPS,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"]),
    }


def load_trace(folder: Path) -> list[dict[str, Any]]:
    """Events of the trace that appears in ``folder``; raises RuntimeError if none does."""
    deadline = time.monotonic() + TRACE_SECONDS
    while time.monotonic() < deadline:
        for path in folder.rglob("*.trace.json.gz"):
            try:
                events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))[
                    "traceEvents"
                ]
            except (EOFError, OSError, ValueError):
                continue  # still being written
            return events
        time.sleep(0.5)
    raise RuntimeError(f"no trace appeared in {folder}")


def profile(base_url: str, context: int, batch: int, vocab: int) -> dict[str, Any]:
    """Summary of a decode step of ``batch`` requests that share a prompt of ``context`` tokens."""
    source = random.Random(f"{context}/shared")
    prompts = [[source.randrange(10, vocab) for _ in range(context)]] * batch
    generate(base_url, prompts[:1], 1)
    begun, _ = generate(base_url, prompts, 8)
    with tempfile.TemporaryDirectory() as folder:
        load = threading.Thread(target=generate, args=(base_url, prompts, TOKENS))
        load.start()
        # Decoding has begun by then, also where the cached prompt's KV comes from host memory.
        time.sleep(LEAD_SECONDS + begun)
        body = {"output_dir": folder, "num_steps": STEPS, "activities": ["GPU"]}
        call(base_url, "/start_profile", body)
        load.join()
        events = load_trace(Path(folder))
    return {"context": context, "batch": batch} | summary(events)


def main() -> None:
    """Profile one running server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, default="http://127.0.0.1:30000")
    parser.add_argument("--cells", nargs="+", required=True, metavar="CONTEXTxBATCH")
    parser.add_argument("--vocab", type=int, default=128000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report = []
    for cell in args.cells:
        context, batch = map(int, cell.split("x"))
        report.append(profile(args.base_url, context, batch, args.vocab))
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        for kernel in report[-1]["kernels"][:12]:
            print(f"{kernel['us']:9.1f} us {kernel['launches']:6.1f} x  {kernel['name']}")


if __name__ == "__main__":
    main()
