# SPDX-License-Identifier: Apache-2.0
"""Capacity on documents that together exceed GPU memory: three servers with equally much of it.

    python loadtest/capacity_beyond_memory.py --out results --commit HASH

A Llama-3.1-8B shape with dummy weights, one server after the other on one GPU: dense attention and
`page_minmax`, both with a hierarchical cache that holds all documents in host memory, and
`page_minmax` with all KV in host memory. Each has as much device memory for KV as the last one has
for frames and planes. Rates and limits are those of `capacity.py`; the dense server is the first,
and its unloaded step limits all.
"""

import argparse
import json
from pathlib import Path

import capacity
from compare_latency import HERE, gpu, output_of, running_server, server_command
from objectives import OWN, Objective
from scenarios import Scenario

TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # K and V of 32 layers, 8 KV heads of 128, bf16
PLANES = 1 / 16  # of KV: least and largest key of 16 tokens
PAGE = 64
RUNNING = 48
SELECTION = {"layers": {"kind": "every"}, "page_size": 16, "min_sparse_tokens": 2048}
SCENARIO = "shared_beyond_memory"


def configurations(frame_bytes: int, host_bytes: int) -> dict[str, list[str]]:
    """Flags of each server, by its label.

    Args:
        frame_bytes: `placement.device_bytes` of the server with all KV in host memory.
        host_bytes: of host memory, of each server.
    """
    room = frame_bytes + int(PLANES * host_bytes)
    dense, resident = (
        int(room / (TOKEN_BYTES * (1 + planes))) // PAGE * PAGE for planes in (0, PLANES)
    )
    behind = ["--enable-hierarchical-cache", "--hicache-size", str(host_bytes // 10**9)]
    sparse = ["--attention-backend", "sparse", "--sparse-method", "page_minmax", "--sparse-config"]
    placement = {"kind": "host", "device_bytes": frame_bytes, "host_bytes": host_bytes}
    return {
        "dense": [
            *("--attention-backend", "flashinfer", "--page-size", str(PAGE)),
            *("--max-total-tokens", str(dense), *behind),
        ],
        "page_minmax": [
            *(*sparse, json.dumps(SELECTION), "--max-total-tokens", str(resident), *behind)
        ],
        "page_minmax_on_host": [*sparse, json.dumps(SELECTION | {"placement": placement})],
    }


def main() -> None:
    """Measure the servers asked for, and write a page of all reports."""
    labels = list(configurations(0, 0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the reports and logs")
    add("--servers", nargs="+", choices=labels, default=labels, help="dense before the others")
    add("--frame-bytes", type=int, default=16 << 30)
    add("--host-bytes", type=int, default=80 * 10**9)
    add("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    add("--port", type=int, default=31000)
    add("--seconds", type=float, default=60.0, help="of arrivals, a trial")
    add("--limit", type=float, default=430.0, help="seconds a server, once it is up")
    add("--least-rate", type=float, default=0.5)
    add("--most-rate", type=float, default=8.0)
    add("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = capacity.Settings(
        seconds=args.seconds, drain=20.0, least_rate=args.least_rate, most_rate=args.most_rate,
        limit=args.limit, seed=1, burst=RUNNING // 2,
    )  # fmt: skip
    where = {
        "device": gpu("name"),
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
    }
    scenario = Scenario.load(SCENARIO)
    flags_of = configurations(args.frame_bytes, args.host_bytes)
    for label in args.servers:
        dense = label == "dense"
        flags = [*flags_of[label], "--enable-metrics", "--max-running-requests", str(RUNNING)]
        command = server_command(args.model, args.port, RUNNING, flags)
        with running_server(command, args.port, args.out / f"{label}.log") as url:
            objective = OWN if dense else Objective(report=args.out / "dense.json")
            capacity.measure(url, label, scenario, settings, args.out, objective, **where)
            used = gpu("memory.used")
        path = args.out / f"{label}.json"
        report = json.loads(path.read_text()) | {"memory_used_mib": used and int(used)}
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(capacity.write_report(args.out))


if __name__ == "__main__":
    main()
