# SPDX-License-Identifier: Apache-2.0
"""Exact scores: the definition against a loop, the kernel against float64."""

import math
from dataclasses import replace

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, dot_rounding
from kernel_cases import DEVICE, FAR, FAST, IMPLS, NAN, PYTORCH, Batch

from sglang_sparse_kernels import (
    BLOCK_UNITS,
    Always,
    Attend,
    ExactScore,
    ExactWorkspace,
    Scores,
    Select,
    StepContext,
    decode_step,
    exact_score,
    make_exact_workspace,
    make_scores,
    make_topk_workspace,
    make_workspace,
    padded_blocks,
)
from sglang_sparse_kernels.common import take

UNTOUCHED = 12345.0
# lengths, page size, heads, group, dim, dtype, cadence
CASES = [
    ([257, 1, 111, 30, 63], 64, 2, 1, 64, torch.bfloat16, 1),
    ([1, 130, 511], 32, 1, 2, 128, torch.float16, 4),
    ([63, 300], 16, 3, 3, 64, torch.bfloat16, 1),
    ([111, 49, 257], 64, 2, 4, 128, torch.bfloat16, 3),
    ([1030, 20], 32, 1, 8, 64, torch.float16, 1),
    ([257], 16, 1, 16, 64, torch.bfloat16, 5),
]


def make_batch(case: tuple, **options: object) -> Batch:
    lengths, page_size, heads, group, dim, dtype, cadence = case
    batch = Batch(
        lengths, page_size=page_size, heads=heads, group=group, dim=dim, dtype=dtype,
        reselect_every=cadence, shared_pages=1, seed=sum(lengths) + group,
        dense_rows=(len(lengths) - 1,) if len(lengths) > 2 else (), **options,
    )  # fmt: skip
    batch.q *= batch.randn(*batch.q.shape).exp().to(batch.q)
    return batch


def lists_of(batch: Batch, pool: str) -> int:
    return 1 if pool == "heads" else batch.heads


def naive(batch: Batch, pool: str, logit_cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(score, bound of the products' absolute sums in log 2) in float64, one head at a time."""
    shape = (len(batch.lengths), lists_of(batch, pool), max(batch.lengths))
    score = torch.full(shape, UNTOUCHED, dtype=torch.float64, device=DEVICE)
    size = torch.zeros_like(score)
    plan, scale = batch.plan, batch.logit_scale
    for row, length in enumerate(batch.lengths):
        if not (plan.reselect[row] and plan.k_units[row]):
            continue
        at = torch.arange(length, device=DEVICE)
        slots = plan.page_table[row].long()[at // batch.page_size] * batch.page_size
        slots += at % batch.page_size
        pooled = torch.zeros((shape[1], length), dtype=torch.float64, device=DEVICE)
        largest = 0.0
        for j in range(batch.heads * batch.group):
            keys = take(batch.k[0], (slots, j // batch.group)).double()
            products = keys * batch.q[row, j].double() * scale
            logits = products.sum(-1)
            largest = max(largest, float(products.abs().sum(-1).max()))
            if logit_cap:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            pooled[0 if pool == "heads" else j // batch.group] += logits.softmax(-1)
        tail = int(plan.tail_start[row])
        score[row, :, :tail] = pooled[:, :tail].log2()
        size[row] = largest / math.log(2)
    return score, size


def score_rounding(size: torch.Tensor, want: torch.Tensor, dim: int) -> torch.Tensor:
    """How far float32 scores may be from ``want``, with ``size`` of :func:`naive`, in log 2.

    A logit and the logarithm of the row's sum are off by a dot product's rounding each. Scaling,
    tanh, exp2, sums and log2 add at most 16 roundings of what they hold: of the logits' size, of
    the score, and, since a relative error is an absolute one of a logarithm, of the 32 terms that a
    warp's sums add up at once.
    """
    few = 16 * UNIT_ROUNDOFF[torch.float32]
    return 2 * dot_rounding(size, dim) + few * (size + want.abs().where(size > 0, 0) + 32)


def score(
    batch: Batch, pool: str, impl: str, logit_cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = len(batch.lengths), max(batch.lengths) + 3
    lists = lists_of(batch, pool)
    dtype = torch.float64 if batch.q.dtype == torch.float64 else torch.float32
    out = torch.full((rows, lists, width), UNTOUCHED, dtype=dtype, device=DEVICE)
    block_max = torch.full((rows, lists, padded_blocks(width)), UNTOUCHED, device=DEVICE)
    workspace = make_exact_workspace(rows, batch.heads * batch.group, batch.heads, width, DEVICE)
    workspace.logits.fill_(NAN)
    workspace.partials.fill_(NAN)
    exact_score(
        batch.q, batch.kv, batch.plan, softmax=batch.softmax(logit_cap), pool=pool,
        out=Scores(out, block_max), workspace=workspace, impl=impl,
    )  # fmt: skip
    return out, block_max


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("pool", "logit_cap"), [("group", 0.0), ("heads", 2.0)])
def test_definition_is_the_pooled_softmax(
    case: tuple, pool: str, logit_cap: float, impl: str
) -> None:
    batch = make_batch(case)
    want, _ = naive(batch, pool, logit_cap)
    batch.q, batch.k = batch.q.double(), [k.double() for k in batch.k]
    batch.v = batch.k
    got, _ = score(batch, pool, impl, logit_cap)
    torch.testing.assert_close(got[..., : want.shape[2]], want)
    assert (got[..., want.shape[2] :] == UNTOUCHED).all()


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("pool", "logit_cap"), [("group", 0.0), ("heads", 0.0), ("group", 5.0), ("heads", 5.0)]
)
def test_kernel_is_within_float32_rounding_of_float64(
    case: tuple, pool: str, logit_cap: float, impl: str
) -> None:
    batch = make_batch(case)
    want, size = naive(batch, pool, logit_cap)
    got, block_max = score(batch, pool, impl, logit_cap)
    slack = score_rounding(size, want, batch.dim)
    inside = want != UNTOUCHED
    error = (got[..., : want.shape[2]].double() - want).abs()
    assert (error <= slack)[inside].all(), error[inside].max()
    assert (got[..., : want.shape[2]] == UNTOUCHED)[~inside].all()
    assert (got[..., want.shape[2] :] == UNTOUCHED).all()
    for row in range(len(batch.lengths)):
        # Only kernels look at block maxima.
        units = int(inside[row, 0].sum()) if impl == "triton" else 0
        blocks = -(-units // BLOCK_UNITS)
        for j in range(blocks):
            best = got[row, :, j * BLOCK_UNITS : min((j + 1) * BLOCK_UNITS, units)].amax(-1)
            assert torch.equal(block_max[row, :, j], best)
        assert (block_max[row, :, blocks:] == UNTOUCHED).all()


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_splits_gives_the_same_scores(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_sparse_kernels.exact import kernel

    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    batch = make_batch(([511, 1, 170], 64, 1, 4, 64, torch.bfloat16, 1))
    batch.plan = replace(batch.plan, reselect=torch.ones_like(batch.plan.reselect))
    want, size = naive(batch, "group", 0.0)
    out = make_scores(3, 1, 512, DEVICE)
    workspace = ExactWorkspace(
        torch.full((3, 4, 512), NAN, device=DEVICE),
        torch.full((3 * 4 * splits * 2,), NAN, device=DEVICE),
    )
    options = {"softmax": batch.softmax(), "pool": "group", "out": out, "impl": "triton"}
    exact_score(batch.q, batch.kv, batch.plan, workspace=workspace, **options)
    inside = want != UNTOUCHED
    slack = score_rounding(size, want, 64)
    assert ((out.values[..., :511].double() - want).abs() <= slack)[inside].all()
    short = ExactWorkspace(workspace.logits, workspace.partials[1:])
    with pytest.raises(ValueError, match="workspace holds"):
        exact_score(batch.q, batch.kv, batch.plan, workspace=short, **options)


@pytest.mark.parametrize("impl", IMPLS)
def test_probabilities_that_underflow_keep_their_order(impl: str) -> None:
    batch = Batch([200], heads=1, group=1)
    slots = int(batch.plan.page_table[0, 0]) * batch.page_size
    batch.q[0] = 20.0
    batch.k[0][slots] = 10.0  # takes all of the probability
    got, _ = score(batch, "group", impl)
    rest = got[0, 0, 1:199]
    assert rest.isfinite().all()
    assert rest.max() < -200
    assert rest.unique().numel() > 100


class Anchor:
    """A decode step of an anchor and of a layer that reuses its lists, as a backend drives them."""

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.batch = batch = Batch(
            [300, 1, 211, 30], heads=2, group=4, page_size=32, dense_rows=(3,), seed=77, layers=2
        )
        rows, width = len(batch.lengths), batch.max_pages * batch.page_size
        self.seq_lens = batch.seq_lens.clone()
        self.scores = make_scores(rows, 2, width, DEVICE)
        self.exact = make_exact_workspace(rows, 8, 2, width, DEVICE)
        self.topk = make_topk_workspace(rows, 2, width, batch.capacity, DEVICE)
        state = (batch.list_rows, 2)
        self.indices = torch.full((*state, batch.capacity), FAR, dtype=torch.int32, device=DEVICE)
        self.counts = torch.zeros(state, dtype=torch.int32, device=DEVICE)
        self.head_map = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
        self.workspace = make_workspace(rows, 8, 2, batch.dim, DEVICE)
        self.out = torch.full((2, *batch.q.shape), NAN, dtype=batch.dtype, device=DEVICE)

    def step(self) -> None:
        batch, plan = self.batch, self.batch.plan
        batch.fill_plan(plan, self.seq_lens, self.impl)
        attend = Attend(self.workspace)
        anchor = [
            ExactScore("group", self.scores, self.exact),
            Select(self.scores, Always(4, 8), self.topk),
            attend,
        ]
        for layer, (stages, taken) in enumerate(((anchor, None), ([attend], self.head_map))):
            step = StepContext(
                batch.q, batch.kv_of(layer), plan, batch.lists(self.indices, self.counts, taken),
                batch.softmax(), self.out[layer], self.impl,
            )  # fmt: skip
            decode_step(stages, step)


@pytest.mark.parametrize("impl", FAST)
def test_anchors_and_reuse_layers_decode_as_the_references_do(impl: str) -> None:
    outputs = []
    for each in ("torch", impl):
        anchor = Anchor(each)
        anchor.step()
        outputs.append(anchor.out.float())
    assert (outputs[1] - outputs[0]).norm() <= 3 * UNIT_ROUNDOFF[torch.bfloat16] * outputs[0].norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_captured_anchor_follows_the_lengths_on_the_device() -> None:
    eager, captured = Anchor("triton"), Anchor("triton")
    captured.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for shorter in (100, 30, 0):
        for anchor in (eager, captured):
            anchor.seq_lens.copy_((anchor.batch.seq_lens - shorter).clamp(min=1))
            anchor.out.fill_(NAN)
        eager.step()
        graph.replay()
        assert torch.equal(captured.out, eager.out)
