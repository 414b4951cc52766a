# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per output token of one running sparse server, beside dense requests to it.

    python loadtest/beside_dense.py --base-url http://127.0.0.1:30000

Each repeat asks with `{"mode": "dense"}` and without it, in changing order, on the same cached
prompt of random tokens. So both share a machine, a process and a prompt, and what comes out is
what sparsity changes. `--dense-url` times a plain dense server in the same turns. The time per
token is that of the stream from its first token on.
"""

import argparse
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

from client import call, server_url, stream
from compare_latency import gpu, output_of

# Name, address and sampling parameters of what takes turns.
Turn = tuple[str, str, dict[str, Any]]
DENSE = {"custom_params": {"sparse": {"mode": "dense"}}}


def turns(base_url: str, dense_url: str | None) -> list[Turn]:
    """Dense and sparse requests to one server, and those to a dense server if there is one."""
    plain: list[Turn] = [] if dense_url is None else [("dense_server", dense_url, {})]
    return [("dense", base_url, DENSE), ("sparse", base_url, {}), *plain]


def spread(values: list[float]) -> dict[str, Any]:
    """Median and quartiles of at least two values, and the values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high], "all": values}


def generate(
    base_url: str, prompts: list[list[int]], tokens: int, options: dict[str, Any]
) -> float:
    """Milliseconds per token of one batch after its first token.

    Raises:
        RuntimeError: the answer failed, or has another length than asked for.
    """
    # The first token comes at once and the others with the last, so that no text is made meanwhile.
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    params["stream_interval"] = tokens
    body = {"input_ids": prompts, "sampling_params": params | options}
    record = stream(base_url, "generate", body, name="beside_dense")
    took = record.time_per_token
    if record.error is not None or record.output_tokens != tokens or took is None:
        said = record.error or f"an answer has {record.output_tokens} of {tokens} tokens"
        raise RuntimeError(f"{base_url}: {said}")
    return 1000 * took


def measure(
    asked: list[Turn],
    context: int,
    *,
    batch: int,
    tokens: int,
    repeats: int,
    vocab: int,
) -> dict[str, Any]:
    """One context: milliseconds per token of each turn, and how many times faster sparse is.

    Args:
        asked: from :func:`turns`.
        context: tokens of the prompt.
        batch: requests at once, on one prompt.
        tokens: of each answer, at least two.
        repeats: of each turn, at least two.
        vocab: token ids to draw from.

    Returns:
        :func:`spread` of the times of each turn, and of the ratios of each dense time to the
        sparse one of the same repeat.
    """
    source = random.Random(context)
    prompts = [[source.randrange(10, vocab) for _ in range(context)]] * batch
    for _, url, options in asked:
        generate(url, prompts[:1], 8, options)
    seen: dict[str, list[float]] = {name: [] for name, _, _ in asked}
    for repeat in range(repeats):
        for name, url, options in asked if repeat % 2 else reversed(asked):
            seen[name].append(generate(url, prompts, tokens, options))
    sparse = seen["sparse"]
    ratios = {
        name: [one / other for one, other in zip(values, sparse, strict=True)]
        for name, values in seen.items()
        if name != "sparse"
    }
    return {
        "context": context,
        "batch": batch,
        "ms": {name: spread(values) for name, values in seen.items()},
        "times_faster": {name: spread(values) for name, values in ratios.items()},
    }


def device(kind: str | None) -> str | None:
    """The GPU of this machine for a server on `cuda`, else the model of its CPU."""
    if kind == "cuda":
        return gpu("name")
    models = output_of("grep", "-m1", "model name", "/proc/cpuinfo")
    return models and models.partition(":")[2].strip()


def main() -> None:
    """Measure every context and print one row each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, default="http://127.0.0.1:30000")
    parser.add_argument("--dense-url", type=server_url,
                        help="a dense server to time in the same turns")  # fmt: skip
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000, 8000, 16000])
    parser.add_argument("--batch", type=int, default=1, help="requests at once, on one prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=2000, help="token ids to draw from")
    parser.add_argument("--out", type=Path, help="report to write, JSON")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    for name in ("tokens", "repeats"):
        if getattr(args, name) < 2:
            parser.error(f"--{name}: at least 2 are needed")
    info = call(args.base_url, "/server_info")
    sparse = info["internal_states"][0].get("sparse")
    if sparse is None:
        parser.error(f"{args.base_url} serves without --attention-backend sparse")
    asked = turns(args.base_url, args.dense_url)
    report = {
        "method": sparse["method"],
        "implementation": sparse["implementation"],
        "sglang": info.get("version"),
        "device": device(info.get("device")),
        "cores": len(os.sched_getaffinity(0)),
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "tokens": args.tokens,
        "cells": [],
    }
    print(f"{sparse['method']}, {args.batch} at once, ms per token (quartiles):")
    print(f"{'context':>8}", *(f"{name:>22}" for name, _, _ in asked), f"{'times faster':>20}")
    for context in args.contexts:
        cell = measure(
            asked, context, batch=args.batch, tokens=args.tokens,
            repeats=args.repeats, vocab=args.vocab,
        )  # fmt: skip
        report["cells"].append(cell)
        found = [*cell["ms"].values(), cell["times_faster"]["dense"]]
        cells = ("{:.2f} ({:.2f} to {:.2f})".format(s["median"], *s["quartiles"]) for s in found)
        print(f"{context:>8}", *(f"{text:>22}" for text in cells), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
