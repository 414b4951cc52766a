# SPDX-License-Identifier: Apache-2.0
"""Kascade's attention beside FlashInfer's, as in Table 3 of its paper: check, then time.

``python kernels/bench/kascade.py --out results.json [--parts decode,prefill] [--quick]``

32 query heads, 8 KV heads, dimension 128, bf16, 10 % of the context; batch 64, 16 at 256K. The mean
time of a layer is 1/32 of the first anchor's (dense, and it selects), 4/32 of another anchor's
(scores, selects, attends) and 27/32 of a reuse layer's (attends by a head map).
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import ALWAYS, Case, LayerData, Shape
from run import commit, dense_calls, versions
from timing import copy_bandwidth, time_calls

from sglang_sparse_kernels import (
    Attend,
    ExactScore,
    KVView,
    Lists,
    TilePlan,
    decode_step,
    make_exact_workspace,
    make_scores,
    make_topk_workspace,
    plan_tiles,
    select_topk,
    tile_attention,
    tile_score,
    tile_tokens_of,
)

DECODE = ((8192, 64), (16_384, 64), (32_768, 64), (65_536, 64), (131_072, 64), (262_144, 16))
PREFILL = (32_768, 65_536, 131_072)
# Buffers are as wide for all shapes, so that kernels are compiled once.
MOST_DECODE = 262_144
FRACTION = 0.1
WEIGHTS = (1 / 32, 4 / 32, 27 / 32)


class Report:
    """Rows of the report, printed as they come."""

    def __init__(self) -> None:
        self.bandwidth = copy_bandwidth()
        self.rows: list[dict[str, Any]] = []
        self.tables: list[dict[str, Any]] = []

    def add(self, stage: str, shape: Shape, us: float, moved: float = 0, flops: float = 0) -> float:
        """One stage's time, beside the bytes or operations that it has to do."""
        row = {"stage": stage, "context": shape.context, "batch": shape.batch, "us": us}
        told = ""
        if moved:
            row |= {"must_move_bytes": int(moved), "bytes_per_second": moved / us * 1e6}
            row["of_copy_bandwidth"] = row["bytes_per_second"] / self.bandwidth
            told = f"{row['bytes_per_second'] / 1e12:6.2f} TB/s {row['of_copy_bandwidth']:6.1%}"
        if flops:
            row |= {"flops": flops, "flops_per_second": flops / us * 1e6}
            told = f"{row['flops_per_second'] / 1e12:6.0f} TFLOP/s"
        self.rows.append(row)
        print(f"{stage:28} {shape.context:>7} x {shape.batch:<3} {us:12.1f} us {told}", flush=True)
        return us

    def table(self, name: str, shape: Shape, dense: float, anchor0: float, anchor: float,
              reuse: float) -> None:  # fmt: skip
        """The weighted mean and what it gains."""
        mean = sum(w * t for w, t in zip(WEIGHTS, (anchor0, anchor, reuse), strict=True))
        row = {
            "name": name, "context": shape.context, "batch": shape.batch, "dense_us": dense,
            "anchor0_us": anchor0, "anchor_us": anchor, "reuse_us": reuse, "mean_us": mean,
            "speedup": dense / mean,
        }  # fmt: skip
        self.tables.append(row)
        print(f"{name} {shape.context} x {shape.batch}: {dense / mean:.2f} x dense", flush=True)


class DecodeCase(Case):
    """A decode batch whose lists hold a tenth of the context."""

    def __init__(
        self, context: int, batch: int, layers: int = 1, max_context: int = MOST_DECODE
    ) -> None:
        shape = Shape(
            context=context, batch=batch, budget=-(-context // 10), max_context=max_context
        )
        super().__init__(shape, layers, 1, torch.device("cuda"))
        width = self.scores.values.shape[2]
        self.exact = make_exact_workspace(
            batch, shape.heads * shape.group, shape.heads, width, self.device
        )
        self.head_map = torch.randperm(shape.heads, device=self.device).int()

    def score_exactly(self, layer: LayerData, impl: str = "triton") -> None:
        """Both passes of exact scoring."""
        self.run([ExactScore("group", self.scores, self.exact)], layer, impl)

    def reuse(self, layer: LayerData, impl: str = "triton") -> None:
        """Attend to the lists of other heads."""
        lists = replace(self.lists(self.indices, self.counts), head_map=self.head_map)
        decode_step([Attend(self.workspace)], self.context(layer, lists, impl))

    def check_exact(self) -> dict[str, float]:
        """Exact scores, their selection and mapped attention beside their references.

        Raises:
            AssertionError: if one is wrong.
        """
        layer = self.layers[0]
        tokens = self.shape.context - 1
        self.scores.values.fill_(float("nan"))
        self.score_exactly(layer)
        got = self.scores.values[..., :tokens].clone()
        self.select()
        lists = self.indices[1:].clone()
        self.select(impl="torch")
        assert torch.equal(self.indices[1:], lists), "select_topk"
        self.score_exactly(layer, impl="torch")
        error = float((got - self.scores.values[..., :tokens]).abs().max())
        assert error < 1e-3, f"exact scores: off by {error} in log 2"
        self.reuse(layer)
        out = layer.out.clone()
        self.reuse(layer, impl="torch")
        attend = float((out.float() - layer.out.float()).norm() / layer.out.float().norm())
        assert attend < 1e-2, f"mapped attention: relative error {attend}"
        return {"exact_score_log2": error, "mapped_attend": attend}


def microseconds(call: Callable[[], None], replays: int) -> float:
    """Median of a graph's replays."""
    return time_calls([call], replays)["us"]


def bench_decode(report: Report, context: int, batch: int, replays: int) -> None:
    """Stages of one decode shape, and the means of both kinds of anchors."""
    torch.manual_seed(context)
    case = DecodeCase(context, batch)
    shape, layer = case.shape, case.layers[0]
    heads = batch * shape.heads
    add = partial(report.add, shape=shape)
    attend_densely = dense_calls(case)[0]
    dense = microseconds(attend_densely, replays)
    k_bytes, scores = shape.dense_bytes / 2, heads * context * 4.5
    logits = 2 * heads * shape.group * context * 4
    exact = add("exact score", us=microseconds(partial(case.score_exactly, layer), replays),
                moved=k_bytes + logits + scores)  # fmt: skip
    select = add("select exact", us=microseconds(case.select, replays), moved=heads * context * 4)
    attend = add("attend", us=microseconds(partial(case.attend, layer), replays),
                 moved=shape.selected_bytes)  # fmt: skip
    reuse = add("attend mapped", us=microseconds(partial(case.reuse, layer), replays),
                moved=shape.selected_bytes)  # fmt: skip
    sketch = add("sketch score", us=microseconds(partial(case.score, layer), replays),
                 moved=heads * context * 16 + scores)  # fmt: skip
    again = add("select sketch", us=microseconds(case.select, replays), moved=heads * context * 4)
    # Dense is timed before and after all else, and the faster one counts.
    dense = add("flashinfer dense", us=min(dense, microseconds(attend_densely, replays)),
                moved=shape.dense_bytes)  # fmt: skip
    for name, chosen in (("kascade", exact + select), ("kascade_sketch", sketch + again)):
        report.table(name, shape, dense, dense + chosen, chosen + attend, reuse)


class PrefillCase:
    """One prompt of ``tokens`` tokens, none of them cached."""

    def __init__(self, tokens: int) -> None:
        self.shape = s = Shape(context=tokens, batch=1)
        device = torch.device("cuda")
        pages = -(-tokens // s.page_size)
        pool = ((pages + 1) * s.page_size, s.heads, s.dim)
        self.k, self.v = (torch.randn(pool, device=device).to(s.dtype) for _ in range(2))
        self.q = torch.randn((tokens, s.heads * s.group, s.dim), device=device).to(s.dtype)
        self.out = torch.empty_like(self.q)
        table = (torch.randperm(pages, device=device) + 1).int()[None]
        self.plan = plan_tiles(
            table, [0], [tokens], tile_tokens=tile_tokens_of(128, s.group, s.page_size),
            min_tokens=1, floor=128, fraction=FRACTION,
        )  # fmt: skip
        order = table[0].long()[:, None] * s.page_size + torch.arange(s.page_size, device=device)
        self.slots = order.flatten()[:tokens]
        tiles = self.plan.rows.num_rows
        width = PREFILL[-1]
        rows = max(1, min(tiles, (256 << 20) // (4 * s.heads * width)))
        self.indices = torch.zeros((tiles, s.heads, self.plan.max_units), dtype=torch.int32,
                                   device=device)  # fmt: skip
        self.counts = torch.zeros((tiles, s.heads), dtype=torch.int32, device=device)
        self.scores = make_scores(rows, s.heads, width, device)
        self.topk = make_topk_workspace(rows, s.heads, width, self.plan.max_units, device)

    def select(self, *, score: bool, select: bool, impl: str = "triton") -> None:
        """Score and select for every tile, as many at a time as scores fit."""
        rows, tiles = len(self.scores.values), self.plan.rows.num_rows
        for start in range(0, tiles, rows):
            part = self.plan.part(start, min(start + rows, tiles))
            scores = self.scores.rows(part.rows.num_rows)
            if score:
                tile_score(
                    self.q, self.kv(part), part, softmax=self.shape.softmax, pool="group",
                    out=scores, impl=impl,
                )  # fmt: skip
            if select:
                select_topk(
                    scores, part.rows, self.lists(part), always=ALWAYS, workspace=self.topk,
                    impl=impl,
                )  # fmt: skip

    def kv(self, tiles: TilePlan) -> KVView:
        """KV rows, as some tiles find them."""
        return KVView(self.k, self.v, tiles.rows.page_table, self.shape.page_size)

    def lists(self, tiles: TilePlan) -> Lists:
        """Lists, as some tiles find them."""
        return Lists(self.indices, self.counts, tiles.rows.request_slots)

    def attend(self, impl: str = "triton") -> None:
        """Attend to the lists."""
        tile_attention(
            self.q, self.kv(self.plan), self.plan, self.lists(self.plan),
            softmax=self.shape.softmax, out=self.out, impl=impl,
        )  # fmt: skip

    def dense(self) -> Callable[[], None]:
        """FlashInfer's causal prefill over the same keys, laid out as it likes best."""
        from flashinfer import single_prefill_with_kv_cache

        k, v = self.k[self.slots], self.v[self.slots]

        def call() -> None:
            single_prefill_with_kv_cache(self.q, k, v, causal=True, backend="fa3")

        return call

    def check(self) -> dict[str, float]:
        """Scores, lists and attention beside their references.

        Raises:
            AssertionError: if one is wrong.
        """
        self.scores.values.fill_(float("nan"))
        self.select(score=True, select=True)
        assert len(self.scores.values) >= self.plan.rows.num_rows, "the check takes one pass"
        got, lists = self.scores.values.clone(), self.indices.clone()
        valid = torch.arange(lists.shape[2], device="cuda") < self.counts[..., None]
        self.select(score=False, select=True, impl="torch")
        assert torch.equal(self.indices[valid], lists[valid]), "select_topk"
        self.select(score=True, select=False, impl="torch")
        valid = ~got.isnan()
        error = float((got[valid] - self.scores.values[valid]).abs().max())
        assert error < 1e-3, f"tile scores: off by {error} in log 2"
        self.attend()
        out = self.out.clone()
        self.attend(impl="torch")
        attend = float((out.float() - self.out.float()).norm() / self.out.float().norm())
        assert attend < 1e-2, f"tile attention: relative error {attend}"
        return {"tile_score_log2": error, "tile_attend": attend}


def milliseconds(call: Callable[[], None], replays: int) -> float:
    """Median of calls that are long enough to be launched one by one, in microseconds."""
    times = []
    for replay in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if replay:
            times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


def bench_prefill(report: Report, tokens: int, replays: int) -> None:
    """Stages of the prefill of one prompt."""
    torch.manual_seed(tokens)
    case = PrefillCase(tokens)
    shape = case.shape
    pairs = tokens * tokens / 2 * shape.heads * shape.group * shape.dim * 2  # of QK^T alone
    add = partial(report.add, shape=shape)
    dense = add("flashinfer fa3 prefill", us=milliseconds(case.dense(), replays), flops=2 * pairs)
    score = partial(case.select, score=True, select=False)
    select = partial(case.select, score=False, select=True)
    add("tile score", us=milliseconds(score, replays), flops=2 * pairs)
    both = partial(case.select, score=True, select=True)
    anchor = add("tile score and select", us=milliseconds(both, replays))
    # The scores in the buffer are those of the last pass; as many are searched as in all passes.
    # Alone it waits for the host to launch it, which scoring hides.
    add("tile select", us=milliseconds(select, replays))
    both()
    attended = add("tile attend", us=milliseconds(case.attend, replays), flops=2 * pairs * FRACTION)
    report.table("kascade prefill", shape, dense, dense + anchor, anchor + attended, attended)


def main() -> None:
    """Check, time, and write the report; a wrong kernel ends it before anything is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--parts", default="decode,prefill", help="decode, prefill or both")
    parser.add_argument("--quick", action="store_true", help="the smallest shape of each part")
    args = parser.parse_args()
    parts, begin = args.parts.split(","), time.monotonic()
    report = Report()
    checks: list[dict[str, float]] = []
    try:
        torch.manual_seed(1)
        if "decode" in parts:
            # One that top-k keeps in registers, and one that it streams.
            checks += [DecodeCase(*shape).check_exact() for shape in ((4097, 3), (70_001, 1))]
        if "prefill" in parts:
            checks += [PrefillCase(tokens).check() for tokens in (1500, 1985)]
        print("checked:", checks, flush=True)
        torch.cuda.empty_cache()
        for context, batch in DECODE[: 1 if args.quick else None] if "decode" in parts else ():
            bench_decode(report, context, batch, replays=10)
            torch.cuda.empty_cache()
        for tokens in PREFILL[: 1 if args.quick else None] if "prefill" in parts else ():
            bench_prefill(report, tokens, replays=3)
            torch.cuda.empty_cache()
    finally:
        content = {
            "device": torch.cuda.get_device_name(),
            "commit": commit(),
            "versions": versions(),
            "copy_bytes_per_second": report.bandwidth,
            "seconds": time.monotonic() - begin,
            "checks": checks,
            "rows": report.rows,
            "tables": report.tables,
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
