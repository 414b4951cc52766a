# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per output token of several running servers, measured in turns.

    python loadtest/alternate_latency.py --out metrics.json --cells 1000x16 32000x16 \\
        --server off=http://127.0.0.1:31000 --server on=http://127.0.0.1:31001

It finds differences that are smaller than the drift of clocks from one minute to the next, such as
the cost of metrics. Each repeat asks every server once, in changing order, and compares each with
the first server in the same repeat. The other servers are idle meanwhile, on the same GPU.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from decode_latency import call, generate


def slope_ms(base_url: str, prompts: list[list[int]], tokens: tuple[int, int]) -> float:
    """Milliseconds per token of one batch on cached prompts, without prefill and HTTP."""
    short, _ = generate(base_url, prompts, tokens[0])
    long, _ = generate(base_url, prompts, tokens[1])
    return 1000 * (long - short) / (tokens[1] - tokens[0])


def alternate(
    servers: dict[str, str],
    context: int,
    batch: int,
    *,
    tokens: tuple[int, int],
    repeats: int,
    vocab: int,
) -> dict[str, Any]:
    """One cell: a shared prompt of `context` random tokens, `batch` times at once.

    Args:
        servers: addresses by name.
        context: tokens of the prompt.
        batch: requests at once.
        tokens: lengths of the short and the long generation, whose times are subtracted.
        repeats: measurements of each server, at least two.
        vocab: token ids to draw from.

    Returns:
        For each server the median time per token, and the median of its ratio to the first
        server's of the same repeat, with quartiles.
    """
    source = random.Random(f"{context}/{batch}")
    prompts = [[source.randrange(10, vocab) for _ in range(context)]] * batch
    for url in servers.values():
        generate(url, prompts[:1], 1)
        generate(url, prompts, tokens[0])
    seen: dict[str, list[float]] = {name: [] for name in servers}
    for repeat in range(repeats):
        for name in list(servers) if repeat % 2 else reversed(servers):
            seen[name].append(slope_ms(servers[name], prompts, tokens))
    first = seen[next(iter(servers))]
    found = {}
    for name, values in seen.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {
            "ms_per_token": statistics.median(values),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            "all_ms_per_token": values,
        }
    what = {"context": context, "batch": batch, "tokens": tokens, "repeats": repeats}
    return what | {"servers": found}


def main() -> None:
    """Measure every cell; the report is written after each of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--cells", nargs="+", default=["32000x16"], metavar="CONTEXTxBATCH")
    parser.add_argument("--tokens", type=int, nargs=2, default=(16, 528), help="short and long")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=128000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", help="to note in the report")
    parser.add_argument("--commit", help="to note in the report")
    args = parser.parse_args()
    servers = dict(entry.split("=", 1) for entry in args.server)
    infos = {name: call(url, "/server_info") for name, url in servers.items()}
    report: dict[str, Any] = {
        "device": args.device,
        "commit": args.commit,
        "servers": {
            name: {
                "sglang": info.get("version"),
                "enable_metrics": info.get("enable_metrics"),
                "decode_log_interval": info.get("decode_log_interval"),
                "method": (info["internal_states"][0].get("sparse") or {}).get("method"),
            }
            for name, info in infos.items()
        },
        "cells": [],
    }
    for cell in args.cells:
        context, batch = map(int, cell.split("x"))
        report["cells"].append(
            alternate(
                servers,
                context,
                batch,
                tokens=tuple(args.tokens),
                repeats=args.repeats,
                vocab=args.vocab,
            )
        )
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        for name, found in report["cells"][-1]["servers"].items():
            print(cell, name, f"{found['ms_per_token']:.4f} ms", f"x {found['ratio']:.4f}")


if __name__ == "__main__":
    main()
