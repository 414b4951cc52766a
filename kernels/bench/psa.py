# SPDX-License-Identifier: Apache-2.0
"""Progressive attention beside attention over a fixed budget and FlashInfer's dense one.

``python kernels/bench/psa.py --out psa.json [--quick] [--sweep] [--only WORDS]``

Keys are heavy-tailed: 95 % of each query head's attention mass lies in a given part of the blocks.
Every case is checked against the reference, and for equal results in repeated runs whatever is
expected of a row, before it is timed. What is timed is two steps in turn, of queries that differ
as those of successive tokens do, by more and by less: each step expects what the other one took,
never its own. Then the same query again, so that every stop is where it was.
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
from timing import copy_bandwidth, launches, time_calls

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
from sglang_sparse_kernels.attend import kernel as attend_kernel
from sglang_sparse_kernels.progressive import kernel as progressive_kernel
from sglang_sparse_kernels.progressive.reference import forced_units, prologue_units

UNIT = 32
CAP_UNITS = 512
EPSILON = 0.95
PARTS = (0.02, 0.05, 0.10)
LONG, SHORT = 0.10, 0.01
REPEATS = 10
# Calls that a timed graph holds at least, so that to start it, some 10 us, is no part of a call.
CALLS = 32
# How far a step's query is turned from what two successive ones have in common, so that stops move
# by about a tenth, a third, and two thirds: notes/progressive.md says why.
TURNS = (0.015, 0.05, 0.229)
# Splits of the fixed budget's kernel that are tried beside its own, for 16 requests and for one.
SPLITS = {16: (4, 6, 8, 10), 1: (16, 48, 64)}
# Settings of the attention's module.
SWEEP: tuple[dict[str, int], ...] = (
    {"CTAS_PER_SM": 2, "REGISTERS": 255},
    {"SPARE": 1000},
    {"CHANNELS": 128},
)


@dataclass(frozen=True)
class MassLayer(LayerData):
    """One step of one layer: its data, its scores, and what is ranked and reached by them."""

    scores: torch.Tensor
    picked: torch.Tensor
    indices: torch.Tensor
    ranked: torch.Tensor
    reached: torch.Tensor
    expected: torch.Tensor
    direction: torch.Tensor


class MassCase:
    """A batch of random data; in row r, ``parts[r]`` of the blocks hold 95 % of the mass."""

    def __init__(
        self,
        shape: Shape,
        parts: list[float],
        layers: int,
        microbatch: int,
    ) -> None:
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
        pairs = [self._random_layer() for _ in range(layers)]
        self.layers = [pair[step] for step in (0, 1) for pair in pairs]
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
        self.turn_by(TURNS[1])

    def turn_by(self, turn: float) -> None:
        """Draw every step's query anew, and take each step twice.

        A query lies along the heavy keys' direction, and is turned elsewhere by ``turn``.
        """
        s = self.shape
        for layer in self.layers:
            there = torch.randn((s.batch, s.heads, s.group, s.dim), device="cuda")
            there = torch.nn.functional.normalize(there, dim=-1) * turn
            q = 8 * (layer.direction[:, :, None] + there)
            layer.q.copy_(q.flatten(1, 2).to(s.dtype))
        for layer in 2 * self.layers:
            self.step(layer)

    def _random_layer(self) -> tuple[MassLayer, MassLayer]:
        """Two steps of a layer."""
        s = self.shape
        k = torch.zeros((s.pages * s.page_size, s.heads, s.dim), dtype=s.dtype, device="cuda")
        k.normal_(std=0.3)
        v = torch.empty_like(k).normal_()
        direction = torch.nn.functional.normalize(
            torch.randn((s.batch, s.heads, s.dim), device="cuda"), dim=-1
        )
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

        expected = lists(s.batch, s.heads)

        def step() -> MassLayer:
            q = torch.zeros((s.batch, s.heads * s.group, s.dim), dtype=s.dtype, device="cuda")
            return MassLayer(
                q=q, k=k, v=v, planes=planes, out=torch.empty_like(q),
                scores=torch.zeros((s.batch, s.heads, units), device="cuda"),
                picked=lists(s.batch, s.heads, CAP_UNITS),
                indices=lists(s.batch + 1, s.heads, CAP_UNITS),
                ranked=lists(s.batch + 1, s.heads), reached=lists(s.batch + 1, s.heads),
                expected=expected, direction=direction,
            )  # fmt: skip

        return step(), step()

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
        """Rank what was picked."""
        rank_units(
            layer.scores, self.plan, layer.picked, unit=UNIT, sink=SINK, recent=RECENT,
            out_indices=layer.indices, out_counts=layer.ranked, impl=impl,
        )  # fmt: skip

    def attend(self, layer: MassLayer, impl: str = "triton") -> None:
        """Attend until the share is reached."""
        progressive_decode_attention(
            layer.q, layer.k, layer.v, self.plan, layer.indices, layer.ranked, layer.reached,
            unit=UNIT, page_size=self.shape.page_size, sink=SINK, recent=RECENT,
            microbatch=self.microbatch, epsilons=self.epsilons, share="min",
            sm_scale=self.shape.dim**-0.5, out=layer.out, counters=self.counters,
            expected=layer.expected, expected_rows=self.own_plan.list_rows,
            workspace=self.workspace, impl=impl,
        )  # fmt: skip

    def step(self, layer: MassLayer) -> None:
        """The whole attention step of a layer."""
        self.score(layer)
        self.pick(layer)
        self.rank(layer)
        self.attend(layer)

    def fixed(self, *, even: bool) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Attention over as many blocks as were reached, as a fixed budget: alone, and the step.

        Each KV head attends to as many as it reached, or, ``even``, to as many as its row's do in
        the mean.
        """
        most = max(int(layer.reached[1:].max()) for layer in self.layers)
        # The score kernel's block maxima, and room for fewer blocks.
        topk = replace(self.topk, blocks=self.topk.blocks[..., :most].contiguous())

        def calls(layer: MassLayer) -> tuple[Callable[[], None], Callable[[], None]]:
            # The step selects into these: never into what the progressive one goes over.
            indices, counts = layer.indices[..., :most].clone(), layer.reached.clone()
            if even:
                mean = counts[1:].float().mean(1, keepdim=True).round().int()
                counts[1:] = mean.expand(-1, counts.shape[1])
            plan = replace(self.plan, k_units=counts[1:].amax(1).contiguous())

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

    def time_fixed(self, replays: int) -> tuple[dict[str, float], float]:
        """Microseconds of attention over a fixed budget by how it is split, and of its step.

        The step is that of a served budget: it splits by its own rule, and each KV head selects as
        many as its row's do in the mean.
        """
        times = {}
        for even in (False, True):
            attends, steps = self.fixed(even=even)
            name = "mean of the row" if even else "each head's own"
            times[name] = timed(attends, replays)
            own = attend_kernel.num_splits
            for splits in SPLITS.get(self.shape.batch, ()):
                try:
                    attend_kernel.num_splits = lambda *_, splits=splits: splits
                    times[f"{name}, {splits} splits"] = timed(attends, replays)
                finally:
                    attend_kernel.num_splits = own
        # Last, since it overwrites the lists.
        return times, timed(steps, replays)

    def check(self) -> dict[str, float]:
        """Errors against the reference, from poisoned buffers; raises AssertionError if wrong."""
        layer = self.layers[-1]
        first: tuple[torch.Tensor, torch.Tensor] | None = None
        for repeat in range(REPEATS):
            if repeat:  # what is expected must change nothing
                layer.expected.random_(-2, (1 + CAP_UNITS * UNIT // self.microbatch) // repeat)
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

    def surprises(self) -> dict[str, float]:
        """How far what was expected lies from what was taken, in microbatches, over two steps."""
        tail = self.plan.seq_lens - self.plan.tail_start
        forced = forced_units(int(self.plan.tail_start[0]), UNIT, SINK, RECENT)
        before = prologue_units(forced, self.microbatch // UNIT) * UNIT
        parts = -(-(tail + before) // min(progressive_kernel.TILE, self.microbatch))
        over, moved, taken, extended = [], [], [], []
        for _ in range(2):
            for layer in self.layers:
                before = layer.expected.clone()
                self.attend(layer)
                over.append(self.workspace.there - parts[:, None] - layer.expected)
                moved.append((layer.expected - before).abs())
                taken.append(layer.expected.clone())
                extended.append(self.workspace.until - self.workspace.there)
        over, moved = torch.cat(over[len(over) // 2 :]), torch.cat(moved[len(moved) // 2 :])
        mean_taken = torch.stack(taken).float().mean()
        return {
            "moved_by": float(moved.float().mean() / mean_taken), "most_moved": float(moved.max()),
            "fell_short": float((over < 0).float().mean()),
            "most_missing": float(-over.min().clamp(max=0)),
            "mean_too_many": float(over.clamp(min=0).float().mean()),
            "mean_missing": float((-over).clamp(min=0).float().mean()),
            "mean_attended_to_later": float(torch.stack(extended).float().mean()),
            "mean_taken": float(mean_taken),
        }  # fmt: skip


def timed(calls: list[Callable[[], None]], replays: int) -> float:
    """Median microseconds of one call."""
    return spread(calls, replays)["us"]


def spread(calls: list[Callable[[], None]], replays: int) -> dict[str, float]:
    """Microseconds of one call, and the tenth and ninetieth percentiles."""
    return time_calls(calls * -(-CALLS // len(calls)), replays)


def measure(
    context: int,
    parts: list[float],
    name: str,
    *,
    dense: bool,
    replays: int,
    turns: tuple[float, ...] = TURNS,
    variants: tuple[dict[str, int], ...] = (),
    microbatch: int = 128,
) -> dict[str, Any]:
    """Check and time one case."""
    torch.manual_seed(context + len(parts))
    shape = Shape(context=context, batch=len(parts), budget=CAP_UNITS * UNIT // 4)
    case = MassCase(shape, parts, min(rotation(shape), 8), microbatch)
    row: dict[str, Any] = {
        "case": name, "context": context, "batch": len(parts), "microbatch": microbatch,
    }  # fmt: skip
    row |= case.check()
    row["rank_us"] = timed([partial(case.rank, layer) for layer in case.layers], replays)
    if dense:
        row["flashinfer_dense_us"] = timed(dense_calls(case), replays)
    row["turns"] = [measure_turn(case, turn, replays, variants) for turn in turns]
    for found in row["turns"]:
        if dense:
            found["dense_over_step"] = row["flashinfer_dense_us"] / found["us"]["step"]
    print(json.dumps(row), flush=True)
    return row


def measure_turn(
    case: MassCase, turn: float, replays: int, variants: tuple[dict[str, int], ...]
) -> dict[str, Any]:
    """Time a case whose successive queries differ by ``turn``."""
    case.turn_by(turn)
    reached = torch.stack([layer.reached[1:] for layer in case.layers]).float()
    found: dict[str, Any] = {
        "turn": turn,
        "blocks": {
            "mean": float(reached.mean()), "least": float(reached.min()),
            "most": float(reached.max()), "of": -(-case.shape.context // UNIT),
        },
        "expected": case.surprises(),
    }  # fmt: skip
    attends = [partial(case.attend, layer) for layer in case.layers]
    found["fixed_us"], fixed_whole = case.time_fixed(replays)
    found["spread"] = {
        "attend": spread(attends, replays),
        "attend_same_query": spread(attends[: len(attends) // 2], replays),
    }  # fmt: skip
    found["us"] = {
        **{name: times["us"] for name, times in found["spread"].items()},
        "step": timed([partial(case.step, layer) for layer in case.layers], replays),
        "fixed_attend": min(found["fixed_us"].values()), "fixed_step": fixed_whole,
        "fixed_as_served": found["fixed_us"]["each head's own"],
    }  # fmt: skip
    us = found["us"]
    found["attend_over_fixed"] = us["attend"] / us["fixed_attend"]
    found["same_query_over_fixed"] = us["attend_same_query"] / us["fixed_attend"]
    found["attend_over_served"] = us["attend"] / us["fixed_as_served"]
    found["same_query_over_served"] = us["attend_same_query"] / us["fixed_as_served"]
    found["step_over_fixed"] = us["step"] / us["fixed_step"]
    found["launches"] = launches(attends)
    found["sweep"] = [sweep(case, variant, replays) for variant in variants]
    return found


def sweep(case: MassCase, variant: dict[str, int], replays: int) -> dict[str, Any]:
    """Time the attention with other settings of its module."""
    settled = {name: getattr(progressive_kernel, name) for name in variant}
    try:
        for name, value in variant.items():
            setattr(progressive_kernel, name, value)
        calls = [partial(case.attend, layer) for layer in case.layers]
        found = {"expected": case.surprises(), "us": timed(calls, replays)}
        return variant | found | {"launches": launches(calls)}
    finally:
        for name, value in settled.items():
            setattr(progressive_kernel, name, value)


def main() -> None:
    """Run the benchmark and write the report; a wrong kernel ends it before it is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON report to write")
    parser.add_argument("--quick", action="store_true", help="two small cases")
    parser.add_argument("--sweep", action="store_true", help="launch heuristics as well")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    args = parser.parse_args()
    begin, replays = time.monotonic(), 5 if args.quick else 15
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "commit": args.commit or commit(),
        "versions": versions(),
        "copy_bytes_per_second": copy_bandwidth(), "epsilon": EPSILON, "unit": UNIT,
        "cap_units": CAP_UNITS, "rows": [],
    }  # fmt: skip
    mixed = [LONG] + [SHORT] * 15
    if args.quick:
        cases = [(8_192, [0.05] * 2, "even"), (32_768, mixed, "one long")]
    else:
        cases = [(context, mixed, "one long among 15") for context in (32_768, 131_072)]
        cases += [
            (context, [part] * batch, f"{batch} even, 95 % in {part:.0%}")
            for context in (32_768, 131_072)
            for batch in (1, 16)
            for part in PARTS
        ]
    for context, parts, what in cases:
        name = f"{context // 1024}K, {what}"
        if args.only not in name:
            continue
        row = measure(
            context, parts, name, dense=not args.quick, replays=replays,
            variants=SWEEP if args.sweep else (),
        )  # fmt: skip
        report["rows"].append(row)
        report["seconds"] = time.monotonic() - begin
        args.out.write_text(json.dumps(report, indent=1) + "\n")  # what is measured is kept
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
