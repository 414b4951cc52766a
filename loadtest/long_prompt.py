# SPDX-License-Identifier: Apache-2.0
"""First tokens of ever longer prompts, then decode steps behind one: does the time grow linearly?

    python loadtest/long_prompt.py --base-url URL --label cascade --out cascade.json \
        --lengths 128000 256000 512000 1000000 --decode 1000000x16

It works on any SGLang server over HTTP and needs no tokenizer (`/generate` with `input_ids`). Each
length is a prompt of its own, which no earlier one begins. The requests of a decode cell all have
one prompt, so a server that shares prefixes computes it once. Their step is timed while all of them
decode. The report is written after each cell. Of a server on this machine's only GPU it also says
how much memory is in use beside the weights.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client import server_url
from compare_latency import output_of
from decode_latency import call, generate

QUESTION = 64  # last tokens of a prompt, in which another question to the same text differs
WARM = 32_768  # tokens of a prompt that is not counted: it compiles what later ones run


@dataclass(frozen=True)
class Arrival:
    """A chunk of a streamed batch: when it came, whose it is, tokens of that row so far."""

    seconds: float
    row: int
    tokens: int


def prompt_of(length: int, seed: str, vocab: int) -> list[int]:
    """Random token ids."""
    source = random.Random(seed)
    return [source.randrange(10, vocab) for _ in range(length)]


def stream_batch(base_url: str, prompts: list[list[int]], tokens: int) -> list[Arrival]:
    """When the tokens of each row of a batch came, in seconds since it was sent."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params, "stream": True}
    request = urllib.request.Request(
        base_url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, found = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"the server said {chunk['error']}")
                counted = chunk["meta_info"]["completion_tokens"]
                arrived = time.perf_counter() - start
                found.append(Arrival(arrived, chunk.get("index", 0), counted))
    return found


def step_ms(arrivals: list[Arrival], rows: int) -> float:
    """Milliseconds a token, of the median row, while all rows decode.

    Raises:
        RuntimeError: some row ended before another one began.
    """
    of_row = [[a for a in arrivals if a.row == row] for row in range(rows)]
    if not all(of_row):
        raise RuntimeError(f"{sum(map(bool, of_row))} of {rows} rows were answered")
    begin = max(mine[0].seconds for mine in of_row)
    end = min(mine[-1].seconds for mine in of_row)
    times = []
    for mine in of_row:
        some = [a for a in mine if begin <= a.seconds <= end]
        if len(some) < 2 or some[0].tokens == some[-1].tokens:
            raise RuntimeError("rows hardly decode together: ask for more tokens (--tokens)")
        first, last = some[0], some[-1]
        times.append(1000 * (last.seconds - first.seconds) / (last.tokens - first.tokens))
    return statistics.median(times)


def spread(cells: list[dict[str, Any]], least: int) -> float | None:
    """By how much time a token differs between prompts of at least ``least`` tokens; 0.1 is 10 %.

    None for fewer than two lengths.
    """
    per_token = [
        cell["first_token_s"] / cell["length"] for cell in cells if cell["length"] >= least
    ]
    return max(per_token) / min(per_token) - 1 if len(per_token) > 1 else None


def memory(base_url: str) -> dict[str, Any]:
    """GiB in use: what the server says, all on this machine's first GPU, and that less weights."""
    state = (call(base_url, "/server_info").get("internal_states") or [{}])[0]
    said = state.get("memory_usage") or {}
    used = output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    found: dict[str, Any] = {"server": said}
    if used:
        found["used_gib"] = int(used.splitlines()[0]) / 1024
        if "weight" in said:
            found["beside_weights_gib"] = found["used_gib"] - said["weight"]
    return found


def measure_first_token(base_url: str, length: int, vocab: int, repeats: int) -> dict[str, Any]:
    """One length; the median of some prompts.

    Raises:
        RuntimeError: a prompt was not computed whole.
    """
    seconds = []
    for i in range(repeats):
        taken, (cached,) = generate(base_url, [prompt_of(length, f"{length}/{i}", vocab)], 1)
        if cached:
            raise RuntimeError(f"{cached} of {length} tokens were cached")
        seconds.append(taken)
    taken = statistics.median(seconds)
    return {
        "length": length, "first_token_s": taken, "all_s": seconds,
        "us_per_token": 1e6 * taken / length,
    }  # fmt: skip


def measure_decode(
    base_url: str, length: int, batch: int, *, vocab: int, tokens: int
) -> dict[str, Any]:
    """Decode steps of a batch behind one prompt, and the first token of another question to it."""
    prompt = prompt_of(length, f"decode/{length}", vocab)
    taken, _ = generate(base_url, [prompt], 1)
    other = [*prompt[:-QUESTION], *prompt_of(QUESTION, "question", vocab)]
    second, (cached,) = generate(base_url, [other], 1)
    arrivals = stream_batch(base_url, [prompt] * batch, tokens)
    return {
        "length": length, "batch": batch, "first_token_s": taken, "cached_tokens": cached,
        "second_question_s": second, "ms_per_token": step_ms(arrivals, batch), "tokens": tokens,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--base-url", type=server_url, default="http://127.0.0.1:30000")
    add("--label", required=True, help="name of the measured configuration")
    add("--out", type=Path, required=True)
    add("--lengths", type=int, nargs="*", default=[128_000, 256_000, 512_000, 1_000_000])
    add("--decode", nargs="*", default=[], metavar="LENGTHxBATCH")
    add("--tokens", type=int, default=256, help="that each request of a decode cell generates")
    add("--least", type=int, default=128_000, help="shortest prompt of the linear part")
    add("--repeats", type=int, default=1, help="prompts of each length")
    add("--vocab", type=int, default=128_000)
    add("--warm", type=int, default=WARM, help="tokens of an uncounted first prompt")
    return parser.parse_args()


def main() -> None:
    """Measure one running server."""
    args = parse()
    info = call(args.base_url, "/server_info")
    report: dict[str, Any] = {
        "label": args.label,
        "sglang": info.get("version"),
        "device": output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "attention_backend": info.get("attention_backend"),
        "sparse": (info.get("internal_states") or [{}])[0].get("sparse"),
        "cells": [],
        "decode": [],
    }
    generate(args.base_url, [prompt_of(args.warm, "warm", args.vocab)], 2)

    def add(kind: str, cell: dict[str, Any]) -> None:
        report[kind].append(cell)
        report["per_token_spread"] = spread(report["cells"], args.least)
        report["memory"] = memory(args.base_url)
        print(json.dumps(cell), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    for length in args.lengths:
        add("cells", measure_first_token(args.base_url, length, args.vocab, args.repeats))
    for cell in args.decode:
        length, batch = map(int, cell.split("x"))
        found = measure_decode(args.base_url, length, batch, vocab=args.vocab, tokens=args.tokens)
        add("decode", found)


if __name__ == "__main__":
    main()
