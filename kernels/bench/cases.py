# SPDX-License-Identifier: Apache-2.0
"""Decode batches of random data with separate KV per request, and checks of every operator."""

from dataclasses import dataclass

import torch

from sglang_sparse_kernels import (
    DecodePlan,
    PlaneBuffers,
    TopkWorkspace,
    budget_row,
    gathered_decode_attention,
    make_topk_workspace,
    make_workspace,
    page_minmax_score,
    plan_decode,
    select_channels,
    select_topk,
    sketch_score,
    update_planes,
)

CHANNELS = 16
SINK = 16
RECENT = 64


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


class Case:
    """A batch with its plan, ``layers`` sets of data, and the sparse steps over them."""

    def __init__(self, shape: Shape, layers: int, unit: int, device: torch.device) -> None:
        self.shape, self.unit, self.device = shape, unit, device
        rows, size = shape.batch, shape.page_size
        row_pages = -(-shape.context // size)
        order = torch.randperm if shape.scattered else torch.arange
        pages = 1 + order(rows * row_pages, device=device).view(rows, row_pages)
        slots = pages[..., None] * size + torch.arange(size, device=device)
        req_to_token = torch.zeros((rows + 1, shape.width), dtype=torch.int32, device=device)
        req_to_token[1:, : row_pages * size] = slots.flatten(1).int()
        self.plan_inputs = (
            req_to_token,
            torch.arange(1, rows + 1, device=device),
            torch.full((rows,), shape.context, dtype=torch.int64, device=device),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.tensor([budget_row(shape.budget, 0.0)] * (rows + 1), device=device).int(),
        )
        self.plan = DecodePlan.allocate(rows, -(-shape.width // size), device)
        self.capacity = -(-shape.budget // unit)
        self.run_plan("triton")
        self.layers = [self._random_layer() for _ in range(layers)]
        self.k_layers = [layer.k for layer in self.layers]
        self.k_ptrs = torch.tensor(
            [k.data_ptr() for k in self.k_layers], dtype=torch.uint64, device=device
        )
        for layer in self.layers:
            update_planes(
                [layer.k],
                torch.tensor([layer.k.data_ptr()], dtype=torch.uint64, device=device),
                layer.planes,
                self.plan.page_table,
                torch.zeros_like(self.plan.seq_lens),
                self.plan.update_start,
                page_size=size,
                max_new_tokens=shape.context,
                impl="triton",
            )
        units = -(-shape.width // unit)
        state = (rows + 1, shape.heads)
        self.scores = torch.empty((rows, shape.heads, units), device=device)
        self.channels = torch.zeros((*state, CHANNELS), dtype=torch.int32, device=device)
        self.indices = torch.zeros((*state, self.capacity), dtype=torch.int32, device=device)
        self.counts = torch.zeros(state, dtype=torch.int32, device=device)
        self.topk: TopkWorkspace = make_topk_workspace(
            rows, shape.heads, units, self.capacity, device
        )
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
            num_layers=1,
            num_pages=s.pages,
            page_size=s.page_size,
            num_heads=s.heads,
            head_dim=s.dim,
            kv_dtype=s.dtype,
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

    def run_plan(self, impl: str) -> None:
        """Plan a step in which every row selects anew and refreshes its channels."""
        plan_decode(
            *self.plan_inputs,
            page_size=self.shape.page_size,
            unit=self.unit,
            capacity_units=self.capacity,
            min_sparse_tokens=1,
            reselect_every=1,
            refresh_every=1,
            plan=self.plan,
            impl=impl,
        )

    def choose(self, layer: LayerData, impl: str = "triton") -> None:
        """Choose the channels (token units alone)."""
        plan = self.plan
        select_channels(
            layer.q, self.channels, plan.list_rows, plan.refresh, plan.k_units, impl=impl
        )

    def score(
        self, layer: LayerData, out: torch.Tensor | None = None, impl: str = "triton"
    ) -> None:
        """Score tokens by their sketch or logical pages by their bounds."""
        out = self.scores if out is None else out
        planes = layer.planes
        options = {"reduce": "max", "out": out, "block_max": self.topk.block_max, "impl": impl}
        if self.unit == 1:
            options["choose_channels"] = True
            assert planes.key_sketch is not None
            scale = planes.key_sketch_scale
            sketch_score(
                layer.q,
                self.channels,
                planes.key_sketch[0],
                None if scale is None else scale[0],
                self.plan,
                page_size=self.shape.page_size,
                **options,
            )
        else:
            assert planes.page_min is not None
            assert planes.page_max is not None
            page_minmax_score(
                layer.q,
                planes.page_min[0],
                planes.page_max[0],
                self.plan,
                unit=self.unit,
                page_size=self.shape.page_size,
                **options,
            )

    def select(self, impl: str = "triton") -> None:
        """Select the units with the best scores."""
        select_topk(
            self.scores,
            self.plan,
            unit=self.unit,
            sink=SINK,
            recent=RECENT,
            out_indices=self.indices,
            out_counts=self.counts,
            workspace=self.topk,
            has_block_max=True,
            impl=impl,
        )

    def attend(self, layer: LayerData, impl: str = "triton") -> None:
        """Attend to the selected units and the tail."""
        gathered_decode_attention(
            layer.q,
            layer.k,
            layer.v,
            self.plan,
            self.indices,
            self.counts,
            unit=self.unit,
            page_size=self.shape.page_size,
            sm_scale=self.shape.dim**-0.5,
            out=layer.out,
            workspace=self.workspace,
            impl=impl,
        )

    def step(self, layer: LayerData) -> None:
        """The whole attention step of a layer: scores, selection, attention."""
        self.score(layer)
        self.select()
        self.attend(layer)

    def check(self) -> dict[str, float]:
        """Relative errors of every stage against its reference, from fresh poisoned outputs.

        Raises:
            AssertionError: if a stage is wrong.
        """
        layer, errors = self.layers[-1], {}
        self.channels.fill_(-1)
        self.indices.fill_(-1)
        self.scores.fill_(float("nan"))
        layer.out.fill_(float("nan"))
        self.step(layer)
        got_channels, got_indices = self.channels[1:].clone(), self.indices[1:].clone()
        if self.unit == 1:
            self.choose(layer, impl="torch")
            assert torch.equal(self.channels[1:], got_channels), "select_channels"
        want = torch.full_like(self.scores, float("nan"))
        self.score(layer, out=want, impl="torch")
        defined = ~want.isnan()
        assert torch.equal(defined, ~self.scores.isnan()), "scores are written where they should be"
        got, want = self.scores[defined], want[defined]
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
        def update(planes: PlaneBuffers, impl: str) -> None:
            update_planes(
                [layer.k],
                torch.tensor([layer.k.data_ptr()], dtype=torch.uint64, device=self.device),
                planes,
                self.plan.page_table,
                self.plan.update_start,
                self.plan.seq_lens,
                page_size=self.shape.page_size,
                max_new_tokens=1,
                impl=impl,
            )

        update(layer.planes, "triton")
        got = {name: plane.clone() for name, plane in layer.planes.tensors().items()}
        update(layer.planes, "torch")
        for name, plane in layer.planes.tensors().items():
            same = torch.equal(plane.view(torch.uint8), got[name].view(torch.uint8))
            assert same, f"update_planes: {name}"
