# SPDX-License-Identifier: Apache-2.0
"""From what context on PSA's attention step is no slower than FlashInfer's dense one.

``python kernels/bench/psa_crossover.py --out psa-crossover.json [--quick]``

Keys are the heavy-tailed ones of ``psa.py``: 95 % of each query head's attention mass lies in 2, 5
or 10 % of the blocks. Every case is checked against the reference before it is timed. Between two
contexts the difference to dense is taken to be linear. A preset has one ``min_sparse_tokens`` for
all batch sizes, so the longest crossover of the turns in ``DECIDING`` counts, rounded up. That of
the largest turn, under which stops move by two thirds from one step to the next, stands beside it.
"""

import argparse
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cases import Shape
from mass_cases import CAP_UNITS, EPSILON, TURNS, UNIT, MassCase, timed
from psa import PARTS
from run import commit, dense_calls, rotation, versions

CONTEXTS = tuple(1024 * k for k in (8, 12, 16, 20, 24, 28, 32, 48))
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


def measure(context: int, batch: int, part: float, replays: int) -> dict[str, Any]:
    """Check and time one case: dense attention, and PSA's step at every turn."""
    torch.manual_seed(context + batch)
    shape = Shape(context=context, batch=batch, budget=min(CAP_UNITS * UNIT // 4, context))
    case = MassCase(shape, [part] * batch, min(rotation(shape), 8), 128)
    row: dict[str, Any] = {"context": context, "batch": batch, "part": part} | case.check()
    row["dense_us"] = timed(dense_calls(case), replays)
    row["turns"] = []
    for turn in TURNS:
        case.turn_by(turn)
        reached = torch.stack([layer.reached[1:] for layer in case.layers]).float()
        step = timed([partial(case.step, layer) for layer in case.layers], replays)
        row["turns"].append({"turn": turn, "step_us": step, "blocks": float(reached.mean())})
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
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    begin, replays = time.monotonic(), 5 if args.quick else 20
    contexts, batches = (CONTEXTS[::6], BATCHES[:1]) if args.quick else (CONTEXTS, BATCHES)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "commit": args.commit or commit(),
        "versions": versions(), "epsilon": EPSILON, "unit": UNIT, "cap_units": CAP_UNITS,
        "deciding_turns": DECIDING, "rows": rows,
    }  # fmt: skip
    for batch in batches:
        for context in contexts:
            for part in PARTS:
                row = measure(context, batch, part, replays)
                rows.append(row)
                steps = "  ".join(
                    f"{t['step_us']:.1f} ({row['dense_us'] / t['step_us']:.2f} x)"
                    for t in row["turns"]
                )
                print(
                    f"{context // 1024:>3}K x {batch:<2} 95 % in {part:<4.0%} "
                    f"dense {row['dense_us']:.1f} us, step at turns {TURNS}: {steps}",
                    flush=True,
                )
                report |= {"seconds": time.monotonic() - begin} | summary(rows)
                args.out.write_text(json.dumps(report, indent=1) + "\n")
                torch.cuda.empty_cache()
    for found in report["crossovers"]:
        print("crossover", json.dumps(found))
    print(
        f"min_sparse_tokens {report['min_sparse_tokens']} "
        f"(at the largest turn {report['at_the_largest_turn']})"
    )


if __name__ == "__main__":
    main()
