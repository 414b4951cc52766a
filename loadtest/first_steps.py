# SPDX-License-Identifier: Apache-2.0
"""What the first decode steps behind a known prefix wait for, with KV in host memory.

    python loadtest/first_steps.py --base-url http://127.0.0.1:30000 --label psa --out first.json

A known prompt comes back with new tokens. Cold: other prompts decoded meanwhile. Warm: once more.
The server has `placement.kind` `host`, with `host_bytes` for all prompts. Where it runs ahead, it
counts a step more.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

from beside_dense import device
from client import Record, call, server_url, stream
from compare_latency import output_of
from decode_latency import frames_of

OTHERS_DECODE = 40
SIZES = {"context": 120_000, "new": 32, "tokens": 10, "others": 3, "repeats": 8, "vocab": 30_000}


def ask(base_url: str, prompt: list[int], tokens: int) -> Record:
    """One whole request; raises RuntimeError if it fails."""
    # The first token comes at once, the rest at the end.
    params = {"max_new_tokens": tokens, "stream_interval": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params | {"temperature": 0}}
    record = stream(base_url, "generate", body, name="")
    if record.error is not None or record.output_tokens != tokens:
        raise RuntimeError(record.error or f"{record.output_tokens} of {tokens} tokens came")
    return record


def first_steps(base_url: str, prompt: list[int], tokens: int, known: int) -> dict[str, Any]:
    """What one request waited for; raises RuntimeError if less is cached."""
    before = frames_of(base_url)
    record = ask(base_url, prompt, 1 + tokens)
    counted = {name: count - before[name] for name, count in frames_of(base_url).items()}
    if record.cached_tokens < known:
        raise RuntimeError(f"{record.cached_tokens} of {known} tokens were cached: add host_bytes")
    return counted | {
        "found": counted["hits"] / (counted["hits"] + counted["loads"]),
        "stall_ms": counted["stall_nanoseconds"] / 1e6,
        "seconds": record.total,
        "first_token_s": record.first_token,
    }


def measure(base_url: str, args: argparse.Namespace, page: int) -> dict[str, Any]:
    """Medians and all rows, `cold` and `warm`."""
    source = random.Random(args.context)

    def drawn(length: int) -> list[int]:
        return source.choices(range(10, args.vocab), k=length)

    prompt, *others = (drawn(args.context) for _ in range(1 + args.others))
    for first in (prompt, prompt + drawn(args.new)):  # kernels may be compiled
        ask(base_url, first, 1 + args.tokens)
    known = args.context // page * page
    rows: dict[str, Any] = {"cold": [], "warm": []}
    for _ in range(args.repeats):
        for other in others:
            ask(base_url, other, OTHERS_DECODE)
        back = prompt + drawn(args.new)
        for found in rows.values():
            found.append(first_steps(base_url, back, args.tokens, known))
    return {
        name: {"median": {key: median(row[key] for row in found) for key in found[0]}, "all": found}
        for name, found in rows.items()
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="without git")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=str(default))
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in SIZES}
    if min(sizes.values()) < 1:
        parser.error("numbers start at 1")
    if not frames_of(args.base_url):
        sys.exit("error: the server has no frames: set placement.kind host")
    info = call(args.base_url, "/server_info")
    report = sizes | {
        "label": args.label,
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "device": device(info["device"]),
        "sglang": info["version"],
        "sparse": info["internal_states"][0]["sparse"],
    }
    try:
        report |= measure(args.base_url, args, info["page_size"])
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for name in ("cold", "warm"):
        print(name, report[name]["median"])


if __name__ == "__main__":
    main()
