# SPDX-License-Identifier: Apache-2.0
"""The study's policies against the kernels' references, and what every policy must keep."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from error_budget import attention_difference
from expected_mass import raised

from sglang_sparse.research.policies import (
    WINDOW,
    Cache,
    Kind,
    Policy,
    Reduce,
    attend,
    attend_mask,
    kept_share,
    page_means,
    page_planes,
    pooled_scores,
    stored,
)
from sglang_sparse_kernels import (
    Always,
    KeySketch,
    KVView,
    Lists,
    MassStop,
    PageCuboids,
    Scores,
    Softmax,
    StopState,
)
from sglang_sparse_kernels.attend.reference import gathered_decode_attention_reference
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.planes import SKETCH_DTYPES, cuboid_mean, quantize_sketch
from sglang_sparse_kernels.progressive.reference import (
    progressive_decode_attention_reference,
    rank_units_reference,
    residual_bounds_reference,
)
from sglang_sparse_kernels.progressive.types import ResidualRule
from sglang_sparse_kernels.score.reference import (
    page_bounds_reference,
    page_minmax_score_reference,
    select_channels_reference,
    sketch_score_reference,
)
from sglang_sparse_kernels.select.reference import select_topk_reference

ROWS, HEADS, GROUPS, DIM, LENGTH, PAGE = 2, 8, 4, 64, 427, 16
SINK, RECENT, KEPT, CHANNELS = 16, 32, 128, 16
ALWAYS, SOFTMAX = Always(SINK, RECENT), Softmax(DIM**-0.5)


@pytest.fixture
def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (ROWS, GROUPS, LENGTH, DIM)
    q = torch.randn(ROWS, HEADS, DIM, generator=generator) * 2
    return q, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def paged(x: torch.Tensor) -> torch.Tensor:
    """``[B, G, L, D]`` as the pool's ``[slots, G, D]``, row after row, in whole pages."""
    pages = -(-LENGTH // PAGE)
    padded = torch.nn.functional.pad(x, (0, 0, 0, pages * PAGE - LENGTH))
    return padded.transpose(1, 2).reshape(-1, GROUPS, DIM)


def cuboids(low: torch.Tensor, high: torch.Tensor) -> PageCuboids:
    """Cuboids ``[B, G, pages, D]`` as the planes hold them, row after row."""
    low, high = (end.transpose(1, 2).flatten(0, 1) for end in (low, high))
    return PageCuboids(low, high, PAGE, PAGE)


def plan_of(units: int) -> DecodePlan:
    pages = -(-LENGTH // PAGE)
    plan = DecodePlan.allocate(ROWS, pages)
    plan.page_table.copy_(torch.arange(ROWS * pages).view(ROWS, pages))
    plan.seq_lens.fill_(LENGTH)
    plan.tail_start.fill_(LENGTH - 1)
    plan.k_units.fill_(units)
    plan.reselect.fill_(1)
    plan.refresh.fill_(1)
    plan.request_slots.copy_(torch.arange(ROWS))
    return plan


def bare(scores: torch.Tensor) -> Scores:
    """Scores without block maxima, which the references do without."""
    return Scores(scores, scores[..., :0])


def reference_output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, unit: int,
    kept: int = KEPT,
) -> torch.Tensor:  # fmt: skip
    plan = plan_of(kept // unit)
    indices = torch.zeros(ROWS, GROUPS, kept // unit, dtype=torch.int32)
    counts = torch.zeros(ROWS, GROUPS, dtype=torch.int32)
    lists = Lists(indices, counts, plan.request_slots, unit)
    select_topk_reference(bare(scores), plan, lists, always=ALWAYS)
    out = torch.full_like(q, torch.nan)
    kv = KVView(paged(k), paged(v), plan.page_table, PAGE)
    gathered_decode_attention_reference(q, kv, plan, lists, softmax=SOFTMAX, out=out, queries=1)
    return out.flatten(1)


def sketch_scores(
    q: torch.Tensor, k: torch.Tensor, plan: DecodePlan, reduce: Reduce
) -> torch.Tensor:
    channels = torch.zeros(ROWS, GROUPS, CHANNELS, dtype=torch.int32)
    select_channels_reference(q, channels, plan)
    sketch = paged(k).to(torch.float8_e4m3fn).view(-1, PAGE, GROUPS, DIM).permute(0, 2, 3, 1)
    scores = torch.zeros(ROWS, GROUPS, LENGTH)
    values = KeySketch(sketch.contiguous(), None, PAGE)
    sketch_score_reference(q, channels, values, plan, reduce=reduce, out=bare(scores))
    return scores


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_sparcas_equals_the_kernels_references(step, reduce: str) -> None:
    q, k, v = step
    scores = sketch_scores(q, k, plan_of(KEPT), reduce)
    expected = reference_output(q, k, v, scores, unit=1)
    # The kernels attend to the current token beside the budget; the study counts it in.
    policy = Policy("sparcas", KEPT + 1, SINK, RECENT + 1, CHANNELS, reduce=reduce)
    cache = Cache(k, v)
    mask = attend_mask(policy, q, cache, torch.full((ROWS,), LENGTH))
    assert (mask.sum(-1) == KEPT + 1).all()
    torch.testing.assert_close(
        attend(q, cache, mask), expected, rtol=0, atol=attention_difference(q, k, v, SOFTMAX.scale)
    )


# Pages alone, and units of four logical pages (`score.select`).
@pytest.mark.parametrize(("unit", "kept"), [(PAGE, KEPT), (64, 256)])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_page_minmax_equals_the_kernels_references(step, reduce: str, unit: int, kept: int) -> None:
    q, k, v = step
    lengths = torch.full((ROWS,), LENGTH)
    low, high = page_planes(k, lengths, PAGE)
    scores = torch.zeros(ROWS, GROUPS, LENGTH)
    page_minmax_score_reference(
        q, cuboids(low, high), plan_of(8), unit=unit, reduce=reduce, out=bare(scores)
    )
    expected = reference_output(q, k, v, scores, unit, kept)
    logical = PAGE if unit > PAGE else 0
    policy = Policy(
        "page_minmax", kept, SINK, RECENT + 1, page=unit, logical=logical, reduce=reduce
    )
    cache = Cache(k, v)
    mask = attend_mask(policy, q, cache, lengths)
    if logical:
        # The bounds of whole pages would choose others.
        whole = attend_mask(replace(policy, logical=0), q, cache, lengths)
        assert not torch.equal(mask, whole)
    torch.testing.assert_close(
        attend(q, cache, mask), expected, rtol=0, atol=attention_difference(q, k, v, SOFTMAX.scale)
    )


@pytest.mark.parametrize("kind", ["page_minmax", "page_mean"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_a_page_scores_as_the_best_of_its_logical_pages(step, reduce: str, kind: Kind) -> None:
    q, k, v = step
    lengths, policy = torch.tensor([LENGTH, 130]), Policy(kind, page=64, logical=16, reduce=reduce)
    found = pooled_scores(policy, q, Cache(k, v), lengths)
    assert found.shape == (ROWS, GROUPS, 7)
    planes = {"page_minmax": page_planes, "page_mean": page_means}[kind](k, lengths, 16)
    queries, pool = q.view(ROWS, GROUPS, 2, DIM), {"max": max, "sum": sum}[reduce]
    for row, head, page in product(range(ROWS), range(GROUPS), range(7)):
        best = -torch.inf
        for part in range(4 * page, 4 * page + 4):
            if part * 16 >= lengths[row]:
                continue
            low, high = (ends[row, head, part] for ends in planes)
            heads = [
                float(torch.maximum(one * low, one * high).sum()) for one in queries[row, head]
            ]
            best = max(best, pool(heads))
        assert float(found[row, head, page]) == pytest.approx(best, rel=1e-5)


def test_page_means_are_the_kernels_digests(step) -> None:
    _, k, _ = step
    lengths = torch.tensor([LENGTH, 130])
    low, high = page_means(k, lengths, 32)
    for row, length in enumerate(lengths.tolist()):
        pages = -(-length // 32)
        padded = torch.nn.functional.pad(k[row, :, :length], (0, 0, 0, pages * 32 - length))
        keys = padded.unflatten(1, (pages, 32)).permute(1, 2, 0, 3)
        written = torch.arange(pages * 32).view(pages, 32) < length
        for got, want in zip((low, high), cuboid_mean(keys, written), strict=True):
            torch.testing.assert_close(got[row, :, :pages].transpose(0, 1), want)
            assert torch.isinf(got[row, :, pages:]).all()


# Where nothing is capped; where lists are, and the current token begins a page.
@pytest.mark.parametrize(("length", "cap"), [(LENGTH, 2 * LENGTH), (417, 160)])
@pytest.mark.parametrize("share", ["min", "mean"])
@pytest.mark.parametrize(
    ("kind", "epsilon", "margin"),
    [
        ("page_mean", 0.6, None),
        ("page_mean", 0.9, None),
        ("page_mean", 1.0, None),
        # Some heads go on here only because the kernels raise what is left.
        ("page_mean", 0.67, 9.0),
        ("page_mean", 0.7, 9.0),
        ("sparcas", 0.8, None),
    ],
)
def test_a_share_of_the_mass_stops_as_the_kernels_references(
    step, length: int, cap: int, share: str, kind: Kind, epsilon: float, margin: float | None
) -> None:
    q, k, v = step
    policy = Policy(
        kind, cap + (kind == "sparcas"), SINK, RECENT + 1, CHANNELS, page=PAGE, epsilon=epsilon,
        share=share, margin=raised(margin),
    )  # fmt: skip
    lengths, unit = torch.full((ROWS,), length), policy.unit
    units = cap // unit
    planes = page_means(k, lengths, PAGE)
    plan = plan_of(units)
    plan.seq_lens.fill_(length)
    plan.tail_start.fill_(length - 1)
    if kind == "sparcas":
        scores = sketch_scores(q, k, plan, "max")
    else:
        scores = torch.zeros(ROWS, GROUPS, LENGTH)
        page_minmax_score_reference(
            q, cuboids(*planes), plan, unit=PAGE, reduce="max", out=bare(scores)
        )
    indices, ranked = torch.zeros(2, ROWS, GROUPS, units).int(), torch.zeros(ROWS, GROUPS).int()
    best, ranking = (Lists(listed, ranked, plan.request_slots, unit) for listed in indices)
    select_topk_reference(bare(scores), plan, best, always=ALWAYS)
    rank_units_reference(bare(scores), plan, best.indices, ranking, always=ALWAYS)
    out, reached = torch.full_like(q, torch.nan), torch.zeros_like(ranked)
    rest = None
    if margin is not None:
        by_head = torch.zeros(ROWS, GROUPS, q.shape[1] // GROUPS, LENGTH)
        rest = torch.zeros(*by_head.shape[:3], LENGTH)
        page_bounds_reference(q, cuboids(*planes), plan, unit=PAGE, out=by_head)
        rule = ResidualRule(ALWAYS, 32, SOFTMAX, margin)
        residual_bounds_reference(by_head, bare(scores), plan, ranking, rule, rest)
    kv = KVView(paged(k), paged(v), plan.page_table, PAGE)
    stop = MassStop(ALWAYS, 32, share, torch.full((ROWS,), epsilon), rest)
    progressive_decode_attention_reference(
        q, kv, plan, ranking, stop, StopState(reached), softmax=SOFTMAX, out=out
    )
    cache = Cache(k, v, planes=planes)
    mask = attend_mask(policy, q, cache, lengths)
    # All listed units are whole but the last one; the current token is in none of them.
    assert torch.equal(mask.sum(-1), reached * unit - (1 - length) % unit + 1)
    torch.testing.assert_close(
        attend(q, cache, mask),
        out.flatten(1),
        rtol=0,
        atol=attention_difference(q, k, v, SOFTMAX.scale),
    )
    whole = kept_share(q, k, lengths, mask)
    assert (whole <= 1 + 1e-6).all()
    assert (whole >= 1 - 1e-6).all() or epsilon < 1 or cap < length


@pytest.mark.parametrize("kind", ["oracle", "sparcas", "page_minmax"])
def test_budget_of_the_whole_context_is_dense(step, kind: Kind) -> None:
    q, k, v = step
    cache, lengths = Cache(k, v), torch.tensor([LENGTH, 130])
    dense = attend(q, cache, attend_mask(Policy(), q, cache, lengths))
    sparse = attend(q, cache, attend_mask(Policy(kind, 432), q, cache, lengths))
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("kind", ["oracle", "sparcas", "page_minmax"])
def test_sinks_and_recent_tokens_are_always_kept_and_nothing_past_the_end(step, kind: Kind) -> None:
    q, k, v = step
    for length in (63, 111, 300, LENGTH):
        mask = attend_mask(Policy(kind, 64), q, Cache(k, v), torch.full((ROWS,), length))
        assert mask[..., : min(SINK, length)].all()
        assert mask[..., max(0, length - RECENT) : length].all()
        assert not mask[..., length:].any()
        assert (mask.sum(-1) <= 64).all()


def test_oracle_keeps_the_tokens_with_most_attention(step) -> None:
    q, k, v = step
    needle = 200
    k[:, :, needle] = q.view(ROWS, GROUPS, 2, DIM).sum(2)
    mask = attend_mask(Policy("oracle", 64), q, Cache(k, v), torch.full((ROWS,), LENGTH))
    assert mask[..., needle].all()


def test_window_is_sinks_and_recent(step) -> None:
    q, k, v = step
    mask = attend_mask(WINDOW, q, Cache(k, v), torch.full((ROWS,), LENGTH))
    assert (mask.sum(-1) == 260).all()


def test_bad_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        Policy("quest")
    with pytest.raises(ValueError, match="budget 40 is under"):
        Policy("oracle", 40)
    with pytest.raises(ValueError, match="'oracle' has no scores to reach a share by"):
        Policy("oracle", epsilon=0.9)
    for kind, page in (("page_minmax", 40), ("sparcas", 64)):
        with pytest.raises(ValueError, match=f"no '{kind}' page of {page} is of pages of 16"):
            Policy(kind, page=page, logical=16)


@pytest.mark.parametrize("storage", ["fp8", "int8", "int4", "bf16"])
def test_the_study_rounds_keys_as_the_planes_do(storage: str) -> None:
    keys = torch.randn(5, 2, DIM, generator=torch.Generator().manual_seed(3))
    dtype = SKETCH_DTYPES[storage]
    sketch, scale = quantize_sketch(keys, dtype)
    values = sketch.float() - (8 if storage == "int4" else 0)
    want = values if scale is None else values * scale[..., None]
    torch.testing.assert_close(stored(keys, storage), want)
