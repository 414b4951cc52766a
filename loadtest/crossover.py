# SPDX-License-Identifier: Apache-2.0
"""Finds `min_sparse_tokens`: the context from which a sparse server is no slower than a dense one.

    python loadtest/compare_latency.py --out results --batches 1 16 \\
        --contexts 1000 4000 8000 16000 24000 32000 48000 64000 96000 120000
    python loadtest/crossover.py results

It reads the reports of `compare_latency.py`, and uses the contexts at which the sparse server was
sparse. Between two contexts it interpolates the difference linearly. A server has one
`min_sparse_tokens` for all batch sizes, so the longest crossover counts: with it, no context is
slower than dense.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

STEP = 1024
Times = dict[tuple[int, int], float]  # (context, batch): milliseconds per output token


def times_of(path: Path) -> Times:
    """Medians of the cells whose requests share one prompt, long enough to be sparse."""
    report = json.loads(path.read_text())
    min_tokens = (report["sparse"] or {"min_sparse_tokens": 0})["min_sparse_tokens"]
    return {
        (c["context"], c["batch"]): c["ms_per_token"]
        for c in report["cells"]
        if c["shared_prompt"] and c["context"] >= min_tokens
    }


def crossover(dense: Times, sparse: Times, batch: int) -> float | None:
    """Context in tokens from which sparse is at least as fast as dense; None if it never is.

    If sparse is as fast at every context that both measured, it is the shortest of them.
    """
    contexts = sorted(context for context, size in dense.keys() & sparse.keys() if size == batch)
    lost = [sparse[context, batch] - dense[context, batch] for context in contexts]
    if not contexts or lost[-1] > 0:
        return None
    found = float(contexts[0])
    for (c0, d0), (c1, d1) in pairwise(zip(contexts, lost, strict=True)):
        if d0 > 0 >= d1:
            found = c0 + (c1 - c0) * d0 / (d0 - d1)
    return found


def rounded_up(tokens: float) -> int:
    """The next multiple of :data:`STEP`."""
    return int(-(-tokens // STEP) * STEP)


def main() -> None:
    """Print a table with a line for each sparse configuration and a column for each batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="folder with dense.json and others")
    args = parser.parse_args()
    dense = times_of(args.results / "dense.json")
    batches = sorted({batch for _, batch in dense})
    heads = [f"batch {batch}" for batch in batches]
    print("| | " + " | ".join(heads) + " | `min_sparse_tokens` |")
    print("| --- |" + " ---: |" * (len(batches) + 1))
    for report in sorted(args.results.glob("*.json")):
        if report.stem == "dense":
            continue
        sparse = times_of(report)
        if not sparse:
            continue
        found = [crossover(dense, sparse, batch) for batch in batches]
        cells = ["never" if tokens is None else f"{tokens:,.0f}" for tokens in found]
        reached = [tokens for tokens in found if tokens is not None]
        if len(reached) == len(found):
            cells.append(f"{rounded_up(max(reached)):,}")
        else:
            cells.append("none")
        print(f"| {report.stem} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
