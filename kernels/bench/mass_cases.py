# SPDX-License-Identifier: Apache-2.0
"""Decode batches with heavy-tailed keys, for attention until a share of the mass is reached."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from cases import ALWAYS, CHANNELS, LayerData, PlannedBatch, Shape
from timing import time_calls

from sglang_sparse_kernels import (
    COUNTERS,
    Attend,
    AttendUntil,
    KeySketch,
    Lists,
    MassStop,
    PageCuboids,
    PageScore,
    PlaneBuffers,
    Rank,
    Scores,
    Select,
    SketchScore,
    Stage,
    decode_step,
    make_progressive_workspace,
    make_scores,
    make_topk_workspace,
    make_workspace,
    num_chunks,
    rank_units,
)
from sglang_sparse_kernels.attend import kernel as attend_kernel
from sglang_sparse_kernels.progressive import kernel as progressive_kernel
from sglang_sparse_kernels.progressive.reference import forced_units, prologue_units

BLOCK = 32  # neighbouring tokens that are alike in their part of the mass
REPEATS = 10
# Calls that a timed graph holds at least, so that to start it, some 10 us, is no part of a call.
CALLS = 32
# How far a step's query is turned from what two successive ones have in common, so that stops move
# by about a tenth, a third, and two thirds: notes/progressive.md says why.
TURNS = (0.015, 0.05, 0.229)
# Splits of the fixed budget's kernel that are tried beside its own, for 16 requests and for one.
SPLITS = {16: (4, 6, 8, 10), 1: (16, 48, 64)}


@dataclass(frozen=True)
class Method:
    """What a preset ranks, and when it stops.

    ``unit`` tokens are ranked together, by the cuboid-mean of pages, or single ones by the key
    sketch; ``cap`` tokens at most, until the ``share`` of a group's heads is ``epsilon``.
    """

    unit: int
    cap: int
    epsilon: float
    share: Literal["min", "mean"]

    @property
    def cap_units(self) -> int:
        """Units that are ranked at most."""
        return self.cap // self.unit


PSA = Method(unit=32, cap=16_384, epsilon=0.95, share="min")
PSA_SKETCH = Method(unit=1, cap=2048, epsilon=0.98, share="mean")


@dataclass(frozen=True)
class MassLayer(LayerData):
    """One step of one layer: its data, its scores, and what is ranked and reached by them."""

    scores: Scores
    selected: torch.Tensor
    indices: torch.Tensor
    ranked: torch.Tensor
    reached: torch.Tensor
    expected: torch.Tensor
    direction: torch.Tensor
    channels: torch.Tensor


class MassCase(PlannedBatch):
    """A batch of random data; in row r, ``parts[r]`` of the blocks hold 95 % of the mass."""

    def __init__(
        self,
        shape: Shape,
        parts: list[float],
        layers: int,
        microbatch: int,
        method: Method = PSA,
    ) -> None:
        shape = replace(shape, budget=method.cap, scattered=True)
        super().__init__(shape, method.unit, torch.device("cuda"))
        self.parts, self.microbatch, self.method = parts, microbatch, method
        rows, heads = shape.batch, shape.heads * shape.group
        pairs = [self._random_layer() for _ in range(layers)]
        self.layers = [pair[step] for step in (0, 1) for pair in pairs]
        self.selected_counts = torch.zeros((rows, shape.heads), dtype=torch.int32, device="cuda")
        self.own_rows = torch.arange(rows, dtype=torch.int32, device="cuda")
        epsilons = torch.full((rows,), method.epsilon, device="cuda")
        self.stop = MassStop(ALWAYS, microbatch, method.share, epsilons)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device="cuda")
        self.topk = make_topk_workspace(rows, shape.heads, self.max_units, method.cap_units, "cuda")
        chunks = num_chunks(method.cap_units, self.unit, microbatch)
        self.workspace = make_progressive_workspace(
            rows, heads, shape.heads, shape.dim, chunks, "cuda"
        )
        self.fixed_workspace = make_workspace(rows, heads, shape.heads, shape.dim, "cuda")
        self.turn_by(TURNS[1])

    @property
    def max_units(self) -> int:
        """Units of a row, and what rounds them up to whole block maxima."""
        return -(-self.shape.context // self.unit // 16) * 16

    def turn_by(self, turn: float) -> None:
        """Draw every step's query anew, and take each step twice.

        A query lies along the heavy keys' direction, and is turned elsewhere by ``turn``. Channels
        of a sketch are chosen here alone: in 63 of 64 steps they are kept.
        """
        s = self.shape
        self.plan.refresh.fill_(1)
        for layer in self.layers:
            noise = torch.randn((s.batch, s.heads, s.group, s.dim), device="cuda")
            noise = torch.nn.functional.normalize(noise, dim=-1) * turn
            q = 8 * (layer.direction[:, :, None] + noise)
            layer.q.copy_(q.flatten(1, 2).to(s.dtype))
        for layer in 2 * self.layers:
            self.step(layer)
        self.plan.refresh.zero_()

    def _random_layer(self) -> tuple[MassLayer, MassLayer]:
        """Two steps of a layer."""
        s = self.shape
        k = torch.zeros((s.pages * s.page_size, s.heads, s.dim), dtype=s.dtype, device="cuda")
        k.normal_(std=0.3)
        v = torch.empty_like(k).normal_()
        direction = torch.nn.functional.normalize(
            torch.randn((s.batch, s.heads, s.dim), device="cuda"), dim=-1
        )
        blocks = -(-s.context // BLOCK)
        for row, part in enumerate(self.parts):
            heavy = max(1, round(part * blocks))
            # A heavy block has so many times the mass of a light one.
            times = 19 * (blocks - heavy) / heavy
            logit = torch.zeros((blocks, s.heads), device="cuda")
            for head in range(s.heads):
                chosen = torch.randperm(blocks, device="cuda")[:heavy]
                spread = torch.randn(heavy, device="cuda") * 0.5
                logit[chosen, head] = torch.tensor(times).log() + spread - spread.exp().mean().log()
            amount = logit.repeat_interleave(BLOCK, 0)[: s.context] * s.dim**0.5 / 8
            at = self.slots[row, : s.context]
            for head in range(s.heads):
                k[at, head] += (amount[:, head, None] * direction[row, head]).to(s.dtype)
        of_pages = self.unit > 1
        planes = PlaneBuffers.allocate(
            s.planes, page_minmax=False, key_sketch=None if of_pages else s.sketch,
            page_mean=of_pages, device="cuda", **({"logical_page": self.unit} if of_pages else {}),
        )  # fmt: skip
        cap_units = self.method.cap_units

        def lists(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        expected = lists(s.batch + 1, s.heads)
        channels = lists(s.batch + 1, s.heads, CHANNELS)

        def step() -> MassLayer:
            q = torch.zeros((s.batch, s.heads * s.group, s.dim), dtype=s.dtype, device="cuda")
            return MassLayer(
                q=q, k=k, v=v, planes=planes, out=torch.empty_like(q),
                scores=make_scores(s.batch, s.heads, self.max_units, "cuda"),
                selected=lists(s.batch, s.heads, cap_units),
                indices=lists(s.batch + 1, s.heads, cap_units),
                ranked=lists(s.batch + 1, s.heads), reached=lists(s.batch + 1, s.heads),
                expected=expected, direction=direction, channels=channels,
            )  # fmt: skip

        first = step()
        self.fill_planes(first)
        return first, step()

    def score_stage(self, layer: MassLayer) -> Stage:
        """Score blocks by their cuboid-mean, or tokens by the key sketch."""
        size = self.shape.page_size
        if layer.planes.key_sketch is not None:
            sketch = KeySketch(layer.planes.key_sketch[0], None, size)
            return SketchScore(sketch, layer.channels, "max", layer.scores)
        low, high = layer.planes.page_mean_low, layer.planes.page_mean_high
        assert low is not None
        assert high is not None
        pages = PageCuboids(low[0], high[0], self.unit, size)
        return PageScore(pages, "max", layer.scores)

    def rank_stage(self, layer: MassLayer) -> Stage:
        """Select as many blocks as may be ranked, and rank them."""
        selected = Lists(layer.selected, self.selected_counts, self.own_rows, self.unit)
        return Rank(layer.scores, ALWAYS, self.topk, selected, layer.ranked)

    def attend_stage(self, layer: MassLayer) -> Stage:
        """Attend until the share is reached."""
        return AttendUntil(self.stop, layer.ranked, layer.expected, self.counters, self.workspace)

    def run(self, stages: list[Stage], layer: MassLayer, impl: str = "triton") -> None:
        """Run some stages of a layer's step."""
        decode_step(stages, self.context(layer, self.lists(layer.indices, layer.reached), impl))

    def rank(self, layer: MassLayer, impl: str = "triton") -> None:
        """Rank what was selected, alone."""
        ranking = self.lists(layer.indices, layer.ranked)
        rank_units(layer.scores, self.plan, layer.selected, ranking, always=ALWAYS, impl=impl)

    def attend(self, layer: MassLayer, impl: str = "triton") -> None:
        """Attend until the share is reached, alone."""
        self.run([self.attend_stage(layer)], layer, impl)

    def step(self, layer: MassLayer) -> None:
        """The whole attention step of a layer."""
        stages = [self.score_stage(layer), self.rank_stage(layer), self.attend_stage(layer)]
        self.run(stages, layer)

    def fixed(self, *, even: bool) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Attention over as many blocks as were reached, as a fixed budget: alone, and the step.

        Each KV head attends to as many as it reached, or, ``even``, to as many as its row's do in
        the mean.
        """
        most = max(int(layer.reached[1:].max()) for layer in self.layers)
        # Room for fewer blocks.
        topk = replace(self.topk, blocks=self.topk.blocks[..., :most].contiguous())

        def calls(layer: MassLayer) -> tuple[Callable[[], None], Callable[[], None]]:
            # The step selects into these: never into what the progressive one goes over.
            indices, counts = layer.indices[..., :most].clone(), layer.reached.clone()
            if even:
                mean = counts[1:].float().mean(1, keepdim=True).round().int()
                counts[1:] = mean.expand(-1, counts.shape[1])
            plan = replace(self.plan, k_units=counts[1:].amax(1).contiguous())
            context = replace(self.context(layer, self.lists(indices, counts)), plan=plan)
            attend = [Attend(self.fixed_workspace)]
            select = Select(layer.scores, ALWAYS, topk)
            step = [self.score_stage(layer), select, *attend]
            return partial(decode_step, attend, context), partial(decode_step, step, context)

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
                layer.expected.random_(-2, (1 + self.method.cap // self.microbatch) // repeat)
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
        # A share within rounding of epsilon may stop one stop check earlier or later.
        assert int(differ.max()) <= self.microbatch // self.unit, "stops"
        error = float((first[0].float() - layer.out.float()).norm() / layer.out.float().norm())
        assert error < 2e-2, f"attention: relative error {error}"
        return {"error": error, "other_stops": float((differ > 0).float().mean())}

    def surprises(self) -> dict[str, float]:
        """How far what was expected lies from what was taken, in microbatches, over two steps."""
        tail = self.plan.seq_lens - self.plan.tail_start
        forced = forced_units(int(self.plan.tail_start[0]), self.unit, ALWAYS)
        before = prologue_units(forced, self.microbatch // self.unit) * self.unit
        parts = -(-(tail + before) // min(progressive_kernel.TILE, self.microbatch))
        over, moved, taken, extended = [], [], [], []
        for _ in range(2):
            for layer in self.layers:
                before = layer.expected.clone()
                self.attend(layer)
                over.append(self.workspace.attended - parts[:, None] - layer.expected[1:])
                moved.append((layer.expected - before)[1:].abs())
                taken.append(layer.expected[1:].clone())
                extended.append(self.workspace.extended - self.workspace.attended)
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
