# SPDX-License-Identifier: Apache-2.0
"""Decode batches of random data with separate KV per request, and checks of every operator."""

from dataclasses import dataclass

import torch

from sglang_sparse_kernels import (
    Always,
    Attend,
    DecodePlan,
    KeySketch,
    KVView,
    Lists,
    PageCuboids,
    PageScore,
    PlaneBuffers,
    PlaneShape,
    PlanRules,
    RequestState,
    Scores,
    Select,
    SketchScore,
    Softmax,
    Stage,
    StepContext,
    TokenTable,
    budget_row,
    decode_step,
    make_scores,
    make_topk_workspace,
    make_workspace,
    plan_decode,
    select_channels,
    update_planes,
)

CHANNELS = 16
ALWAYS = Always(sink=16, recent=64)


@dataclass(frozen=True)
class Shape:
    """One attention step: every request has ``context`` tokens of its own.

    ``max_context`` sizes the buffers, if it is above the context; a tiny ``key_scale`` makes an
    fp8 sketch all zeros, so that all scores tie. Pages of a request are neighbours, as SGLang hands
    them out, or ``scattered``.
    """

    context: int
    batch: int
    heads: int = 8
    group: int = 4
    dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    sketch: str = "fp8"
    budget: int = 2048
    max_context: int = 0
    key_scale: float = 1.0
    scattered: bool = False

    @property
    def width(self) -> int:
        """Positions that a row of the token table holds."""
        return max(self.max_context, -(-self.context // self.page_size) * self.page_size)

    @property
    def pages(self) -> int:
        """Pages of the pool, the padding page 0 counted in."""
        return 1 + self.batch * -(-self.context // self.page_size)

    @property
    def planes(self) -> PlaneShape:
        """The pool of one layer."""
        return PlaneShape(1, self.pages, self.page_size, self.heads, self.dim, self.dtype)

    @property
    def softmax(self) -> Softmax:
        """The usual scale."""
        return Softmax(self.dim**-0.5)

    @property
    def dense_bytes(self) -> int:
        """Bytes of K and V that dense attention must read."""
        return 2 * self.batch * self.context * self.heads * self.dim * self.dtype.itemsize

    @property
    def selected_bytes(self) -> int:
        """Bytes of K and V that attention over the budget must read."""
        return self.dense_bytes * min(self.budget + 1, self.context) // self.context


@dataclass(frozen=True)
class LayerData:
    """What differs between two layers: the query, the KV rows and the planes of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    planes: PlaneBuffers
    out: torch.Tensor


class PlannedBatch:
    """Requests with KV of their own, each in a row, and the plan of a step in which all select."""

    def __init__(self, shape: Shape, unit: int, device: torch.device) -> None:
        self.shape, self.unit, self.device = shape, unit, device
        rows, size = shape.batch, shape.page_size
        row_pages = -(-shape.context // size)
        order = torch.randperm if shape.scattered else torch.arange
        pages = 1 + order(rows * row_pages, device=device).view(rows, row_pages)
        slots = pages[..., None] * size + torch.arange(size, device=device)
        self.slots = slots.flatten(1)
        req_to_token = torch.zeros((rows + 1, shape.width), dtype=torch.int32, device=device)
        req_to_token[1:, : row_pages * size] = self.slots.int()
        lengths = torch.full((rows,), shape.context, dtype=torch.int64, device=device)
        requests = torch.arange(1, rows + 1, device=device)
        self.tokens = TokenTable(req_to_token, requests, lengths)
        self.state = RequestState(
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.tensor([budget_row(shape.budget, 0.0)] * (rows + 1), device=device).int(),
        )
        self.plan = DecodePlan.allocate(rows, -(-shape.width // size), device)
        self.capacity = -(-shape.budget // unit)
        self.run_plan("triton")

    def run_plan(self, impl: str) -> None:
        """Plan a step in which every row selects anew and refreshes its channels."""
        rules = PlanRules(self.shape.page_size, self.unit, self.capacity, min_sparse_tokens=1)
        plan_decode(self.tokens, self.state, rules, plan=self.plan, impl=impl)

    def update(
        self, layer: LayerData, start: torch.Tensor, end: torch.Tensor, most: int, impl: str
    ) -> None:
        """Bring a layer's planes up to date for positions [start, end), at most ``most``."""
        pointer = torch.tensor([layer.k.data_ptr()], dtype=torch.uint64, device=self.device)
        update_planes(
            [layer.k], pointer, layer.planes, self.plan.page_table, start, end,
            page_size=self.shape.page_size, max_new_tokens=most, impl=impl,
        )  # fmt: skip

    def fill_planes(self, layer: LayerData) -> None:
        """Planes of all positions but the last."""
        start, end = torch.zeros_like(self.plan.seq_lens), self.plan.update_start
        self.update(layer, start, end, self.shape.context, "triton")

    def lists(self, indices: torch.Tensor, counts: torch.Tensor) -> Lists:
        """Lists that are kept by request slot."""
        return Lists(indices, counts, self.plan.request_slots, self.unit)

    def context(self, layer: LayerData, lists: Lists, impl: str = "triton") -> StepContext:
        """The context of a layer's step."""
        kv = KVView(layer.k, layer.v, self.plan.page_table, self.shape.page_size)
        return StepContext(layer.q, kv, self.plan, lists, self.shape.softmax, layer.out, impl)


class Case(PlannedBatch):
    """A batch with its plan, ``layers`` sets of data, and the sparse steps over them."""

    def __init__(self, shape: Shape, layers: int, unit: int, device: torch.device) -> None:
        super().__init__(shape, unit, device)
        rows = shape.batch
        self.layers = [self._random_layer() for _ in range(layers)]
        self.k_layers = [layer.k for layer in self.layers]
        self.k_ptrs = torch.tensor(
            [k.data_ptr() for k in self.k_layers], dtype=torch.uint64, device=device
        )
        for layer in self.layers:
            self.fill_planes(layer)
        units = -(-shape.width // unit)
        state = (rows + 1, shape.heads)
        self.scores = make_scores(rows, shape.heads, units, device)
        self.channels = torch.zeros((*state, CHANNELS), dtype=torch.int32, device=device)
        self.indices = torch.zeros((*state, self.capacity), dtype=torch.int32, device=device)
        self.counts = torch.zeros(state, dtype=torch.int32, device=device)
        self.topk = make_topk_workspace(rows, shape.heads, units, self.capacity, device)
        self.make_workspace()
        self.step(self.layers[0])

    def make_workspace(self) -> None:
        """Allocate the workspace of attention, as the current launch heuristics need it."""
        s = self.shape
        self.workspace = make_workspace(s.batch, s.heads * s.group, s.heads, s.dim, self.device)

    def _random_layer(self) -> LayerData:
        s = self.shape
        pool = (s.pages * s.page_size, s.heads, s.dim)
        query = (s.batch, s.heads * s.group, s.dim)
        q = torch.randn(query, dtype=s.dtype, device=self.device)
        planes = PlaneBuffers.allocate(
            s.planes,
            page_minmax=self.unit > 1,
            key_sketch=s.sketch if self.unit == 1 else None,
            device=self.device,
        )
        return LayerData(
            q=q,
            k=torch.empty(pool, dtype=s.dtype, device=self.device).normal_(std=s.key_scale),
            v=torch.empty(pool, dtype=s.dtype, device=self.device).normal_(),
            planes=planes,
            out=torch.empty_like(q),
        )

    def choose(self, layer: LayerData, impl: str = "triton") -> None:
        """Choose the channels (token units alone)."""
        select_channels(layer.q, self.channels, self.plan, impl=impl)

    def score_stage(self, layer: LayerData, scores: Scores) -> Stage:
        """Score tokens by their sketch or logical pages by their bounds."""
        planes, size = layer.planes, self.shape.page_size
        if self.unit == 1:
            assert planes.key_sketch is not None
            scale = planes.key_sketch_scale
            sketch = KeySketch(planes.key_sketch[0], None if scale is None else scale[0], size)
            return SketchScore(sketch, self.channels, "max", scores)
        assert planes.page_min is not None
        assert planes.page_max is not None
        pages = PageCuboids(planes.page_min[0], planes.page_max[0], self.unit, size)
        return PageScore(pages, "max", scores)

    def run(self, stages: list[Stage], layer: LayerData, impl: str = "triton") -> None:
        """Run some stages of a layer's step."""
        decode_step(stages, self.context(layer, self.lists(self.indices, self.counts), impl))

    def score(self, layer: LayerData, out: Scores | None = None, impl: str = "triton") -> None:
        """Score the units alone."""
        self.run([self.score_stage(layer, self.scores if out is None else out)], layer, impl)

    @property
    def select_stage(self) -> Stage:
        """Select the units with the best scores."""
        return Select(self.scores, ALWAYS, self.topk)

    def select(self, impl: str = "triton") -> None:
        """Select alone."""
        self.run([self.select_stage], self.layers[0], impl)

    def attend(self, layer: LayerData, impl: str = "triton") -> None:
        """Attend to the selected units and the tail, alone."""
        self.run([Attend(self.workspace)], layer, impl)

    def step(self, layer: LayerData) -> None:
        """The whole attention step of a layer: scores, selection, attention."""
        stages = [self.score_stage(layer, self.scores), self.select_stage, Attend(self.workspace)]
        self.run(stages, layer)

    def check(self) -> dict[str, float]:
        """Relative errors of every stage against its reference, from fresh poisoned outputs.

        Raises:
            AssertionError: if a stage is wrong.
        """
        layer, errors = self.layers[-1], {}
        self.channels.fill_(-1)
        self.indices.fill_(-1)
        self.scores.values.fill_(float("nan"))
        layer.out.fill_(float("nan"))
        self.step(layer)
        got_channels, got_indices = self.channels[1:].clone(), self.indices[1:].clone()
        if self.unit == 1:
            self.choose(layer, impl="torch")
            assert torch.equal(self.channels[1:], got_channels), "select_channels"
        reference = Scores(torch.full_like(self.scores.values, float("nan")), self.scores.block_max)
        self.score(layer, out=reference, impl="torch")
        want, got = reference.values, self.scores.values
        defined = ~want.isnan()
        assert torch.equal(defined, ~got.isnan()), "scores are written where they should be"
        got, want = got[defined], want[defined]
        errors["score"] = float((got - want).norm() / want.norm().clamp(min=1e-30))
        # An 8-bit sketch is summed in fp16.
        assert errors["score"] < (2e-3 if self.unit == 1 else 1e-5), f"score: {errors['score']}"
        self.select(impl="torch")
        assert torch.equal(self.indices[1:], got_indices), "select_topk"
        got_out = layer.out.clone()
        self.attend(layer, impl="torch")
        errors["attend"] = float((got_out.float() - layer.out.float()).norm() / layer.out.norm())
        assert errors["attend"] < 1e-2, f"attention: relative error {errors['attend']}"
        self._check_decode_update(layer)
        return errors

    def _check_decode_update(self, layer: LayerData) -> None:
        plan = self.plan
        self.update(layer, plan.update_start, plan.seq_lens, 1, "triton")
        got = {name: plane.clone() for name, plane in layer.planes.tensors().items()}
        self.update(layer, plan.update_start, plan.seq_lens, 1, "torch")
        for name, plane in layer.planes.tensors().items():
            same = torch.equal(plane.view(torch.uint8), got[name].view(torch.uint8))
            assert same, f"update_planes: {name}"
