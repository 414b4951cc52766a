# SPDX-License-Identifier: Apache-2.0
"""From what context on an attention step of PSA's presets is no slower than FlashInfer's dense one.

``python kernels/bench/psa_crossover.py --out psa-crossover.json [--quick] [--presets psa]``

Keys are the heavy-tailed ones of ``psa.py``: 95 % of each query head's attention mass lies in 2, 5
or 10 % of the blocks of 32 tokens. Every case is checked against the reference before it is timed.
Between two contexts the difference to dense is taken to be linear. A preset has one
``min_sparse_tokens`` for all batch sizes, so the longest crossover of the turns in ``DECIDING``
counts, rounded up. That of the largest turn, under which stops move by two thirds from one step to
the next, stands beside it.
"""

import argparse
import json
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from cases import Shape
from mass_cases import PSA, PSA_SKETCH, TURNS, MassCase, Method, timed
from psa import PARTS
from run import commit, dense_calls, rotation, versions

PRESETS = {"psa": PSA, "psa_sketch": PSA_SKETCH}
CONTEXTS = tuple(1024 * k for k in (8, 12, 16, 20, 24, 28, 32, 48, 64, 96))
BATCHES = (1, 8, 16)
DECIDING = TURNS[:2]
STEP = 1024
Lost = dict[int, float]  # context: microseconds by which the sparse step is slower


def crossover(lost: Lost) -> float | None:
    """Context in tokens from which on the step is no slower than dense; None if it never is.

    The shortest that was measured, if it is no slower there and at all longer ones.
    """
    contexts = sorted(lost)
    if lost[contexts[-1]] > 0:
        return None
    found = float(contexts[0])
    for before, after in pairwise(contexts):
        if lost[before] > 0 >= lost[after]:
            share = lost[before] / (lost[before] - lost[after])
            found = before + (after - before) * share
    return found


def threshold(found: list[float | None]) -> int | None:
    """The longest crossover, rounded up to whole steps of 1,024; None if one is missing."""
    reached = [tokens for tokens in found if tokens is not None]
    if len(reached) < len(found):
        return None
    return int(-(-max(reached) // STEP) * STEP)


def measure(method: Method, context: int, batch: int, part: float, replays: int) -> dict[str, Any]:
    """Check and time one case: dense attention, and a preset's step at every turn."""
    torch.manual_seed(context + batch)
    shape = Shape(context=context, batch=batch, budget=min(method.cap // 4, context))
    case = MassCase(shape, [part] * batch, min(rotation(shape), 8), 128, method)
    row: dict[str, Any] = {"context": context, "batch": batch, "part": part} | case.check()
    row["rank_us"] = timed([partial(case.rank, layer) for layer in case.layers], replays)
    row["dense_us"] = timed(dense_calls(case), replays)
    row["turns"] = []
    for turn in TURNS:
        case.turn_by(turn)
        reached = torch.stack([layer.reached[1:] for layer in case.layers]).float()
        step = timed([partial(case.step, layer) for layer in case.layers], replays)
        tokens = float(reached.mean()) * method.unit
        row["turns"].append({"turn": turn, "step_us": step, "tokens": tokens})
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Crossovers by batch, part and turn, and the threshold that they call for."""
    lost: dict[tuple[int, float, float], Lost] = {}
    for row in rows:
        for found in row["turns"]:
            key = (row["batch"], row["part"], found["turn"])
            lost.setdefault(key, {})[row["context"]] = found["step_us"] - row["dense_us"]
    found = {key: crossover(each) for key, each in lost.items()}
    return {
        "crossovers": [
            {"batch": batch, "part": part, "turn": turn, "tokens": tokens}
            for (batch, part, turn), tokens in found.items()
        ],
        "min_sparse_tokens": threshold([t for key, t in found.items() if key[2] in DECIDING]),
        "at_the_largest_turn": threshold([t for key, t in found.items() if key[2] == TURNS[-1]]),
    }


def main() -> None:
    """Measure, write the report, and print a table and the threshold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--quick", action="store_true", help="two contexts of one request")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    begin, replays = time.monotonic(), 5 if args.quick else 20
    contexts, batches = (CONTEXTS[::6], BATCHES[:1]) if args.quick else (CONTEXTS, BATCHES)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "commit": args.commit or commit(),
        "versions": versions(), "deciding_turns": DECIDING, "presets": {},
    }  # fmt: skip
    for preset in args.presets:
        rows: list[dict[str, Any]] = []
        for batch, context, part in product(batches, contexts, PARTS):
            rows.append(measure(PRESETS[preset], context, batch, part, replays))
            print(f"{preset:10} {told(rows[-1])}", flush=True)
            found = asdict(PRESETS[preset]) | {"rows": rows} | summary(rows)
            report["presets"][preset] = found
            report["seconds"] = time.monotonic() - begin
            args.out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept
            torch.cuda.empty_cache()
    for preset, found in report["presets"].items():
        for each in found["crossovers"]:
            print(preset, "crossover", json.dumps(each))
        print(
            f"{preset}: min_sparse_tokens {found['min_sparse_tokens']} "
            f"(at the largest turn {found['at_the_largest_turn']})"
        )


def told(row: dict[str, Any]) -> str:
    """A case in a line: times, and how many times faster than dense."""
    steps = "  ".join(
        f"{t['step_us']:.1f} ({row['dense_us'] / t['step_us']:.2f} x, {t['tokens']:.0f} tokens)"
        for t in row["turns"]
    )
    return (
        f"{row['context'] // 1024:>3}K x {row['batch']:<2} 95 % in {row['part']:<4.0%} dense "
        f"{row['dense_us']:.1f} us, ranking {row['rank_us']:.1f}, step by turn: {steps}"
    )


if __name__ == "__main__":
    main()
