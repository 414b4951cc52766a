# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per output token of a running server, over contexts and batch sizes.

It works on any SGLang server over HTTP and needs no tokenizer (`/generate` with `input_ids`). So
dense and sparse servers with dummy weights can be measured side by side:

    python loadtest/decode_latency.py --base-url http://127.0.0.1:30000 --label sparcas --out x.json

The requests of a batch share one prompt, whose KV is computed once and read by all, or take a few
prompts in turn, or each have their own. The time per output token is the slope between a short and
a long generation on cached prompts. So it contains no time of prefill and HTTP. The median over
repeats is reported with its spread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client import server_url

SHORT, LONG = 16, 144


def call(base_url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One HTTP call; returns the decoded answer, or None where it is not JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(base_url + path, data, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        text = response.read()
    return json.loads(text) if text.lstrip()[:1] in (b"{", b"[") else None


def generate(
    base_url: str,
    prompts: list[list[int]],
    tokens: int,
    options: dict[str, Any] | None = None,
) -> tuple[float, list[int]]:
    """Seconds for one batch, and the cached tokens of each request.

    Args:
        base_url: the server's address.
        prompts: token ids of each request.
        tokens: length of each answer.
        options: further sampling parameters, `custom_params` among them.

    Raises:
        RuntimeError: an answer has another length than asked for.
    """
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params | (options or {})}
    start = time.perf_counter()
    answers = call(base_url, "/generate", body)
    seconds = time.perf_counter() - start
    short = [a for a in answers if a["meta_info"]["completion_tokens"] != tokens]
    if short:
        raise RuntimeError(f"{len(short)} of {len(answers)} answers stopped early")
    return seconds, [a["meta_info"]["cached_tokens"] for a in answers]


@dataclass(frozen=True)
class Cell:
    """What is measured: ``batch`` requests that take ``prompts`` prompts of ``context`` tokens."""

    context: int
    batch: int
    prompts: int

    @staticmethod
    def separate(text: str) -> Cell:
        """`type` of an argument: CONTEXTxBATCH, or CONTEXTxBATCH/PROMPTS."""
        found = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?", text)
        context, batch, prompts = (int(n or 0) for n in found.groups()) if found else (0, 0, 0)
        if not context or not 0 <= prompts <= batch > 0:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not CONTEXTxBATCH or CONTEXTxBATCH/PROMPTS, with PROMPTS <= BATCH"
            )
        return Cell(context, batch, prompts or batch)

    def documents(self, vocab: int) -> list[list[int]]:
        """Its prompts: random tokens, the same for any batch that takes as many."""
        source = random.Random(f"{self.context}/{self.prompts}")
        return [
            [source.randrange(10, vocab) for _ in range(self.context)] for _ in range(self.prompts)
        ]


def measure(base_url: str, cell: Cell, *, vocab: int, repeats: int) -> dict[str, Any]:
    """One cell: warm the prefix cache, then time short and long generations in turn."""
    documents, first_token = cell.documents(vocab), []
    for prompt in documents:
        first_token.append(generate(base_url, [prompt], 1)[0])
    prompts = [documents[number % cell.prompts] for number in range(cell.batch)]
    generate(base_url, prompts, SHORT)
    slopes, cached = [], []
    for _ in range(repeats):
        short, _ = generate(base_url, prompts, SHORT)
        long, cached = generate(base_url, prompts, LONG)
        slopes.append(1000 * (long - short) / (LONG - SHORT))
    return {
        "context": cell.context,
        "batch": cell.batch,
        "prompts": cell.prompts,
        "shared_prompt": cell.prompts == 1,
        "ms_per_token": statistics.median(slopes),
        "ms_per_token_min": min(slopes),
        "ms_per_token_max": max(slopes),
        "first_token_s": statistics.median(first_token),
        "cached_tokens": min(cached),
    }


def frames_of(base_url: str) -> dict[str, int]:
    """What decode steps found in frames and loaded so far; empty where KV lies on the device."""
    state = (call(base_url, "/server_info").get("internal_states") or [{}])[0].get("sparse") or {}
    frames = state.get("frames")
    if not frames:
        return {}
    names = ("hits", "loads", "loaded_bytes", "stall_nanoseconds")
    return {"steps": state["decode_steps"]["sparse"]} | {name: frames[name] for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every measuring script has."""
    parser.add_argument("--contexts", type=int, nargs="*", default=[1000, 32000, 120000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--separate", nargs="*", default=[], type=Cell.separate,
                        metavar="CONTEXTxBATCH[/PROMPTS]",
                        help="batches with prompts of their own, or so many")  # fmt: skip
    parser.add_argument("--vocab", type=int, default=128000)
    parser.add_argument("--repeats", type=int, default=3)


def measure_server(base_url: str, label: str, args: argparse.Namespace, out: Path) -> None:
    """Measure every cell that the arguments name; the report is written after each of them."""
    cells = [Cell(c, b, 1) for c in args.contexts for b in args.batches] + args.separate
    info = call(base_url, "/server_info")
    state = (info.get("internal_states") or [{}])[0]
    report: dict[str, Any] = {
        "label": label,
        "sglang": info.get("version"),
        "attention_backend": info.get("attention_backend"),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
        "memory_usage": state.get("memory_usage"),
        "sparse": state.get("sparse"),
        "cells": [],
    }
    for cell in cells:
        before = frames_of(base_url)
        found = measure(base_url, cell, vocab=args.vocab, repeats=args.repeats)
        if before:
            after = frames_of(base_url)
            found["frames"] = {name: after[name] - before[name] for name in after}
        report["cells"].append(found)
        print(json.dumps(found), flush=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    sparse = call(base_url, "/server_info")["internal_states"][0].get("sparse") or {}
    report["decode_steps"] = sparse.get("decode_steps")
    out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure one running server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, default="http://127.0.0.1:30000")
    parser.add_argument("--label", required=True, help="name of the measured configuration")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    measure_server(args.base_url, args.label, args, args.out)


if __name__ == "__main__":
    main()
