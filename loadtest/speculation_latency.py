# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per output token with and without drafts, on text that repeats itself.

    python loadtest/speculation_latency.py --out loadtest/results/h100-speculation --accepted 3

Servers of one model are started in turn: dense, sparse, and both with drafts. Each prompt is one
passage over and over, so that n-grams find what followed. How many drafts are accepted follows
from the model and the text, and what dummy weights say is no text: it may repeat one token, and
every draft is accepted. So SGLang can pretend a number (`--accepted`, by its own
`SGLANG_SIMULATE_ACC_LEN`). The answers mean nothing in either case, while the time of a
verification and of its drafts is what it is. The report has what was accepted beside each time.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

from client import call
from compare_latency import HERE, METHODS, SPARSE, gpu, output_of, running_server, server_command

SHORT, LONG = 16, 144
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
NGRAMS, DRAFT_MODEL = "-ngrams", "-draft-model"
SERVERS = [name + how for how in ("", NGRAMS, DRAFT_MODEL) for name in ("dense", "sparse")]


def passages(context: int, batch: int, passage: int, vocab: int) -> list[list[int]]:
    """Prompts of `context` tokens, each of which repeats a passage of its own."""
    source = random.Random(f"{context}/{batch}/{passage}")
    prompts = []
    for _ in range(batch):
        once = [source.randrange(10, vocab) for _ in range(passage)]
        prompts.append((once * -(-context // passage))[:context])
    return prompts


def generate(base_url: str, prompts: list[list[int]], tokens: int) -> tuple[float, int]:
    """Seconds for one batch of greedy answers, and the verifications of all of them; 0 without.

    Raises:
        RuntimeError: an answer has another length than asked for.
    """
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begin = time.perf_counter()
    body = {"input_ids": prompts, "sampling_params": params}
    answers = [a["meta_info"] for a in call(base_url, "/generate", body, timeout=600)]
    seconds = time.perf_counter() - begin
    if any(answer["completion_tokens"] != tokens for answer in answers):
        raise RuntimeError("answers stopped early")
    return seconds, sum(answer.get("spec_verify_ct") or 0 for answer in answers)


def measure(base_url: str, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """One batch: the slope between short and long answers to cached prompts.

    Returns:
        Milliseconds per output token of a request, and its tokens a verification: 1 without drafts.
    """
    for prompt in prompts:
        generate(base_url, [prompt], 1)
    generate(base_url, prompts, LONG)
    slopes, accepted = [], []
    for _ in range(repeats):
        short, few = generate(base_url, prompts, SHORT)
        long, many = generate(base_url, prompts, LONG)
        slopes.append(1000 * (long - short) / (LONG - SHORT))
        accepted.append(len(prompts) * (LONG - SHORT) / (many - few) if many > few else 1.0)
    return {
        "ms_per_token": statistics.median(slopes),
        "ms_per_token_min": min(slopes),
        "ms_per_token_max": max(slopes),
        "tokens_per_verification": statistics.median(accepted),
    }


def configurations(args: argparse.Namespace) -> dict[str, list[str]]:
    """Flags of each server, by its name in the report."""
    dense = ["--attention-backend", "flashinfer", "--page-size", "64"]
    if args.device == "cpu":
        dense = ["--page-size", "64"]
    sparse = [*SPARSE, "--sparse-method", args.method]
    drafts = ["--speculative-num-draft-tokens", str(args.drafts)]
    chains = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]
    model = ["--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1"]
    model += ["--speculative-draft-model-path", str(args.draft_model)]
    model += ["--speculative-num-steps", str(args.drafts - 1)]
    return {
        name + how: [*attention, *flags]
        for how, flags in (("", []), (NGRAMS, [*chains, *drafts]), (DRAFT_MODEL, [*model, *drafts]))
        for name, attention in (("dense", dense), ("sparse", sparse))
    }


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Start each server in turn and measure every cell; the report is written after each."""
    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    most = max(batch for _, batch in cells)
    report: dict[str, Any] = {
        "device": gpu("name"),
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        **{name: getattr(args, name) for name in ("method", "drafts", "passage", "accepted")},
        "servers": {},
    }
    out = args.out / "speculation.json"
    flags = configurations(args)
    for name in args.servers:
        print(f"== {name}", flush=True)
        further = [*flags[name], *shlex.split(args.flags)]
        command = server_command(args.model, args.port, most, further)
        with running_server(command, args.port, args.out / f"{name}.log") as url:
            # The path of the repository on the measuring machine has no place in a report.
            words = [word.replace(f"{HERE.parent}{os.sep}", "") for word in command[1:]]
            server: dict[str, Any] = {"command": words, "cells": []}
            report["servers"][name] = server
            for context, batch in cells:
                prompts = passages(context, batch, args.passage, args.vocab)
                cell = {"context": context, "batch": batch} | measure(url, prompts, args.repeats)
                server["cells"].append(cell)
                print(json.dumps(cell), flush=True)
                out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def table(report: dict[str, Any]) -> str:
    """Markdown: milliseconds per token, tokens a verification, and times faster than sparse."""
    lines = [
        "| context, batch | server | ms per token | tokens a verification | faster than sparse |"
    ]
    lines += ["| --- | --- | ---: | ---: | ---: |"]
    for at, plain in enumerate(report["servers"]["sparse"]["cells"]):
        for name, server in report["servers"].items():
            cell = server["cells"][at]
            lines.append(
                f"| {cell['context']:,}, {cell['batch']} | {name} | {cell['ms_per_token']:.2f} "
                f"| {cell['tokens_per_verification']:.2f} "
                f"| {plain['ms_per_token'] / cell['ms_per_token']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, write `speculation.json`, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    add("--draft-model", type=Path, default=HERE / "models" / "llama-3.2-1b")
    add("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    add("--method", choices=METHODS, default="page_minmax")
    add("--drafts", type=int, default=4, help="tokens of a verification, the drafts and one more")
    add("--accepted", type=float, help="tokens of a verification to pretend")
    add("--cells", nargs="+", default=["32000x1", "32000x8"], metavar="CONTEXTxBATCH")
    add("--passage", type=int, default=512, help="tokens that are repeated")
    add("--vocab", type=int, default=128000)
    add("--repeats", type=int, default=3)
    add("--port", type=int, default=31000)
    add("--flags", default="", help="further flags of every server")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--commit", help="what is measured, where there is no git checkout")
    add("--out", type=Path, required=True, help="folder of the report and of the servers' logs")
    args = parser.parse_args()
    if "sparse" not in args.servers:
        parser.error("--servers: sparse is missing, which the others are compared with")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.accepted is not None:
        os.environ[SIMULATED] = str(args.accepted)
    print(table(measure_all(args)))


if __name__ == "__main__":
    main()
