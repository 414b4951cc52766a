# SPDX-License-Identifier: Apache-2.0
"""Check, then time every kernel and each preset's attention step beside FlashInfer's dense one.

``python kernels/bench/bench.py --out results.json [--quick]``

One process, random data that rotates through more than the L2 cache holds, medians of graph
replays. ``render.py`` writes the tables of docs/results.md from the report.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CHANNELS, LayerData, Shape
from kascade import DecodeCase
from mass_cases import PSA, MassCase
from psa import PARTS
from run import (
    UNITS,
    Bench,
    bench_step,
    bench_update,
    commit,
    dense_calls,
    rotation,
    versions,
)

from sglang_sparse_kernels import BLOCK_UNITS

PRESETS = (*UNITS, "kascade", "psa")
LAYERS = 32
ANCHORS = (0, 2, 8, 13, 14)


def bench_anchors(bench: Bench, shape: Shape) -> None:
    """A layer of Kascade's presets: the mean of 32, by exact scores and by the sketch.

    The first attends to everything and selects, the other anchors select and attend, the layers
    between attend to their lists by a head map. 10 % of the context is kept.
    """
    torch.manual_seed(shape.context + shape.batch)
    # Lists shrink to a tenth, so that more layers are needed to leave the cache.
    layers = min(rotation(shape), 4 if shape.batch > 1 else 16)
    case = DecodeCase(shape.context, shape.batch, layers, max_context=shape.context)
    shape = case.shape
    # The reference holds all logits, so it takes one request.
    checked = case if shape.batch == 1 else DecodeCase(20_001, 2)
    print(f"kascade {shape.context} x {shape.batch} is right: {checked.check_exact()}", flush=True)
    dense = dense_calls(case)
    dense_us = bench.add("flashinfer dense, kascade's data", shape, dense, shape.dense_bytes)
    units = shape.batch * shape.heads * shape.context
    written = units * (4 + 4 / BLOCK_UNITS)
    kinds = {
        "kascade": (case.score_exactly, shape.dense_bytes / 2 + written),
        "kascade_sketch": (case.score, units * CHANNELS + written),
    }
    for name, (score, score_bytes) in kinds.items():

        def layer_of(i: int, score: Any = score) -> None:
            data: LayerData = case.layers[i % layers]
            if i == 0:
                dense[0]()
            if i in ANCHORS:
                score(data)
                case.select()
                if i > 0:
                    case.attend(data)
            else:
                case.reuse(data)

        moved = shape.dense_bytes + len(ANCHORS) * score_bytes
        moved += (LAYERS - 1) * shape.selected_bytes
        calls = [partial(layer_of, i) for i in range(LAYERS)]
        bench.add(f"{name}: step", shape, calls, moved / LAYERS, dense_us=dense_us)


def bench_mass(bench: Bench, shape: Shape, part: float) -> None:
    """A layer of PSA's preset, where ``part`` of the blocks hold 95 % of the attention mass."""
    torch.manual_seed(shape.context + shape.batch)
    case = MassCase(shape, [part] * shape.batch, min(rotation(shape), 8), 128)
    name = f"psa, mass in {part:.0%}"
    print(f"{name} {shape.context} x {shape.batch} is right: {case.check()}", flush=True)
    dense_us = bench.add(f"flashinfer dense, {name}", shape, dense_calls(case), shape.dense_bytes)
    blocks = shape.batch * shape.heads * -(-shape.context // PSA.unit)
    # Both ends of each block's digest, and no fewer blocks than hold the mass.
    moved = blocks * 2 * shape.dim * shape.dtype.itemsize + part * shape.dense_bytes
    calls = [partial(case.step, layer) for layer in case.layers]
    bench.add(f"{name}: step", shape, calls, moved, dense_us=dense_us)


def main() -> None:
    """Run the benchmark and write the report; a wrong kernel ends it before it is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="report to write")
    parser.add_argument("--quick", action="store_true", help="one small shape, few replays")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    args = parser.parse_args()
    bench = Bench(replays=5 if args.quick else 20)
    print(f"device copy: {bench.bandwidth / 1e12:.2f} TB/s", flush=True)
    contexts, batches = ([32_768], [1]) if args.quick else ([32_768, 131_072], args.batches)
    begin = time.monotonic()
    try:
        for shape in [Shape(context=c, batch=b) for b in batches for c in contexts]:
            for name in [name for name in UNITS if name in args.presets]:
                bench_step(bench, name, shape, dense=True)
                torch.cuda.empty_cache()
            if "kascade" in args.presets:
                bench_anchors(bench, shape)
                torch.cuda.empty_cache()
            if "psa" in args.presets:
                for part in PARTS[:: len(PARTS) - 1]:
                    bench_mass(bench, shape, part)
                    torch.cuda.empty_cache()
        for batch in batches:
            bench_update(bench, layers=LAYERS, batch=batch, new_tokens=1)
        bench_update(bench, layers=LAYERS, batch=1, new_tokens=8192)
    finally:
        report = {
            "device": torch.cuda.get_device_name(),
            "commit": args.commit or commit(),
            "versions": versions(),
            "copy_bytes_per_second": bench.bandwidth,
            "seconds": time.monotonic() - begin,
            "rows": bench.rows,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
