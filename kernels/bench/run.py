# SPDX-License-Identifier: Apache-2.0
"""Check, then time every kernel and the whole sparse attention step beside FlashInfer's dense one.

``python kernels/bench/run.py --out results.json [--quick]``
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from cases import CHANNELS, Case, LayerData, Shape
from timing import copy_bandwidth, time_calls

from sglang_sparse_kernels import BLOCK_UNITS, PlaneBuffers, update_planes

L2_BYTES = 64 * 2**20
MIN_ROTATION_BYTES = 4 * L2_BYTES
POOL_BYTES = 60 * 2**30
UNITS = {"sparcas": 1, "page_minmax": 16}


class Bench:
    """Runs cases and collects rows of the report."""

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.bandwidth = copy_bandwidth()
        self.rows: list[dict] = []

    def add(
        self, name: str, shape: Shape, calls: list[Callable[[], None]], must_move: float
    ) -> float:
        """Time ``calls``; ``must_move`` is the bytes that one of them has to move."""
        times = time_calls(calls, self.replays)
        floor = must_move / self.bandwidth * 1e6
        row = {"name": name, "context": shape.context, "batch": shape.batch} | times
        row |= {"must_move_bytes": int(must_move), "of_copy_bandwidth": floor / times["us"]}
        self.rows.append(row)
        print(
            f"{name:28} {shape.context:>7} x {shape.batch:<3} {times['us']:9.2f} us "
            f"[{times['us_p10']:.2f}, {times['us_p90']:.2f}]  {floor / times['us']:6.1%} of copy",
            flush=True,
        )
        return times["us"]


def rotation(shape: Shape) -> int:
    """Sets of data that together exceed the L2 cache, as long as they fit in memory."""
    wanted = -(-MIN_ROTATION_BYTES // shape.selected_bytes)
    return max(2, min(wanted, POOL_BYTES // (2 * shape.dense_bytes)))


def dense_calls(case: Case) -> list[Callable[[], None]]:
    """FlashInfer's paged decode over the same KV, its result checked against the selection-free
    reference of this package."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    s, plan = case.shape, case.plan
    pages = -(-s.context // s.page_size)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=case.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(s.batch + 1, dtype=torch.int32, device=case.device) * pages,
        plan.page_table[:, :pages].flatten().contiguous(),
        torch.full((s.batch,), (s.context - 1) % s.page_size + 1, dtype=torch.int32).cuda(),
        s.heads * s.group,
        s.heads,
        s.dim,
        s.page_size,
        q_data_type=s.dtype,
        kv_data_type=s.dtype,
    )

    def attend(layer: LayerData) -> None:
        paged = (-1, s.page_size, s.heads, s.dim)
        wrapper.run(layer.q, (layer.k.view(paged), layer.v.view(paged)), out=layer.out)

    return [partial(attend, layer) for layer in case.layers]


def bench_step(bench: Bench, name: str, shape: Shape, *, dense: bool) -> None:
    """One preset's step and its operators at one shape; dense attention on the same data."""
    torch.manual_seed(shape.context + shape.batch)
    unit = UNITS[name]
    case = Case(shape, rotation(shape), unit, torch.device("cuda"))
    print(f"{name} {shape.context} x {shape.batch} is right: {case.check()}", flush=True)
    layers, rows = case.layers, shape.batch * shape.heads
    units = -(-(shape.context - 1) // unit)
    score_bytes = rows * units * (4 + 4 / BLOCK_UNITS)
    if unit == 1:
        score_bytes += rows * units * CHANNELS * layers[0].planes.key_sketch.itemsize
        calls = [partial(case.choose, layer) for layer in layers]
        bench.add("select_channels", shape, calls, layers[0].q.nbytes)
    else:
        score_bytes += rows * units * 2 * shape.dim * shape.dtype.itemsize
    calls = [partial(case.score, layer) for layer in layers]
    bench.add(f"{name}: score", shape, calls, score_bytes)
    # Scores of one step are in the L2 cache when selection reads them, so they do not rotate.
    topk_bytes = rows * (4 * units / BLOCK_UNITS + case.capacity * 4 * (BLOCK_UNITS + 1))
    bench.add(f"{name}: select_topk", shape, [case.select] * 8, topk_bytes)
    calls = [partial(case.attend, layer) for layer in layers]
    bench.add(f"{name}: attend", shape, calls, shape.selected_bytes)
    calls = [partial(case.step, layer) for layer in layers]
    sparse_us = bench.add(f"{name}: step", shape, calls, score_bytes + shape.selected_bytes)
    if dense:
        dense_us = bench.add("flashinfer dense", shape, dense_calls(case), shape.dense_bytes)
        bench.rows[-2]["speedup_over_dense"] = dense_us / sparse_us
        print(f"{name} {shape.context} x {shape.batch}: {dense_us / sparse_us:.2f} x dense")
    if unit == 1:
        bench.add("plan_decode", shape, [partial(case.run_plan, "triton")] * 8, 0)


def bench_update(bench: Bench, *, layers: int, batch: int, new_tokens: int) -> None:
    """The plane update of all layers: one token a row (decode) or a chunk (prefill)."""
    context = max(1024, new_tokens)
    shape = Shape(context=context, batch=batch)
    for kind, sketch, minmax in (("sketch fp8", "fp8", False), ("page min/max", None, True)):
        pool = (shape.pages * shape.page_size, shape.heads, shape.dim)
        keys = [torch.randn(pool, device="cuda").to(shape.dtype) for _ in range(layers)]
        pointers = torch.tensor([k.data_ptr() for k in keys], dtype=torch.uint64, device="cuda")
        planes = PlaneBuffers.allocate(
            num_layers=layers,
            num_pages=shape.pages,
            page_size=shape.page_size,
            num_heads=shape.heads,
            head_dim=shape.dim,
            kv_dtype=shape.dtype,
            page_minmax=minmax,
            key_sketch=sketch,
            device="cuda",
        )
        pages = torch.randperm(shape.pages - 1, device="cuda").int() + 1
        table = pages.view(batch, -1)
        starts = [0] if new_tokens > 1 else range(15, context, 128)

        def update(
            start: torch.Tensor,
            end: torch.Tensor,
            keys: list[torch.Tensor] = keys,
            pointers: torch.Tensor = pointers,
            planes: PlaneBuffers = planes,
            table: torch.Tensor = table,
        ) -> None:
            update_planes(
                keys,
                pointers,
                planes,
                table,
                start,
                end,
                page_size=shape.page_size,
                max_new_tokens=new_tokens,
                impl="triton",
            )

        calls = []
        for first in starts:
            start = torch.full((batch,), first, dtype=torch.int32, device="cuda")
            calls.append(partial(update, start, start + new_tokens))
        row = shape.heads * shape.dim
        # Decode reads a whole logical page to recompute its bounds and writes both.
        read = new_tokens if new_tokens > 1 or sketch else 16
        written = new_tokens if sketch else 4 * -(-new_tokens // 16)
        moved = layers * batch * row * (read * 2 + written)
        mode = "decode" if new_tokens == 1 else "prefill"
        title = f"update_planes {mode} {kind} L{layers}"
        bench.add(title, Shape(context=new_tokens, batch=batch), calls, moved)


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in ("torch", "triton", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """The commit that was measured, or "unknown" outside of a git checkout."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Run the benchmark and write the report; a wrong kernel ends it before it is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--quick", action="store_true", help="one small shape, few replays")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--no-dense", action="store_true", help="run without FlashInfer")
    args = parser.parse_args()
    bench = Bench(replays=5 if args.quick else 20)
    print(f"device copy: {bench.bandwidth / 1e12:.2f} TB/s", flush=True)
    contexts, batches = ([32_768], [1]) if args.quick else ([32_768, 131_072], args.batches)
    begin = time.monotonic()
    try:
        for context in contexts:
            for batch in batches:
                for name in UNITS:
                    shape = Shape(context=context, batch=batch)
                    bench_step(bench, name, shape, dense=not args.no_dense)
                    torch.cuda.empty_cache()
        for batch in (1, 16):
            bench_update(bench, layers=32, batch=batch, new_tokens=1)
        bench_update(bench, layers=32, batch=1, new_tokens=8192)
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
