# SPDX-License-Identifier: Apache-2.0
"""LServe's attention as it is served, beside FlashInfer's: check, then time.

``python kernels/bench/lserve.py --out results.json [--parts decode,prefill,chunks] [--quick]
[--prompts 16384]``

The preset ``llama-3.1-8b/lserve``: half of the KV heads see sinks and a window, the others select
units of 64 tokens by bounds of 16, anew every fourth step. Rows "half" are of layers in which half
of the heads stream, rows "preset" the mean of all layers of the preset. Layers and prompts run
through the programs that a server compiles, each request with KV of its own. The part "chunks" has
what the scheduler sends of a prompt at a time, behind prefixes of several lengths: from where on
are blocks faster than dense attention? It imports SGLang, for its KV pool. The report is written
after every shape.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lserve_cases
import lserve_prompts
import torch
from cases import Shape
from kascade import PrefillCase, Report, bench_prefill, milliseconds
from lserve_cases import ATTEND, CALLS, EVERY, SCORE, SELECT, DecodeCase
from lserve_prompts import PromptCase
from run import Bench, commit, dense_calls, rotation, versions
from timing import launches

DECODE = ((32_768, 1), (32_768, 16), (131_072, 1), (131_072, 16))
PREFILL = (32_768, 65_536, 131_072)
FRACTIONS = (0.1, 0.05)
# SGLang's chunk on a Hopper GPU, and where one begins.
CHUNK, PREFIXES = 8192, (0, 4096, 8192, 16_384, 24_576, 57_344, 122_880)


def check_all(parts: list[str]) -> list[dict[str, float]]:
    """Errors of every operator at small shapes of both kinds of heads.

    Raises:
        AssertionError: one is wrong.
    """
    found, model = [], lserve_cases.MODEL
    if "decode" in parts:
        context, batch = lserve_cases.CHECKED_DECODE
        found.append(DecodeCase(replace(model, context=context, batch=batch), 2).check())
    if "prefill" in parts:
        shape = replace(model, context=lserve_prompts.CHECKED_TOKENS, batch=1)
        found += [PromptCase(shape).check(), PrefillCase(1985).check()]
    if "chunks" in parts:
        tokens = lserve_prompts.CHECKED_TOKENS
        found.append(PromptCase(replace(model, context=tokens, batch=1), tokens // 3).check())
    return found


def bench_decode(bench: Bench, shape: Shape, failures: list[str]) -> dict[str, Any]:
    """Stages and steps of one shape, and their mean over the cadence beside dense attention."""
    torch.manual_seed(shape.context + shape.batch)
    # Bounds that are scored are fewer bytes than attention reads, which `rotation` goes by.
    layers = min(2 * rotation(shape), len(lserve_cases.streaming_heads()))
    case = DecodeCase(shape, layers)
    print(f"lserve {shape.context} x {shape.batch} is right: {case.check()}", flush=True)
    moved, add = case.bytes_moved(), partial(bench.add, shape=shape)
    whole = moved["score"] + moved["attend"]
    table: dict[str, Any] = {"context": shape.context, "batch": shape.batch}
    for program in (*case.preset, *case.half):
        case.run(program)  # scores and lists of every layer
    for name, stages in (("score", SCORE), ("select", SELECT), ("attend", ATTEND)):
        calls = case.calls(case.half, stages)
        add(f"lserve: {name}", calls=calls, must_move=moved[name])
    half, preset = case.calls(case.half), case.calls(case.preset)
    steps = {"half": half, "preset": preset}
    selecting = {
        name: add(f"lserve, {name}: selecting step", calls=calls, must_move=whole)
        for name, calls in steps.items()
    }
    bench.rows[-2]["launches"] = launches(half)
    case.step_to(1)
    for name, calls in steps.items():
        reuse = add(f"lserve, {name}: reuse step", calls=calls, must_move=moved["attend"])
        mean = (selecting[name] + (EVERY - 1) * reuse) / EVERY
        table[name] = {"selecting_us": selecting[name], "reuse_us": reuse, "mean_us": mean}
    bench.rows[-2]["launches"] = launches(half)
    case.step_to(0)
    try:
        dense = dense_calls(case)
        dense *= -(-CALLS // len(dense))
        table["dense_us"] = add("flashinfer dense", calls=dense, must_move=shape.dense_bytes)
    except Exception as error:  # the figures above are kept without it
        failures.append(f"flashinfer dense: {error!r}")
    for name in steps:
        row, dense_us = table[name], table.get("dense_us")
        row["of_copy_bandwidth"] = (whole + (EVERY - 1) * moved["attend"]) / EVERY
        row["of_copy_bandwidth"] /= bench.bandwidth * row["mean_us"] / 1e6
        row["speedup"] = dense_us / row["mean_us"] if dense_us else None
        print(f"lserve, {name}, {shape.context} x {shape.batch}: {row}", flush=True)
    return table


def bench_prompt(report: Report, tokens: int, failures: list[str]) -> dict[str, Any]:
    """Stages of the prefill of one prompt, beside dense attention and tiles of Kascade."""
    torch.manual_seed(tokens)
    case = PromptCase(replace(lserve_cases.MODEL, context=tokens, batch=1))
    add = partial(report.add, shape=case.shape)
    table: dict[str, Any] = {"tokens": tokens}
    for fraction in FRACTIONS:
        case.prompt(fraction=fraction)
        case.served()  # compiled, and bounds of all pages
        flops, name = case.flops(), f"block_bounds {fraction}"
        for stage in ("update", "mean", "score", "select", "attend"):
            us = milliseconds(getattr(case, stage), 5)
            add(f"{name}: {stage}", us=us, flops=flops.get(stage, 0))
        table[name] = {"us": add(f"{name}: whole", us=milliseconds(case.served, 5))}
        table[name]["launches"] = launches([case.served])
    try:
        bench_prefill(report, tokens, replays=3)
        kascade = report.tables.pop()
        table |= {"fa3_us": kascade["dense_us"], "tile_topk": {"us": kascade["anchor_us"]}}
    except Exception as error:  # the figures above are kept without it
        failures.append(f"flashinfer fa3, tile_topk: {error!r}")
    for name, row in table.items():
        if isinstance(row, dict):
            row["times_fa3"] = table["fa3_us"] / row["us"] if "fa3_us" in table else None
            print(f"{name} {tokens}: {row['us']:.0f} us, {row['times_fa3']} x fa3", flush=True)
    return table


def dense_chunk(case: PromptCase) -> Callable[[], Any]:
    """FlashInfer's causal attention of the case's tokens, over keys laid out as it likes best."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper as Wrapper

    s, device = case.shape, case.q.device
    wrapper = Wrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device), backend="fa3")
    new, all_of = (torch.tensor([0, n], dtype=torch.int32) for n in (case.new, s.context))
    wrapper.plan(
        new.to(device), all_of.to(device), s.heads * s.group, s.heads, s.dim, causal=True,
        q_data_type=case.q.dtype,
    )  # fmt: skip
    k, v = (torch.randn(s.context, s.heads, s.dim, device=device).to(s.dtype) for _ in range(2))
    return lambda: wrapper.run(case.q, k, v)


def bench_chunk(report: Report, prefix: int, failures: list[str]) -> dict[str, Any]:
    """One chunk behind ``prefix`` tokens: all of its tiles by blocks, and dense."""
    torch.manual_seed(prefix)
    case = PromptCase(replace(lserve_cases.MODEL, context=prefix + CHUNK, batch=1), prefix)
    case.prompt(fraction=FRACTIONS[0], min_tokens=1)
    case.update()
    case.served()  # compiled
    table: dict[str, Any] = {"prefix": prefix, "tokens": CHUNK, "times_fa3": None}
    add = partial(report.add, shape=case.shape)
    flops = case.flops()["attend"]
    table["us"] = add("block_bounds chunk", us=milliseconds(case.served, 5), flops=flops)
    try:
        dense = milliseconds(dense_chunk(case), 5)
        table["fa3_us"] = add("flashinfer fa3 chunk", us=dense)
        table["times_fa3"] = table["fa3_us"] / table["us"]
    except Exception as error:  # the figure above is kept without it
        failures.append(f"flashinfer fa3, chunk: {error!r}")
    print(f"chunk behind {prefix}: {table['times_fa3']} x fa3", flush=True)
    return table


def main() -> None:
    """Check, time, and write the report; a wrong kernel ends it before it is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--parts", default="decode,prefill,chunks", help="some of them")
    parser.add_argument("--quick", action="store_true", help="the smallest shape of each part")
    parser.add_argument("--prompts", type=int, nargs="+", default=PREFILL, metavar="TOKENS")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    parts, begin = args.parts.split(","), time.monotonic()
    bench = Bench(replays=5 if args.quick else 20)
    report, failures = Report(), list[str]()
    content: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "commit": args.commit or commit(),
        "versions": versions(),
        "copy_bytes_per_second": bench.bandwidth,
        "failures": failures,
    }

    def write(**facts: Any) -> None:
        rows = {"decode_rows": bench.rows, "prefill_rows": report.rows}
        content.update(rows, seconds=time.monotonic() - begin, **facts)
        args.out.write_text(json.dumps(content, indent=1) + "\n")

    torch.manual_seed(1)
    checks = check_all(parts)
    print("checked:", checks, flush=True)
    write(checks=checks)
    decode, prefill, chunks = list[Any](), list[Any](), list[Any]()
    last = 1 if args.quick else None
    for context, batch in DECODE[:last] if "decode" in parts else ():
        shape = replace(lserve_cases.MODEL, context=context, batch=batch)
        decode.append(bench_decode(bench, shape, failures))
        write(decode=decode)
        torch.cuda.empty_cache()
    for tokens in args.prompts[:last] if "prefill" in parts else ():
        prefill.append(bench_prompt(report, tokens, failures))
        write(prefill=prefill)
        torch.cuda.empty_cache()
    for prefix in PREFIXES[:last] if "chunks" in parts else ():
        chunks.append(bench_chunk(report, prefix, failures))
        write(chunks=chunks)
        torch.cuda.empty_cache()
    if failures:
        sys.exit("not measured: " + "; ".join(failures))


if __name__ == "__main__":
    main()
