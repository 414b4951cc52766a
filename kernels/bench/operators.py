# SPDX-License-Identifier: Apache-2.0
"""Time operators alone, and sweep the launch heuristics of scoring and attention.

``python kernels/bench/operators.py --out results.json [--compile-only]``
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import ALWAYS, Case, Shape
from run import UNITS, rotation
from timing import copy_bandwidth, time_calls

from sglang_sparse_kernels import (
    BLOCK_UNITS,
    DecodePlan,
    Lists,
    Scores,
    find_block_max,
    make_topk_workspace,
    padded_blocks,
    select_topk,
)
from sglang_sparse_kernels.attend import kernel as attend_kernel
from sglang_sparse_kernels.attend import types as attend_types
from sglang_sparse_kernels.score import page_kernel, sketch_kernel

HEADS = 8
BUDGET = 2048
SCORES = ("normal", "clustered", "tied")
SKETCH_SWEEP = ((2048, 2), (1024, 4), (512, 8))
MINMAX_SWEEP = ((64, 3), (128, 2), (32, 6))
ATTEND_SWEEP = (
    (64, 3, 4, 3),
    (64, 2, 4, 4),
    (64, 4, 4, 3),
    (128, 2, 8, 2),
    (32, 3, 4, 5),
    (32, 3, 2, 6),
)


class Report:
    """Timed rows; with ``compile_only`` every call runs once and nothing is timed."""

    def __init__(self, compile_only: bool) -> None:
        self.compile_only = compile_only
        self.bandwidth = 0.0 if compile_only else copy_bandwidth()
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, calls: list[Callable[[], None]], moved: float, **facts: Any) -> None:
        """Time ``calls``, which each have to move ``moved`` bytes."""
        if self.compile_only:
            calls[0]()
            torch.cuda.synchronize()
            return
        times = time_calls(calls, replays=10)
        share = moved / self.bandwidth * 1e6 / times["us"]
        self.rows.append({"name": name} | facts | times | {"of_copy_bandwidth": share})
        print(f"{name:16} {facts} {times['us']:.2f} us, {share:.0%} of copy", flush=True)


def scores_of(kind: str, rows: int, units: int) -> torch.Tensor:
    """Scores [rows, HEADS, units]: independent, drifting along the context, or all equal."""
    shape = (rows, HEADS, units)
    if kind == "tied":
        return torch.zeros(shape, device="cuda")
    scores = torch.randn(shape, device="cuda")
    if kind == "clustered":
        scores = scores * 0.1 + torch.linspace(0, 4, units, device="cuda")
    return scores


def time_topk(report: Report, batch: int, units: int, kind: str) -> None:
    """select_topk alone, checked against its reference, and FlashInfer's top-k if it is there."""
    plan = DecodePlan.allocate(batch, 1, "cuda")
    plan.tail_start.fill_(units)
    plan.k_units.fill_(BUDGET)
    plan.reselect.fill_(1)
    plan.request_slots.copy_(torch.arange(batch))
    values = scores_of(kind, batch, units)
    blocks = torch.zeros((batch, HEADS, padded_blocks(units)), device="cuda")
    scores = Scores(values, blocks)
    find_block_max(scores, plan, unit=1, impl="triton")
    workspace = make_topk_workspace(batch, HEADS, units, BUDGET, "cuda")
    indices = torch.zeros((batch, HEADS, BUDGET), dtype=torch.int32, device="cuda")
    counts = torch.zeros((batch, HEADS), dtype=torch.int32, device="cuda")

    lists = Lists(indices, counts, plan.request_slots)

    def select(impl: str) -> None:
        select_topk(scores, plan, lists, always=ALWAYS, workspace=workspace, impl=impl)

    select("triton")
    got = indices.clone()
    select("torch")
    assert torch.equal(got, indices), f"select_topk is wrong: {batch} x {units}, {kind}"
    facts = {"rows": batch * HEADS, "units": units, "scores": kind}
    moved = batch * HEADS * (4 * units / BLOCK_UNITS + 4 * BUDGET * (BLOCK_UNITS + 1))
    report.add("select_topk", [partial(select, "triton")] * 8, moved, **facts)


def time_flashinfer_topk(report: Report, batch: int, units: int) -> None:
    """FlashInfer's top-k of whole rows, for comparison; it has no forced units and no lengths."""
    import flashinfer

    flat = scores_of("normal", batch, units).flatten(0, 1)
    facts = {"rows": batch * HEADS, "units": units, "scores": "normal"}
    calls = [lambda: flashinfer.top_k(flat, BUDGET)] * 8
    report.add("flashinfer.top_k", calls, flat.nbytes, **facts)


def sweep(report: Report, context: int, batch: int) -> None:
    """Scores and attention at one shape under different launch heuristics."""
    shape = Shape(context=context, batch=batch)
    rows = batch * HEADS
    for name, unit in UNITS.items():
        case = Case(shape, 2 if batch > 1 else rotation(shape), unit, torch.device("cuda"))
        units = -(-(context - 1) // unit)
        per_unit = 16 if unit == 1 else 2 * shape.dim * shape.dtype.itemsize
        moved = rows * units * (per_unit + 4 + 4 / BLOCK_UNITS)
        module = sketch_kernel if unit == 1 else page_kernel
        prefix = "SKETCH" if unit == 1 else "MINMAX"
        tile_name = "SKETCH_TILE_TOKENS" if unit == 1 else "MINMAX_TILE_UNITS"
        for tile, ctas in SKETCH_SWEEP if unit == 1 else MINMAX_SWEEP:
            setattr(module, tile_name, tile)
            setattr(module, f"{prefix}_CTAS_PER_SM", ctas)
            calls = [partial(case.score, layer) for layer in case.layers]
            facts = {"context": context, "batch": batch, "tile": tile, "ctas": ctas}
            report.add(f"{name} score", calls, moved, **facts)
        if unit > 1:
            continue
        case.plan.refresh.zero_()
        report.add("no refresh", [partial(case.score, layer) for layer in case.layers], moved)
        for tile, stages, warps, ctas in ATTEND_SWEEP:
            attend_kernel._tile = lambda _, shape=(tile, stages, warps): shape
            attend_types.CTAS_PER_SM = ctas
            case.make_workspace()
            calls = [partial(case.attend, layer) for layer in case.layers]
            facts = {"context": context, "batch": batch, "tile": tile, "stages": stages}
            facts |= {"warps": warps, "ctas": ctas}
            report.add("attend", calls, shape.selected_bytes, **facts)
        del case
        torch.cuda.empty_cache()


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--compile-only", action="store_true", help="fill the compile cache")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.compile_only)
    try:
        for units in (8192, 32_768, 131_072):
            for batch in (1, 16):
                for kind in SCORES:
                    time_topk(report, batch, units, kind)
        for context, batch in ((32_768, 1), (131_072, 16)):
            sweep(report, context, batch)
    finally:
        args.out.write_text(json.dumps(report.rows, indent=1) + "\n")
    if not args.compile_only:
        for units in (8192, 32_768, 131_072):
            for batch in (1, 16):
                time_flashinfer_topk(report, batch, units)
        args.out.write_text(json.dumps(report.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
