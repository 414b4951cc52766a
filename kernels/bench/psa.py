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
from dataclasses import dataclass, replace
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
from sglang_sparse_kernels.progressive import types as progressive_types

UNIT = 32
CAP_UNITS = 512
EPSILON = 0.95
PARTS = (0.02, 0.05, 0.10)
LONG, SHORT = 0.10, 0.01
REPEATS = 10
# (programs a multiprocessor, programs for each that is resident, microbatch)
SWEEP = ((2, 2, 128), (2, 1, 128), (2, 4, 128), (3, 2, 64))


@dataclass(frozen=True)
class MassLayer(LayerData):
    """One layer's data, its scores, and what is ranked and reached by them."""

    scores: torch.Tensor
    picked: torch.Tensor
    indices: torch.Tensor
    ranked: torch.Tensor
    reached: torch.Tensor


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
        units = -(-shape.context // UNIT)
        self.picked_counts = torch.zeros((rows, shape.heads), dtype=torch.int32, device="cuda")
        self.epsilons = torch.full((rows,), EPSILON, device="cuda")
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device="cuda")
        self.topk = make_topk_workspace(rows, shape.heads, units, CAP_UNITS, "cuda")
        heads = shape.heads * shape.group
        self.workspace = make_progressive_workspace(
            rows, heads, shape.heads, shape.dim, num_items(CAP_UNITS, UNIT, microbatch), "cuda"
        )
        self.fixed_workspace = make_workspace(rows, heads, shape.heads, shape.dim, "cuda")

    def _random_layer(self) -> MassLayer:
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
        units = -(-blocks // 16) * 16

        def lists(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        return MassLayer(
            q=q, k=k, v=v, planes=planes, out=torch.empty_like(q),
            scores=torch.zeros((s.batch, s.heads, units), device="cuda"),
            picked=lists(s.batch, s.heads, CAP_UNITS),
            indices=lists(s.batch + 1, s.heads, CAP_UNITS),
            ranked=lists(s.batch + 1, s.heads), reached=lists(s.batch + 1, s.heads),
        )  # fmt: skip

    def score(self, layer: MassLayer) -> None:
        """Score blocks by their cuboid-mean."""
        planes = layer.planes
        assert planes.page_mean_low is not None
        assert planes.page_mean_high is not None
        page_minmax_score(
            layer.q, planes.page_mean_low[0], planes.page_mean_high[0], self.plan, unit=UNIT,
            page_size=self.shape.page_size, reduce="max", out=layer.scores,
            block_max=self.topk.block_max, impl="triton",
        )  # fmt: skip

    def pick(self, layer: MassLayer) -> None:
        """Select as many blocks as may be ranked."""
        select_topk(
            layer.scores, self.own_plan, unit=UNIT, sink=SINK, recent=RECENT,
            out_indices=layer.picked, out_counts=self.picked_counts, workspace=self.topk,
            has_block_max=True, impl="triton",
        )  # fmt: skip

    def rank(self, layer: MassLayer, impl: str = "triton") -> None:
        """Rank what was picked, and clear the workspace."""
        rank_units(
            layer.scores, self.plan, layer.picked, unit=UNIT, sink=SINK, recent=RECENT,
            out_indices=layer.indices, out_counts=layer.ranked, workspace=self.workspace, impl=impl,
        )  # fmt: skip

    def attend(self, layer: MassLayer, impl: str = "triton") -> None:
        """Attend until the share is reached."""
        progressive_decode_attention(
            layer.q, layer.k, layer.v, self.plan, layer.indices, layer.ranked, layer.reached,
            unit=UNIT, page_size=self.shape.page_size, sink=SINK, recent=RECENT,
            microbatch=self.microbatch, epsilons=self.epsilons, share="min",
            sm_scale=self.shape.dim**-0.5, out=layer.out, counters=self.counters,
            workspace=self.workspace, impl=impl,
        )  # fmt: skip

    def rank_and_attend(self, layer: MassLayer) -> None:
        """What one layer runs after the scores are there and the blocks are picked."""
        self.rank(layer)
        self.attend(layer)

    def step(self, layer: MassLayer) -> None:
        """The whole attention step of a layer."""
        self.score(layer)
        self.pick(layer)
        self.rank(layer)
        self.attend(layer)

    def fixed(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Attention over the blocks that were reached, as a fixed budget: alone, and the step."""
        most = max(int(layer.reached[1:].max()) for layer in self.layers)
        # The score kernel's block maxima, and room for fewer blocks.
        topk = replace(self.topk, blocks=self.topk.blocks[..., :most].contiguous())

        def calls(layer: MassLayer) -> tuple[Callable[[], None], Callable[[], None]]:
            plan = replace(self.plan, k_units=layer.reached[1:].amax(1).contiguous())
            indices, counts = layer.indices[..., :most].contiguous(), layer.reached.clone()

            def attend() -> None:
                gathered_decode_attention(
                    layer.q, layer.k, layer.v, plan, indices, counts, unit=UNIT,
                    page_size=self.shape.page_size, sm_scale=self.shape.dim**-0.5, out=layer.out,
                    workspace=self.fixed_workspace, impl="triton",
                )  # fmt: skip

            def step() -> None:
                self.score(layer)
                select_topk(
                    layer.scores, plan, unit=UNIT, sink=SINK, recent=RECENT, out_indices=indices,
                    out_counts=counts, workspace=topk, has_block_max=True, impl="triton",
                )  # fmt: skip
                attend()

            return attend, step

        attends, steps = zip(*map(calls, self.layers), strict=True)
        return list(attends), list(steps)

    def check(self) -> dict[str, float]:
        """Errors against the reference, from poisoned buffers; raises AssertionError if wrong."""
        layer = self.layers[-1]
        first: tuple[torch.Tensor, torch.Tensor] | None = None
        for _ in range(REPEATS):
            layer.indices.fill_(-1)
            layer.reached.fill_(-1)
            layer.out.fill_(float("nan"))
            self.step(layer)
            got = layer.out.clone(), layer.reached[1:].clone()
            assert first is None or all(map(torch.equal, got, first)), "runs differ"
            first = got
        order = layer.indices[1:].clone()
        self.rank(layer, "torch")
        assert torch.equal(order, layer.indices[1:]), "rank_units"
        self.attend(layer, "torch")
        assert first is not None
        differ = (layer.reached[1:] - first[1]).abs()
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
    for layer in case.layers:
        case.step(layer)
    reached = torch.stack([layer.reached[1:] for layer in case.layers]).float()
    row["blocks"] = {
        "mean": float(reached.mean()), "least": float(reached.min()), "most": float(reached.max()),
        "of": -(-context // UNIT),
    }  # fmt: skip
    rank = timed([partial(case.rank, layer) for layer in case.layers], replays)
    both = timed([partial(case.rank_and_attend, layer) for layer in case.layers], replays)
    step = timed([partial(case.step, layer) for layer in case.layers], replays)
    fixed_attends, fixed_steps = case.fixed()
    fixed, fixed_whole = timed(fixed_attends, replays), timed(fixed_steps, replays)
    row["us"] = {
        "rank": rank, "attend": both - rank, "rank_and_attend": both, "step": step,
        "fixed_attend": fixed, "fixed_step": fixed_whole,
    }  # fmt: skip
    row["attend_over_fixed"] = (both - rank) / fixed
    row["rank_and_attend_over_fixed"] = both / fixed
    row["step_over_fixed"] = step / fixed_whole
    if dense:
        row["us"]["flashinfer_dense"] = timed(dense_calls(case), replays)
        row["dense_over_step"] = row["us"]["flashinfer_dense"] / step
    print(json.dumps(row), flush=True)
    return row


def sweep(replays: int) -> list[dict[str, Any]]:
    """Launch heuristics of the attention, at one request, at sixteen, and one long among short."""
    rows = []
    for context, parts in (
        (131_072, [0.02]),
        (131_072, [0.05] * 16),
        (32_768, [LONG] + [SHORT] * 15),
    ):
        for ctas, over, microbatch in SWEEP:
            progressive_types.CTAS_PER_SM, progressive_types.OVERSUBSCRIPTION = ctas, over
            name = f"{ctas} programs a multiprocessor, {over} times"
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
