# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per output token of one running sparse server, beside dense requests to it.

    python loadtest/beside_dense.py --base-url http://127.0.0.1:30000

Each repeat asks with `{"mode": "dense"}` and without it, in changing order, on the same cached
prompt of random tokens. So both share a machine, a process and a prompt, and what comes out is
what sparsity changes. The time per token is the slope between a short and a long generation.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from client import server_url
from decode_latency import call, generate

MODES: dict[str, dict[str, Any]] = {
    "dense": {"custom_params": {"sparse": {"mode": "dense"}}},
    "sparse": {},
}


def measure(
    base_url: str,
    context: int,
    *,
    batch: int,
    tokens: tuple[int, int],
    repeats: int,
    vocab: int,
) -> dict[str, Any]:
    """One context: medians and minima of both, and the median of their ratio of one repeat.

    Args:
        base_url: the server's address.
        context: tokens of the prompt.
        batch: requests at once, on one prompt.
        tokens: of the short and of the long generation whose difference counts.
        repeats: of each mode.
        vocab: token ids to draw from.
    """
    source = random.Random(context)
    prompts = [[source.randrange(10, vocab) for _ in range(context)]] * batch
    for options in MODES.values():
        generate(base_url, prompts[:1], 1, options)
        generate(base_url, prompts, tokens[0], options)
    seen: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode in list(MODES) if repeat % 2 else reversed(MODES):
            short, long = (generate(base_url, prompts, n, MODES[mode])[0] for n in tokens)
            seen[mode].append(1000 * (long - short) / (tokens[1] - tokens[0]))
    ratios = [dense / sparse for dense, sparse in zip(seen["dense"], seen["sparse"], strict=True)]
    return {
        "context": context,
        "batch": batch,
        **{f"{mode}_ms": statistics.median(values) for mode, values in seen.items()},
        **{f"{mode}_ms_min": min(values) for mode, values in seen.items()},
        "times_faster": statistics.median(ratios),
        "all_ms": seen,
    }


def main() -> None:
    """Measure every context and print one row each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, default="http://127.0.0.1:30000")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000, 8000, 16000])
    parser.add_argument("--batch", type=int, default=1, help="requests at once, on one prompt")
    parser.add_argument("--tokens", type=int, nargs=2, default=(8, 72), help="short and long")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=2000, help="token ids to draw from")
    parser.add_argument("--out", type=Path, help="report to write, JSON")
    args = parser.parse_args()
    info = call(args.base_url, "/server_info")["internal_states"][0].get("sparse")
    if info is None:
        parser.error(f"{args.base_url} serves without --attention-backend sparse")
    report = {"method": info["method"], "implementation": info["implementation"], "cells": []}
    print(f"{info['method']}, {args.batch} at once, ms per token:")
    print(f"{'context':>8} {'dense':>8} {'sparse':>8} {'times faster':>13}")
    for context in args.contexts:
        cell = measure(
            args.base_url, context, batch=args.batch, tokens=tuple(args.tokens),
            repeats=args.repeats, vocab=args.vocab,
        )  # fmt: skip
        report["cells"].append(cell)
        row = f"{cell['dense_ms']:>8.2f} {cell['sparse_ms']:>8.2f} {cell['times_faster']:>13.2f}"
        print(f"{context:>8} {row}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
