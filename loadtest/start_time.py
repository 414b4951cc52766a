# SPDX-License-Identifier: Apache-2.0
"""Seconds that servers take from loaded weights to their first answer, cold and warm.

    python loadtest/start_time.py --configurations dense kascade_sketch --out start.json

The first start of each configuration has an empty folder for Triton's cache, the others the folder
that it left. What SGLang and FlashInfer keep elsewhere is filled by a first start that is not
measured, of a dense server.
"""

import argparse
import json
import os
import re
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from compare_latency import CONFIGURATIONS, HERE, gpu, output_of, running_server, server_command

_LOADED = re.compile(r"\[([0-9-]+ [0-9:]+)[^\]]*\] .*Load weight end", re.MULTILINE)
_CAPTURED = re.compile(r"Capture target decode CUDA graph end. elapsed=([0-9.]+) s")
_LATE = re.compile(r"sglang-sparse: (\S+) was compiled at its launch, which took ([0-9.]+) s")
_OURS = re.compile(r"sglang-sparse: (\d+ kernels were on disk.*)")


def start(label: str, args: argparse.Namespace, cache: Path, number: int = 0) -> dict[str, Any]:
    """Start one server with Triton's cache in ``cache``, end it, and say how long it took.

    Its log has ``number`` in its name.

    Returns:
        ``seconds`` from loaded weights to the first answer, to within the second of SGLang's log;
        ``total_seconds`` from its command on; ``capture_seconds`` of decode graphs, the first
        forward included; ``kernels``, the line of this package, and ``late``, kernels of it that
        a launch had to compile.

    Raises:
        RuntimeError: it did not start, or its log does not say when weights were loaded.
    """
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    log = args.logs / f"start-{label}-{number}.log"
    command = server_command(args.model, args.port, args.max_batch, CONFIGURATIONS[label])
    began = time.monotonic()
    with running_server(command, args.port, log):
        total, ready = time.monotonic() - began, datetime.now()
    text = log.read_text(errors="replace")
    loaded = _LOADED.search(text)
    if loaded is None:
        raise RuntimeError(f"{log} does not say when weights were loaded")
    seconds = (ready - datetime.fromisoformat(loaded[1])).total_seconds()
    ours, captured = _OURS.search(text), _CAPTURED.search(text)
    return {
        "seconds": round(seconds, 1),
        "total_seconds": round(total, 1),
        "capture_seconds": captured and float(captured[1]),
        "kernels": ours and ours[1],
        "late": {name: float(took) for name, took in _LATE.findall(text)},
    }


def main() -> None:
    """Start each configuration, cold and then warm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS,
                        default=["dense", "kascade_sketch"])  # fmt: skip
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--max-batch", type=int, default=16, help="rows of the largest graph")
    parser.add_argument("--warm", type=int, default=1, help="warm starts of each")
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "device": gpu("name"),
        "cores": len(os.sched_getaffinity(0)),
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "max_batch": args.max_batch,
        "servers": {},
    }
    with tempfile.TemporaryDirectory() as caches:
        start("dense", args, Path(caches) / "unmeasured", -1)
        for label in args.configurations:
            cache = Path(caches) / label
            cold, *warm = (start(label, args, cache, n) for n in range(1 + args.warm))
            report["servers"][label] = {"cold": cold, "warm": warm}
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            print(label, json.dumps(report["servers"][label]), flush=True)


if __name__ == "__main__":
    main()
