# SPDX-License-Identifier: Apache-2.0
"""Whole decode steps: all operators together, each implementation, and under a CUDA graph."""

from dataclasses import dataclass, replace

import pytest
import torch
from error_budget import UNIT_ROUNDOFF
from kernel_cases import DEVICE, FAR, FAST, NAN, Batch, Guarded

from sglang_sparse_kernels import (
    Always,
    Attend,
    DecodePlan,
    Lists,
    PageScore,
    PlaneBuffers,
    Scores,
    Select,
    SketchScore,
    Stage,
    StepContext,
    TopkWorkspace,
    decode_step,
    make_topk_workspace,
    make_workspace,
    padded_blocks,
    update_planes,
)
from sglang_sparse_kernels.step import selecting_queries


@dataclass(frozen=True)
class Replace:
    """A stage that puts other scores in the place of those that were written."""

    values: torch.Tensor
    others: torch.Tensor

    def run(self, step: StepContext) -> None:
        """Written in the same places; how close they are is test_score's to judge."""
        assert torch.equal(self.values == -77.0, self.others == -77.0)
        self.values.copy_(self.others)


class Decoder:
    """One layer of a decoding batch, as an attention backend drives it."""

    def __init__(self, batch: Batch, planes: PlaneBuffers, impl: str) -> None:
        self.batch, self.planes, self.impl = batch, planes, impl
        rows, width = len(batch.lengths), -(-batch.max_pages * batch.page_size // batch.unit)
        state = (batch.list_rows, batch.heads)
        self.seq_lens = batch.seq_lens.clone()
        self.plan = DecodePlan.allocate(rows, batch.max_pages, DEVICE)
        self.guarded = Guarded()
        full = self.guarded.full
        blocks = full((rows, batch.heads, padded_blocks(width)), -77.0, torch.float32)
        self.scores = Scores(full((rows, batch.heads, width), -77.0, torch.float32), blocks)
        self.channels = full((*state, 16), FAR, torch.int32)
        self.indices = full((*state, batch.capacity), FAR, torch.int32)
        self.counts = full(state, FAR, torch.int32)
        topk = make_topk_workspace(rows, batch.heads, width, batch.capacity, DEVICE)
        self.topk = TopkWorkspace(*(full(t.shape, FAR, t.dtype) for t in vars(topk).values()))
        heads = batch.heads * batch.group
        needed = make_workspace(rows, heads, batch.heads, batch.dim, DEVICE).numel()
        self.workspace = full((needed,), -77.0, torch.float32)
        self.out = full((rows, heads, batch.dim), -77.0, batch.dtype)

    def stages(self, scores: torch.Tensor | None) -> list[Stage]:
        """The stages of one step; ``scores`` replace the ones that are computed."""
        batch, always = self.batch, Always(4, 8)
        stages: list[Stage] = []
        if batch.unit == 1:
            sketch = batch.sketch(self.planes)
            stages.append(SketchScore(sketch, self.channels, "max", self.scores))
        else:
            stages.append(PageScore(batch.cuboids(self.planes), "max", self.scores))
        if scores is not None:
            stages.append(Replace(self.scores.values, scores))
        return [*stages, Select(self.scores, always, self.topk), Attend(self.workspace)]

    def step(self, scores: torch.Tensor | None = None) -> None:
        """One decode step; ``scores`` replace the ones that this implementation computed."""
        batch, plan, impl = self.batch, self.plan, self.impl
        batch.fill_plan(plan, self.seq_lens, impl)
        lists = Lists(self.indices, self.counts, plan.request_slots, batch.unit)
        kv = replace(batch.kv, page_table=plan.page_table)
        step = StepContext(batch.q, kv, plan, lists, batch.softmax(), self.out, impl)
        decode_step(self.stages(scores), step)
        update_planes(
            batch.k, batch.k_ptrs, self.planes, plan.page_table, plan.update_start, plan.seq_lens,
            page_size=batch.page_size, max_new_tokens=1, impl=impl,
        )  # fmt: skip


STEPS = 4


def make_batch(unit: int, **options: object) -> Batch:
    """A batch that has just decoded ``STEPS + 1`` tokens."""
    batch = Batch(
        [300, 1, 111, 64, 30], unit=unit, group=4, page_size=32, reselect_every=2,
        refresh_every=3, shared_pages=1, dense_rows=(3,), seed=40 + unit, **options,
    )  # fmt: skip
    sparse = batch.req_slots[[0, 2, 4]]
    batch.decode_start[sparse] = (batch.seq_lens[[0, 2, 4]] - STEPS - 1).int()
    return batch


def planes_before(batch: Batch, steps: int) -> PlaneBuffers:
    """Planes as they are ``steps`` decode steps before the batch's lengths."""
    batch.plan.update_start.sub_(steps).clamp_(min=0)
    return batch.make_planes("fp8" if batch.unit == 1 else None, batch.unit > 1)


def run(
    impl: str, unit: int, scores: list[torch.Tensor] | None = None, **options: object
) -> tuple[list[torch.Tensor], list[torch.Tensor], Decoder]:
    """(outputs, scores) of every step and the decoder after the last; ``scores`` of another run
    make the selection of both the same."""
    batch = make_batch(unit, **options)
    decoder = Decoder(batch, planes_before(batch, STEPS), impl)
    outputs, computed = [], []
    for step in range(STEPS, -1, -1):
        decoder.seq_lens.copy_((batch.seq_lens - step).clamp(min=1))
        decoder.step(None if scores is None else scores[len(outputs)])
        outputs.append(decoder.out.clone())
        computed.append(decoder.scores.values.clone())
        decoder.guarded.check()
    return outputs, computed, decoder


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("unit", [1, 16])
def test_each_implementation_decodes_as_the_references_do(unit: int, impl: str) -> None:
    outputs, scores, decoder = run(impl, unit)
    torch_outputs, _, torch_decoder = run("torch", unit, scores)
    for got, want in zip(outputs, torch_outputs, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        # Both round once to bf16; a kernel rounds the probabilities as well.
        assert error <= 3 * UNIT_ROUNDOFF[torch.bfloat16]
    used = decoder.plan.request_slots[decoder.plan.k_units > 0].long()
    assert len(used) == 2
    kept = int(decoder.plan.k_units.max())
    got = decoder.indices[used][..., :kept]
    assert torch.equal(got, torch_decoder.indices[used][..., :kept])
    for name, plane in decoder.planes.tensors().items():
        same = torch_decoder.planes.tensors()[name]
        assert torch.equal(plane.view(torch.uint8), same.view(torch.uint8)), name


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("unit", [1, 16])
def test_queries_of_a_row_select_as_one_group_does(unit: int, impl: str) -> None:
    queries, group = 3, 4
    batch = Batch(
        [333, 190], unit=unit, group=group, page_size=32, capacity=48, budget=48, seed=7 + unit
    )  # fmt: skip
    planes = batch.make_planes("fp8" if unit == 1 else None, unit > 1)
    rows, heads, dim = 2, batch.heads, batch.dim
    q = torch.randn(rows * queries, heads * group, dim, device=DEVICE).to(batch.dtype)
    q.view(rows, queries, -1)[:, 1:] *= 8  # so that the first query alone selects others
    together = torch.stack(
        [q[r * queries + i, h * group + g]
         for r in range(rows) for h in range(heads) for i in range(queries) for g in range(group)]
    ).view(rows, -1, dim)  # fmt: skip

    def lists(q: torch.Tensor, queries: int) -> torch.Tensor:
        decoder = Decoder(batch, planes, impl)
        batch.fill_plan(decoder.plan, batch.seq_lens, impl)
        plan = decoder.plan
        found = Lists(decoder.indices, decoder.counts, plan.request_slots, unit)
        kv = replace(batch.kv, page_table=plan.page_table)
        step = StepContext(q, kv, plan, found, batch.softmax(), q, impl, queries)
        decode_step(decoder.stages(None)[:-1], step)
        decoder.guarded.check()
        return decoder.indices[plan.request_slots.long(), :, : int(plan.k_units.min())]

    shared = lists(q, queries)
    assert torch.equal(shared, lists(together, 1))
    assert not torch.equal(shared, lists(q[::queries], 1))


@pytest.mark.parametrize(
    ("queries", "group", "chosen"),
    [
        (1, 4, [0]),
        (4, 4, [0, 1, 2, 3]),
        (5, 3, [0, 1, 2, 3, 4]),
        (9, 4, [0, 2, 5, 8]),
        (5, 8, [0, 4]),
        (3, 16, [0]),
    ],
)
def test_as_many_queries_select_as_scores_take(queries: int, group: int, chosen: list[int]) -> None:
    assert selecting_queries(queries, group) == chosen


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("broken", ["nan query", "nan keys", "infinite query", "equal keys"])
def test_broken_numbers_stay_inside_their_buffers(unit: int, broken: str, impl: str) -> None:
    batch = Batch(
        [190, 333], unit=unit, group=4, page_size=32, capacity=48, budget=48, seed=unit
    )  # fmt: skip
    planes = batch.make_planes("fp8" if unit == 1 else None, unit > 1)
    if broken == "nan query":
        batch.q[0] = NAN
        batch.q[1, :, 3:] = NAN
    elif broken == "infinite query":
        batch.q[:, :, ::2] = float("inf")
    else:
        for plane in planes.tensors().values():
            plane.view(torch.uint8).fill_(0xFF if broken == "nan keys" else 0)
    decoder = Decoder(batch, planes, impl)
    decoder.step()
    decoder.guarded.check()
    for row in decoder.plan.request_slots.tolist():
        kept = int(decoder.plan.k_units[decoder.plan.request_slots == row])
        assert (decoder.counts[row] == kept).all()
        listed = decoder.indices[row, :, :kept]
        assert (listed[:, 1:] > listed[:, :-1]).all()
        assert (listed >= 0).all()
        assert (listed < 333).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("unit", [1, 16])
def test_a_captured_step_follows_the_lengths_on_the_device(unit: int) -> None:
    eager, _, _ = run("triton", unit)
    batch = make_batch(unit)
    decoder = Decoder(batch, planes_before(batch, STEPS), "triton")
    # Compile outside of the capture, on padding rows alone, which must change no plane in use.
    decoder.seq_lens.fill_(1)
    decoder.step()
    decoder.planes = planes_before(make_batch(unit), STEPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    for step, want in zip(range(STEPS, -1, -1), eager, strict=True):
        decoder.seq_lens.copy_((batch.seq_lens - step).clamp(min=1))
        decoder.out.fill_(NAN)
        graph.replay()
        assert torch.equal(decoder.out, want)
