# SPDX-License-Identifier: Apache-2.0
"""Progressive attention beside attention over a fixed budget and FlashInfer's dense one.

``python kernels/bench/psa.py --out psa.json [--quick] [--sweep] [--only WORDS]``

Keys are heavy-tailed: 95 % of each query head's attention mass lies in a given part of the blocks.
Every case is checked against the reference, and for equal results in repeated runs whatever is
expected of a row, before it is timed. What is timed is two steps in turn, of queries that differ
as those of successive tokens do, by more and by less: each step expects what the other one took,
never its own. Then the same query again, so that every stop is where it was. With ``--guesses``
also a request's first step, by what is expected of it.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Shape
from mass_cases import PSA, TURNS, MassCase, MassLayer, spread, timed
from run import commit, dense_calls, rotation, versions
from timing import copy_bandwidth, launches

from sglang_sparse_kernels.progressive import kernel as progressive_kernel

PARTS = (0.02, 0.05, 0.10)
LONG, SHORT = 0.10, 0.01
# Microbatches that a request slot begins with (`sglang_sparse/choices/budget/mass.py`).
EXPECTED_AT_FIRST = 8
# Settings of the attention's module.
SWEEP: tuple[dict[str, int], ...] = (
    {"CTAS_PER_SM": 2, "REGISTERS": 255},
    {"SPARE": 1000},
    {"CHANNELS": 128},
)


def measure(
    context: int,
    parts: list[float],
    name: str,
    *,
    dense: bool,
    replays: int,
    turns: tuple[float, ...] = TURNS,
    variants: tuple[dict[str, int], ...] = (),
    microbatch: int = 128,
    guesses: bool = False,
) -> dict[str, Any]:
    """Check and time one case."""
    torch.manual_seed(context + len(parts))
    shape = Shape(context=context, batch=len(parts), budget=PSA.cap // 4)
    case = MassCase(shape, parts, min(rotation(shape), 8), microbatch)
    row: dict[str, Any] = {
        "case": name, "context": context, "batch": len(parts), "microbatch": microbatch,
    }  # fmt: skip
    row |= case.check()
    row["rank_us"] = timed([partial(case.rank, layer) for layer in case.layers], replays)
    if dense:
        row["flashinfer_dense_us"] = timed(dense_calls(case), replays)
    row["turns"] = [measure_turn(case, turn, replays, variants) for turn in turns]
    for found in row["turns"]:
        if dense:
            found["dense_over_step"] = row["flashinfer_dense_us"] / found["us"]["step"]
    if guesses:
        row["guesses"] = time_guesses(case, replays)
    print(json.dumps(row), flush=True)
    return row


def measure_turn(
    case: MassCase, turn: float, replays: int, variants: tuple[dict[str, int], ...]
) -> dict[str, Any]:
    """Time a case whose successive queries differ by ``turn``."""
    case.turn_by(turn)
    reached = torch.stack([layer.reached[1:] for layer in case.layers]).float()
    found: dict[str, Any] = {
        "turn": turn,
        "blocks": {
            "mean": float(reached.mean()), "least": float(reached.min()),
            "most": float(reached.max()), "of": -(-case.shape.context // PSA.unit),
        },
        "expected": case.surprises(),
    }  # fmt: skip
    attends = [partial(case.attend, layer) for layer in case.layers]
    found["fixed_us"], fixed_whole = case.time_fixed(replays)
    found["spread"] = {
        "attend": spread(attends, replays),
        "attend_same_query": spread(attends[: len(attends) // 2], replays),
    }  # fmt: skip
    found["us"] = {
        **{name: times["us"] for name, times in found["spread"].items()},
        "step": timed([partial(case.step, layer) for layer in case.layers], replays),
        "fixed_attend": min(found["fixed_us"].values()), "fixed_step": fixed_whole,
        "fixed_as_served": found["fixed_us"]["each head's own"],
    }  # fmt: skip
    us = found["us"]
    found["attend_over_fixed"] = us["attend"] / us["fixed_attend"]
    found["same_query_over_fixed"] = us["attend_same_query"] / us["fixed_attend"]
    found["attend_over_served"] = us["attend"] / us["fixed_as_served"]
    found["same_query_over_served"] = us["attend_same_query"] / us["fixed_as_served"]
    found["step_over_fixed"] = us["step"] / us["fixed_step"]
    found["launches"] = launches(attends)
    found["sweep"] = [sweep(case, variant, replays) for variant in variants]
    return found


def time_guesses(case: MassCase, replays: int) -> dict[str, Any]:
    """Microseconds of attention by what is expected of a row, and of putting that there.

    "right" is what the step takes, "none" what a request slot begins with, and "another's" what
    the next row takes; with one request, the next KV head.
    """
    case.turn_by(TURNS[-1])
    right = []
    for layer in case.layers:
        case.attend(layer)
        right.append(layer.expected.clone())
    # The first row of lists is nobody's.
    across = {"shifts": 1, "dims": 0 if case.shape.batch > 1 else 1}
    guessed = {
        "right": right,
        "none": [torch.full_like(taken, EXPECTED_AT_FIRST) for taken in right],
        "another's": [torch.cat([t[:1], t[1:].roll(**across)]) for t in right],
    }
    found: dict[str, Any] = {"taken_mean": float(torch.stack(right)[:, 1:].float().mean())}

    def step(layer: MassLayer, guess: torch.Tensor) -> None:
        layer.expected.copy_(guess)
        case.attend(layer)

    for name, guesses in guessed.items():
        pairs = list(zip(case.layers, guesses, strict=True))
        found[name] = timed([partial(step, *pair) for pair in pairs], replays)
    copies = [partial(layer.expected.copy_, g) for layer, g in zip(case.layers, right, strict=True)]
    found["copy"] = timed(copies, replays)
    return found


def sweep(case: MassCase, variant: dict[str, int], replays: int) -> dict[str, Any]:
    """Time the attention with other settings of its module."""
    settled = {name: getattr(progressive_kernel, name) for name in variant}
    try:
        for name, value in variant.items():
            setattr(progressive_kernel, name, value)
        calls = [partial(case.attend, layer) for layer in case.layers]
        found = {"expected": case.surprises(), "us": timed(calls, replays)}
        return variant | found | {"launches": launches(calls)}
    finally:
        for name, value in settled.items():
            setattr(progressive_kernel, name, value)


def main() -> None:
    """Run the benchmark and write the report; a wrong kernel ends it before it is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--quick", action="store_true", help="two small cases")
    parser.add_argument("--sweep", action="store_true", help="launch heuristics as well")
    parser.add_argument("--guesses", action="store_true", help="a request's first step as well")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    begin, replays = time.monotonic(), 5 if args.quick else 15
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "commit": args.commit or commit(),
        "versions": versions(),
        "copy_bytes_per_second": copy_bandwidth(), "epsilon": PSA.epsilon, "unit": PSA.unit,
        "cap_units": PSA.cap_units, "rows": [],
    }  # fmt: skip
    mixed = [LONG] + [SHORT] * 15
    if args.quick:
        cases = [(8_192, [0.05] * 2, "even"), (32_768, mixed, "one long")]
    else:
        cases = [(context, mixed, "one long among 15") for context in (32_768, 131_072)]
        cases += [
            (context, [part] * batch, f"{batch} even, 95 % in {part:.0%}")
            for context in (32_768, 131_072)
            for batch in (1, 16)
            for part in PARTS
        ]
    for context, parts, what in cases:
        name = f"{context // 1024}K, {what}"
        if args.only not in name:
            continue
        row = measure(
            context, parts, name, dense=not args.quick, replays=replays,
            variants=SWEEP if args.sweep else (), guesses=args.guesses,
        )  # fmt: skip
        report["rows"].append(row)
        report["seconds"] = time.monotonic() - begin
        args.out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
