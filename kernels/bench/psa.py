# SPDX-License-Identifier: Apache-2.0
"""Progressive attention beside attention over a fixed budget and FlashInfer's dense one.

``python kernels/bench/psa.py --out psa.json [--quick]``

Keys are heavy-tailed: 95 % of each query head's attention mass lies in a given part of the blocks.
Every case is checked against the reference, and for equal results in repeated runs, before it is
timed.
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
from cases import RECENT, SINK, LayerData, Shape
from run import commit, dense_calls, rotation, versions
from timing import copy_bandwidth, time_calls

from sglang_sparse_kernels import (
    COUNTERS,
    DecodePlan,
    PlaneBuffers,
    budget_row,
    gathered_decode_attention,
    make_progressive_workspace,
    make_topk_workspace,
    make_workspace,
    num_items,
    page_minmax_score,
    plan_decode,
    progressive_decode_attention,
    rank_units,
    select_topk,
    update_planes,
)
from sglang_sparse_kernels.progressive import kernel as progressive_kernel
from sglang_sparse_kernels.progressive import types as progressive_types

UNIT = 32
CAP_UNITS = 512
EPSILON = 0.95
PARTS = (0.02, 0.05, 0.10)
LONG, SHORT = 0.10, 0.01
REPEATS = 10
# (programs a multiprocessor, programs for each that is resident, warps, microbatch)
SWEEP = (
    (2, 2, 4, 128),
    (2, 1, 4, 128),
    (2, 4, 4, 128),
    (1, 2, 8, 128),
    (3, 2, 4, 64),
    (3, 1, 4, 64),
    (4, 2, 4, 32),
)


class MassCase:
    """A batch of random data; in row r, ``parts[r]`` of the blocks hold 95 % of the mass."""

    def __init__(self, shape: Shape, parts: list[float], layers: int, microbatch: int) -> None:
        self.shape, self.parts, self.microbatch = shape, parts, microbatch
        self.device = torch.device("cuda")
        rows, size = shape.batch, shape.page_size
        row_pages = -(-shape.context // size)
        pages = 1 + torch.randperm(rows * row_pages, device="cuda").view(rows, row_pages)
        slots = pages[..., None] * size + torch.arange(size, device="cuda")
        table = torch.zeros((rows + 1, row_pages * size), dtype=torch.int32, device="cuda")
        table[1:] = slots.flatten(1).int()
        self.plan = DecodePlan.allocate(rows, row_pages, "cuda")
        plan_decode(
            table,
            torch.arange(1, rows + 1, device="cuda"),
            torch.full((rows,), shape.context, dtype=torch.int64, device="cuda"),
            torch.zeros(rows + 1, dtype=torch.int32, device="cuda"),
            torch.tensor([budget_row(CAP_UNITS * UNIT, 0.0)] * (rows + 1), device="cuda").int(),
            page_size=size, unit=UNIT, capacity_units=CAP_UNITS, min_sparse_tokens=1,
            reselect_every=1, refresh_every=1,
            plan=self.plan, impl="triton",
        )  # fmt: skip
        own = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.own_plan = replace(self.plan, list_rows=own)
        self.slots = slots.flatten(1)
        self.layers = [self._random_layer() for _ in range(layers)]
        units, lists = -(-shape.context // UNIT), (rows + 1, shape.heads)
        self.scores = torch.zeros((rows, shape.heads, -(-units // 16) * 16), device="cuda")
        self.picked = torch.zeros((rows, shape.heads, CAP_UNITS), dtype=torch.int32, device="cuda")
        self.picked_counts = torch.zeros((rows, shape.heads), dtype=torch.int32, device="cuda")
        self.indices = torch.zeros((*lists, CAP_UNITS), dtype=torch.int32, device="cuda")
        self.ranked = torch.zeros(lists, dtype=torch.int32, device="cuda")
        self.reached = torch.zeros(lists, dtype=torch.int32, device="cuda")
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device="cuda")
        self.topk = make_topk_workspace(rows, shape.heads, units, CAP_UNITS, "cuda")
        heads = shape.heads * shape.group
        self.workspace = make_progressive_workspace(
            rows, heads, shape.heads, shape.dim, num_items(CAP_UNITS, UNIT, microbatch), "cuda"
        )
        self.fixed_workspace = make_workspace(rows, heads, shape.heads, shape.dim, "cuda")

    def _random_layer(self) -> LayerData:
        s = self.shape
        k = torch.zeros((s.pages * s.page_size, s.heads, s.dim), dtype=s.dtype, device="cuda")
        k.normal_(std=0.3)
        v = torch.empty_like(k).normal_()
        direction = torch.nn.functional.normalize(
            torch.randn((s.batch, s.heads, s.dim), device="cuda"), dim=-1
        )
        noise = torch.randn((s.batch, s.heads, s.group, s.dim), device="cuda") * 0.01
        q = (8 * (direction[:, :, None] + noise)).flatten(1, 2).to(s.dtype)
        blocks = -(-s.context // UNIT)
        for row, part in enumerate(self.parts):
            heavy = max(1, round(part * blocks))
            # A heavy block has so many times the mass of a light one.
            times = 19 * (blocks - heavy) / heavy
            logit = torch.zeros((blocks, s.heads), device="cuda")
            for head in range(s.heads):
                chosen = torch.randperm(blocks, device="cuda")[:heavy]
                spread = torch.randn(heavy, device="cuda") * 0.5
                logit[chosen, head] = torch.tensor(times).log() + spread - spread.exp().mean().log()
            amount = logit.repeat_interleave(UNIT, 0)[: s.context] * s.dim**0.5 / 8
            at = self.slots[row, : s.context]
            for head in range(s.heads):
                k[at, head] += (amount[:, head, None] * direction[row, head]).to(s.dtype)
        planes = PlaneBuffers.allocate(
            num_layers=1, num_pages=s.pages, page_size=s.page_size, num_heads=s.heads,
            head_dim=s.dim, kv_dtype=s.dtype, page_minmax=False, key_sketch=None, page_mean=True,
            logical_page=UNIT, device="cuda",
        )  # fmt: skip
        update_planes(
            [k], torch.tensor([k.data_ptr()], dtype=torch.uint64, device="cuda"), planes,
            self.plan.page_table, torch.zeros_like(self.plan.seq_lens), self.plan.update_start,
            page_size=s.page_size, max_new_tokens=s.context, impl="triton",
        )  # fmt: skip
        return LayerData(q=q, k=k, v=v, planes=planes, out=torch.empty_like(q))

    def score(self, layer: LayerData) -> None:
        """Score blocks by their cuboid-mean."""
        planes = layer.planes
        assert planes.page_mean_low is not None
        assert planes.page_mean_high is not None
        page_minmax_score(
            layer.q, planes.page_mean_low[0], planes.page_mean_high[0], self.plan, unit=UNIT,
            page_size=self.shape.page_size, reduce="max", out=self.scores,
            block_max=self.topk.block_max, impl="triton",
        )  # fmt: skip

    def pick(self) -> None:
        """Select as many blocks as may be ranked."""
        select_topk(
            self.scores, self.own_plan, unit=UNIT, sink=SINK, recent=RECENT,
            out_indices=self.picked, out_counts=self.picked_counts, workspace=self.topk,
            has_block_max=True, impl="triton",
        )  # fmt: skip

    def rank(self, impl: str = "triton") -> None:
        """Rank what was picked, and clear the workspace."""
        rank_units(
            self.scores, self.plan, self.picked, unit=UNIT, sink=SINK, recent=RECENT,
            out_indices=self.indices, out_counts=self.ranked, workspace=self.workspace, impl=impl,
        )  # fmt: skip

    def attend(self, layer: LayerData, impl: str = "triton") -> None:
        """Attend until the share is reached."""
        progressive_decode_attention(
            layer.q, layer.k, layer.v, self.plan, self.indices, self.ranked, self.reached,
            unit=UNIT, page_size=self.shape.page_size, sink=SINK, recent=RECENT,
            microbatch=self.microbatch, epsilon=EPSILON, share="min",
            sm_scale=self.shape.dim**-0.5, out=layer.out, counters=self.counters,
            workspace=self.workspace, impl=impl,
        )  # fmt: skip

    def rank_and_attend(self, layer: LayerData) -> None:
        """What one layer runs after the scores are there and the blocks are picked."""
        self.rank()
        self.attend(layer)

    def step(self, layer: LayerData) -> None:
        """The whole attention step of a layer."""
        self.score(layer)
        self.pick()
        self.rank()
        self.attend(layer)

    def fixed(self) -> tuple[Callable[[LayerData], None], Callable[[LayerData], None]]:
        """Attention over the blocks that were reached, as a fixed budget: alone, and the step."""
        most = int(self.reached[1:].max())
        plan = replace(self.plan, k_units=self.reached[1:].amax(1).contiguous())
        indices, counts = self.indices[..., :most].contiguous(), self.reached.clone()
        # The score kernel's block maxima, and room for fewer blocks.
        topk = replace(self.topk, blocks=self.topk.blocks[..., :most].contiguous())

        def attend(layer: LayerData) -> None:
            gathered_decode_attention(
                layer.q, layer.k, layer.v, plan, indices, counts, unit=UNIT,
                page_size=self.shape.page_size, sm_scale=self.shape.dim**-0.5, out=layer.out,
                workspace=self.fixed_workspace, impl="triton",
            )  # fmt: skip

        def step(layer: LayerData) -> None:
            self.score(layer)
            select_topk(
                self.scores, plan, unit=UNIT, sink=SINK, recent=RECENT, out_indices=indices,
                out_counts=counts, workspace=topk, has_block_max=True, impl="triton",
            )  # fmt: skip
            attend(layer)

        return attend, step

    def check(self) -> dict[str, float]:
        """Errors against the reference, from poisoned buffers; raises AssertionError if wrong."""
        layer = self.layers[-1]
        first: tuple[torch.Tensor, torch.Tensor] | None = None
        for _ in range(REPEATS):
            self.indices.fill_(-1)
            self.reached.fill_(-1)
            layer.out.fill_(float("nan"))
            self.step(layer)
            got = layer.out.clone(), self.reached[1:].clone()
            assert first is None or all(map(torch.equal, got, first)), "runs differ"
            first = got
        order = self.indices[1:].clone()
        self.rank("torch")
        assert torch.equal(order, self.indices[1:]), "rank_units"
        self.attend(layer, "torch")
        assert first is not None
        differ = (self.reached[1:] - first[1]).abs()
        # A share within rounding of epsilon may stop one look earlier or later.
        assert int(differ.max()) <= self.microbatch // UNIT, "stops"
        error = float((first[0].float() - layer.out.float()).norm() / layer.out.float().norm())
        assert error < 2e-2, f"attention: relative error {error}"
        return {"error": error, "other_stops": float((differ > 0).float().mean())}


def timed(calls: list[Callable[[], None]], replays: int) -> float:
    """Median microseconds of one call."""
    return time_calls(calls, replays)["us"]


def measure(
    context: int, parts: list[float], name: str, *, dense: bool, replays: int, microbatch: int = 128
) -> dict[str, Any]:
    """Check and time one case."""
    torch.manual_seed(context + len(parts))
    shape = Shape(context=context, batch=len(parts), budget=CAP_UNITS * UNIT // 4)
    layers = min(rotation(shape), 8)
    case = MassCase(shape, parts, layers, microbatch)
    row: dict[str, Any] = {
        "case": name, "context": context, "batch": len(parts), "microbatch": microbatch,
    }  # fmt: skip
    row |= case.check()
    reached = case.reached[1:].float()
    row["blocks"] = {
        "mean": float(reached.mean()), "least": float(reached.min()), "most": float(reached.max()),
        "of": -(-context // UNIT),
    }  # fmt: skip
    for layer in case.layers:
        case.step(layer)
    case.step(case.layers[0])
    rank = timed([case.rank] * 8, replays)
    both = timed([partial(case.rank_and_attend, layer) for layer in case.layers], replays)
    step = timed([partial(case.step, layer) for layer in case.layers], replays)
    case.step(case.layers[0])
    fixed_attend, fixed_step = case.fixed()
    fixed = timed([partial(fixed_attend, layer) for layer in case.layers], replays)
    fixed_whole = timed([partial(fixed_step, layer) for layer in case.layers], replays)
    row["us"] = {
        "rank": rank, "attend": both - rank, "rank_and_attend": both, "step": step,
        "fixed_attend": fixed, "fixed_step": fixed_whole,
    }  # fmt: skip
    row["attend_over_fixed"] = (both - rank) / fixed
    row["rank_and_attend_over_fixed"] = both / fixed
    row["step_over_fixed"] = step / fixed_whole
    if dense:
        row["us"]["flashinfer_dense"] = timed(dense_calls(case), replays)  # type: ignore[arg-type]
        row["dense_over_step"] = row["us"]["flashinfer_dense"] / step
    print(json.dumps(row), flush=True)
    return row


def sweep(replays: int) -> list[dict[str, Any]]:
    """Launch heuristics of the attention, at one request and at sixteen."""
    rows = []
    for context, batch in ((131_072, 1), (32_768, 16)):
        for ctas, over, warps, microbatch in SWEEP:
            progressive_types.CTAS_PER_SM, progressive_types.OVERSUBSCRIPTION = ctas, over
            progressive_kernel.WARPS = warps
            name = f"{ctas} programs a multiprocessor, {over} times, {warps} warps"
            parts = [0.05] * batch
            rows.append(
                measure(context, parts, name, dense=False, replays=replays, microbatch=microbatch)
            )
    return rows


def main() -> None:
    """Run the benchmark and write the report; a wrong kernel ends it before it is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--quick", action="store_true", help="two small cases")
    parser.add_argument("--sweep", action="store_true", help="launch heuristics as well")
    args = parser.parse_args()
    begin, replays = time.monotonic(), 5 if args.quick else 15
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "commit": commit(), "versions": versions(),
        "copy_bytes_per_second": copy_bandwidth(), "epsilon": EPSILON, "unit": UNIT,
        "cap_units": CAP_UNITS, "rows": [],
    }  # fmt: skip
    try:
        mixed = [LONG] + [SHORT] * 15
        if args.quick:
            report["rows"].append(measure(8_192, [0.05] * 2, "even", dense=False, replays=replays))
            report["rows"].append(measure(32_768, mixed, "one long", dense=False, replays=replays))
            return
        for context in (32_768, 131_072):
            report["rows"].append(measure(context, mixed, "one long", dense=True, replays=replays))
            for batch in (1, 16):
                for part in PARTS:
                    name = f"even, 95 % in {part:.0%}"
                    parts = [part] * batch
                    report["rows"].append(
                        measure(context, parts, name, dense=True, replays=replays)
                    )
                    torch.cuda.empty_cache()
        if args.sweep:
            report["sweep"] = sweep(replays)
    finally:
        report["seconds"] = time.monotonic() - begin
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
