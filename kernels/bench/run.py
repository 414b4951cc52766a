# SPDX-License-Identifier: Apache-2.0
"""What ``bench.py`` measures of budgets of tokens, and what all benchmarks share."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from cases import CHANNELS, Case, LayerData, Shape
from timing import copy_bandwidth, launches, time_calls

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
        self,
        name: str,
        shape: Shape,
        calls: list[Callable[[], None]],
        must_move: float,
        dense_us: float | None = None,
    ) -> float:
        """Time ``calls``; ``must_move`` is the bytes that one of them has to move.

        With ``dense_us``, the time of dense attention over the same data, the row is a preset's
        step: it holds the speed over dense, and the kernels of one call.
        """
        times = time_calls(calls, self.replays)
        floor = must_move / self.bandwidth * 1e6
        row = {"name": name, "context": shape.context, "batch": shape.batch} | times
        row |= {"must_move_bytes": int(must_move), "of_copy_bandwidth": floor / times["us"]}
        told = ""
        if dense_us is not None:
            row |= {"speedup_over_dense": dense_us / times["us"], "launches": launches(calls)}
            told = f"  {dense_us / times['us']:.2f} x dense"
        self.rows.append(row)
        print(
            f"{name:28} {shape.context:>7} x {shape.batch:<3} {times['us']:9.2f} us "
            f"[{times['us_p10']:.2f}, {times['us_p90']:.2f}]  {floor / times['us']:6.1%} of copy"
            f"{told}",
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
        calls = [partial(case.score, layer) for layer in layers]
        bench.add(f"{name}: score, new channels", shape, calls, score_bytes)
        # As in 63 of 64 steps.
        case.plan.refresh.zero_()
    else:
        score_bytes += rows * units * 2 * shape.dim * shape.dtype.itemsize
    calls = [partial(case.score, layer) for layer in layers]
    bench.add(f"{name}: score", shape, calls, score_bytes)
    if unit == 1:
        bench_sketches(bench, shape)
    # Scores of one step are in the L2 cache when selection reads them, so they do not rotate.
    topk_bytes = rows * (4 * units / BLOCK_UNITS + case.capacity * 4 * (BLOCK_UNITS + 1))
    bench.add(f"{name}: select_topk", shape, [case.select] * 8, topk_bytes)
    calls = [partial(case.attend, layer) for layer in layers]
    bench.add(f"{name}: attend", shape, calls, shape.selected_bytes)
    calls = [partial(case.step, layer) for layer in layers]
    dense_us = None
    if dense:
        dense_us = bench.add("flashinfer dense", shape, dense_calls(case), shape.dense_bytes)
    moved = score_bytes + shape.selected_bytes
    bench.add(f"{name}: step", shape, calls, moved, dense_us=dense_us)
    if unit == 1:
        bench.add("plan_decode", shape, [partial(case.run_plan, "triton")] * 8, 0)


def bench_sketches(bench: Bench, shape: Shape) -> None:
    """Scores by the sketch where pages lie anywhere, and by sketches of other formats."""
    for title, other in {
        "scattered pages": replace(shape, scattered=True),
        "int4": replace(shape, sketch="int4"),
        "int8": replace(shape, sketch="int8"),
    }.items():
        case = Case(other, 2 if shape.batch > 1 else 8, 1, torch.device("cuda"))
        case.check()
        case.plan.refresh.zero_()
        row = CHANNELS * (0.5 if other.sketch == "int4" else 1) + 4 + 4 / BLOCK_UNITS
        row += 0 if other.sketch == "fp8" else 2  # the scale of a token
        moved = other.batch * other.heads * other.context * row
        calls = [partial(case.score, layer) for layer in case.layers]
        bench.add(f"sparcas: score, {title}", shape, calls, moved)
        del case, calls
        torch.cuda.empty_cache()


def bench_update(bench: Bench, *, layers: int, batch: int, new_tokens: int) -> None:
    """The plane update of all layers: one token a row (decode) or a chunk (prefill)."""
    context = max(1024, new_tokens)
    shape = Shape(context=context, batch=batch)
    for kind, sketch, minmax in (("sketch fp8", "fp8", False), ("page min/max", None, True)):
        pool = (shape.pages * shape.page_size, shape.heads, shape.dim)
        keys = [torch.randn(pool, device="cuda").to(shape.dtype) for _ in range(layers)]
        pointers = torch.tensor([k.data_ptr() for k in keys], dtype=torch.uint64, device="cuda")
        planes = PlaneBuffers.allocate(
            replace(shape.planes, num_layers=layers),
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
