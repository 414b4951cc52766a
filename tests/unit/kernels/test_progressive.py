# SPDX-License-Identifier: Apache-2.0
"""Progressive attention: where it stops, what it returns and what it counts, against float64."""

import math
from dataclasses import replace

import pytest
import torch
from error_budget import UNIT_ROUNDOFF, assert_within_budget, mass_rounding
from kernel_cases import DEVICE, NAN
from progressive_cases import (
    ALWAYS,
    CASES,
    KINDS,
    PAIRS,
    POISON,
    Setting,
    check,
    in_double,
    make_batch,
    naive_order,
    run,
    shape_keys,
    tail_mass,
    unit_masses,
    unit_products,
)
from test_attend import naive_attention, rounding

from sglang_sparse_kernels import (
    COUNTERS,
    MassStop,
    Scores,
    StopState,
    make_progressive_workspace,
    num_chunks,
    padded_blocks,
    progressive_decode_attention,
    rank_units,
)
from sglang_sparse_kernels.progressive import kernel
from sglang_sparse_kernels.progressive.reference import prologue_units


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few parts of what is attended to in any case, so that dense rows' hold several tiles."""
    monkeypatch.setattr(kernel, "MAX_PROLOGUE_CHUNKS", 3)


@pytest.mark.parametrize(("impl", "kind", "case"), PAIRS)
def test_it_stops_and_attends_as_the_definition_says(impl: str, kind: str, case: tuple) -> None:
    batch = make_batch(case)
    if impl == "torch":
        in_double(batch)
    scores = shape_keys(batch, kind)
    share = "mean" if batch.group == 2 else "min"
    check(batch, scores, run(batch, scores, ask := Setting(0.9, case[8], share), impl), ask)


@pytest.mark.parametrize(
    ("impl", "kind", "logit_cap"),
    [("torch", kind, cap) for kind in KINDS for cap in (0.0, 3.0)]
    + [("triton", "peaked", 0.0), ("triton", "adversarial", 3.0)],
)
def test_with_bounds_the_mass_reached_is_never_less_than_asked_for(
    impl: str, kind: str, logit_cap: float
) -> None:
    batch = make_batch(([311, 200, 30], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64))
    batch.q *= 0.1  # loose bounds would reach everything
    if impl == "torch":
        in_double(batch)
    scores = shape_keys(batch, kind)
    ask = Setting(0.5, 32, "min", upper=True, logit_cap=logit_cap)
    got = run(batch, scores, ask, impl)
    stops = check(batch, scores, got, ask)
    early = 0
    for row in range(len(batch.lengths)):
        mass = unit_masses(batch, row, logit_cap)
        for head in range(batch.heads if mass.shape[-1] else 0):
            target = int(batch.plan.request_slots[row])
            count = int(got["reached"][target, head])
            listed = got["indices"][target, head, :count].long()
            tail = tail_mass(batch, row, logit_cap)[head]
            share = (tail + mass[head][:, listed].sum(-1)) / (tail + mass[head].sum(-1))
            assert share.min() >= ask.of(row)
            early += count < mass.shape[-1]
    assert kind == "adversarial" or early, f"nothing stopped early: {stops}"


@pytest.mark.parametrize("upper", [False, True])
def test_bounds_of_what_is_left_are_at_least_what_is_left(upper: bool) -> None:
    """The kernel's bounds, look by look, hold the true mass in and agree with the reference's."""
    batch = make_batch(([611, 222], 32, 2, 2, 64, torch.bfloat16, 32, 1, 64, 8))
    scores = shape_keys(batch, "peaked")
    ask = Setting(0.9, 64, upper=True, logit_cap=4.0 if upper else 0.0)
    got, want = run(batch, scores, ask, "triton"), run(in_double(batch), scores, ask, "torch")
    for row in range(len(batch.lengths)):
        mass = unit_masses(batch, row, ask.logit_cap)
        products = unit_products(batch, row)
        rounding = mass_rounding(products, 2 * batch.dim)
        for head in range(batch.heads):
            order, forced = naive_order(batch, scores, row, head)
            first = prologue_units(forced, 2)
            for stop_check in range(-(-(len(order) - first) // 2) + 1):
                seen = torch.tensor(order[: first + stop_check * 2], dtype=torch.long)
                # Not all mass less what was seen: that leaves a rounding error where none is left.
                left = mass[head].index_fill(-1, seen.to(mass.device), 0).sum(-1)
                bound = got["bounds"][row, head, :, stop_check].double()
                # The bound is raised by BOUND_MARGIN, which covers all of the kernel's rounding.
                assert (2.0**bound >= left * (1 - rounding)).all()
                # In log 2; bounds of products are larger than the products, in float32 and rounded.
                slack = (rounding + batch.dim * UNIT_ROUNDOFF[torch.float32]) / math.log(2)
                exact = want["bounds"][row, head, :, stop_check]
                torch.testing.assert_close(bound, exact, rtol=slack, atol=slack)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_lowered_bounds_are_an_estimate_that_ends_rows_earlier(impl: str) -> None:
    batch = make_batch(([311, 200], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64))
    batch.q *= 0.1
    if impl == "torch":
        in_double(batch)
    scores, whole = shape_keys(batch, "peaked"), Setting(0.7, 32, upper=True)
    ask = replace(whole, margin=2.0)
    bound, estimate = run(batch, scores, whole, impl), run(batch, scores, ask, impl)
    raised = estimate["bounds"] + 2.0 / math.log(2)
    # The margin is a factor of the same sums; the factor, the logarithm and its shift round.
    few = 4 * UNIT_ROUNDOFF[torch.float32] * float(raised.nan_to_num(0, 0, 0).abs().max() + 2)
    torch.testing.assert_close(raised, bound["bounds"], equal_nan=True, rtol=0, atol=few)
    stops = check(batch, scores, bound, whole), check(batch, scores, estimate, ask)
    assert all(a >= b for a, b in zip(*stops, strict=True))
    assert sum(stops[0]) > sum(stops[1])


@pytest.mark.parametrize(
    ("impl", "kind", "upper"),
    [("torch", kind, upper) for kind in KINDS for upper in (False, True)]
    + [("triton", "adversarial", False), ("triton", "peaked", True)],
)
def test_a_share_of_one_equals_dense(impl: str, kind: str, upper: bool) -> None:
    case = ([200, 63, 111], 32, 1, 2, 64, torch.bfloat16, 16, 1, 32, 64)
    batch, dense = make_batch(case), make_batch(case, dense_rows=(0, 1, 2))
    scores = shape_keys(batch, kind)
    shape_keys(dense, kind)
    got = run(batch, scores, Setting(1.0, 32, upper=upper), impl)
    lists = dense.random_lists()
    exact = naive_attention(dense, lists, torch.float64)
    eager = naive_attention(dense, lists, dense.dtype)
    assert_within_budget(got["out"], exact, eager, rounding(dense.dtype))


def test_what_was_expected_and_who_attends_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(([333, 90], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64))
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 32)
    first = run(batch, scores, ask, "triton")
    check(batch, scores, first, ask)
    took = first["expected"]
    for row in range(2):
        before = prologue_units(naive_order(batch, scores, row, 0)[1], 2)
        blocks = first["reached"][batch.plan.request_slots[row].long()] - before
        assert torch.equal(took[row], -(-blocks // 2).int())
    most = int(took.max())
    assert 1 < most < 10
    # What is expected is all there is, falls just short, and falls far short.
    for programs, row_cost, expected in ((3, 0, 2**30), (5, 2, most - 1), (1, 1, -5)):
        monkeypatch.setattr(kernel, "num_programs", lambda _, programs=programs: programs)
        monkeypatch.setattr(kernel, "ROW_COST", row_cost)
        again = run(batch, scores, ask, "triton", expected)
        for name in ("out", "reached", "counters", "expected"):
            assert torch.equal(again[name], first[name]), (name, programs, expected)


def test_pieces_of_several_tiles_hold_what_one_tile_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 16)
    batch = make_batch(([200, 130], 32, 1, 2, 64, torch.bfloat16, 16, 1, 64, 64), dense_rows=(1,))
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 64)
    check(batch, scores, run(batch, scores, ask, "triton"), ask)


def test_looks_at_a_few_pieces_at_a_time_find_the_same_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "CHECKS", 4)
    monkeypatch.setattr(kernel, "MERGED", 256)  # two pieces of 4 query heads
    batch = make_batch(([333, 90], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64))
    scores, ask = shape_keys(batch, "peaked"), Setting(0.95, 32)
    got = run(batch, scores, ask, "triton")
    check(batch, scores, got, ask)
    assert int(got["expected"].max()) > 4


def test_batches_of_all_sizes_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: dict[str, set[tuple]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple) -> "Recorder":
            return self

        def __call__(self, *_: object, **constants: object) -> None:
            compiled.setdefault(self.name, set()).add(tuple(sorted(constants.items())))

    for name in ("attend", "finish", "extend"):
        monkeypatch.setattr(kernel, f"progressive_{name}_kernel", Recorder(name))
    for rows in (1, 5, 16):
        batch = make_batch(([40] * rows, 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 4))
        run(batch, shape_keys(batch, "uniform"), Setting(0.9, 32), "triton")
    assert len(compiled["attend"]) == len(compiled["extend"]) == 1
    # One that looks first, and one that looks again.
    assert len(compiled["finish"]) == 2


@pytest.mark.parametrize("step", [1, 2, 4, 8])
def test_what_comes_before_the_first_look_fills_whole_microbatches(step: int) -> None:
    for forced in range(4 * step):
        before = prologue_units(forced, step)
        assert forced - step < before <= forced
        if before < forced:  # with the tail's unit
            assert (before + 1) % step == 0


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_forced_unit_that_weighs_next_to_nothing_ends_no_row(impl: str) -> None:
    batch = make_batch(([333, 90], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64))
    # The first row's last unit is recent; it is left over and goes with the first ranked one.
    at = torch.arange(320, 332, device=DEVICE)
    slots = batch.plan.page_table[0].long()[at // 32] * 32 + at % 32
    batch.k[0][slots, 0] = -batch.q[0].sum(0)
    if impl == "torch":
        in_double(batch)
    scores, ask = shape_keys(batch, "uniform"), Setting(0.9, 32)
    order, forced = naive_order(batch, scores, 0, 0)
    assert order[forced - 1] == 20
    assert prologue_units(forced, 2) < forced
    stops = check(batch, scores, run(batch, scores, ask, impl), ask)
    assert stops[0] > prologue_units(forced, 2) + 2


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_each_row_reaches_the_share_that_it_is_asked_for(impl: str) -> None:
    batch = make_batch(([300, 300, 90], 64, 1, 2, 64, torch.bfloat16, 16, 1, 16, 32))
    if impl == "torch":
        in_double(batch)
    scores = shape_keys(batch, "uniform")
    mixed = Setting((0.3, 0.8, 1.0), 16)
    got = run(batch, scores, mixed, impl)
    check(batch, scores, got, mixed)
    for row, epsilon in enumerate((0.3, 0.8)):  # a row stops as if all were asked for the same
        alone = run(batch, scores, Setting(epsilon, 16), "torch")
        at = int(batch.plan.request_slots[row])
        assert torch.equal(got["reached"][at], alone["reached"][at])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_stop_at_very_different_depths_and_a_cap_is_counted(impl: str) -> None:
    batch = make_batch(([400, 400], 64, 1, 2, 64, torch.bfloat16, 16, 1, 32, 20), shared_pages=0)
    batch.q[0] *= 3
    batch.q[1] *= 0.02  # all alike: the share grows by a unit at a time
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 32)
    got = run(batch, scores, ask, impl)
    stops = check(batch, scores, got, ask) if impl == "triton" else None
    reached = got["reached"][batch.plan.request_slots.long(), 0].tolist()
    assert stops is None or stops == reached
    assert reached[1] == 20
    assert reached[0] < 12
    assert got["counters"][COUNTERS.index("cap_hits")] == 1


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_between_selections_keep_their_ranking_and_stop_anew(impl: str) -> None:
    batch = make_batch(([300], 64, 1, 2, 64, torch.bfloat16, 16, 1, 32, 32))
    scores, ask = shape_keys(batch, "peaked"), Setting(0.6, 32)
    first = run(batch, scores, ask, impl)
    work = torch.full_like(scores, NAN)
    batch.plan.reselect.zero_()
    again = run(batch, work, ask, impl)
    assert (again["ranked"] == POISON).all()  # nothing was ranked here
    batch.plan.reselect.fill_(1)
    batch.q[0] *= 0.02
    flat = run(batch, scores, ask, impl)
    target = int(batch.plan.request_slots[0])
    assert torch.equal(flat["indices"], first["indices"])
    assert flat["reached"][target, 0] > first["reached"][target, 0]


@pytest.mark.parametrize("broken", ["nan query", "nan keys", "infinite query"])
def test_broken_numbers_stay_inside_their_buffers(broken: str) -> None:
    batch = make_batch(([300, 90], 32, 1, 4, 64, torch.bfloat16, 16, 1, 16, 12))
    scores = shape_keys(batch, "uniform")
    if broken == "nan keys":
        batch.k[0].fill_(NAN)
    else:
        batch.q.fill_(NAN if broken == "nan query" else float("inf"))
    got = run(batch, scores, Setting(0.9, 16), "triton")
    for row in batch.plan.request_slots.tolist():
        assert 0 <= int(got["reached"][row, 0]) <= int(got["ranked"][row, 0]) <= 12


def test_bad_arguments_are_refused() -> None:
    batch = make_batch(CASES[0])
    scores = shape_keys(batch, "uniform")
    for ask, words in (
        (Setting(0.9, 48), "microbatch=48 must be one of"),
        (Setting(0.9, 32, "most"), "share='most' is unknown"),
    ):
        with pytest.raises(ValueError, match=words):
            run(batch, scores, ask, "torch")


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("upper", [False, True])
def test_without_an_output_the_same_stops_are_found_and_no_value_is_read(
    impl: str, upper: bool
) -> None:
    batch = make_batch(([333, 90, 30], 32, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64))
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 32, upper=upper)
    whole = run(batch, scores, ask, impl)
    batch.v[0].fill_(NAN)
    found = run(batch, scores, replace(ask, output=False), impl)
    for name in ("reached", "counters", "expected"):
        assert torch.equal(found[name], whole[name]), name
    assert found["out"].isnan().all()
    assert not whole["out"].isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_captured_step_stops_where_the_numbers_of_the_replay_say() -> None:
    batch = make_batch(([900, 1, 500], 64, 2, 4, 128, torch.bfloat16, 16, 1, 32, 64))
    scores, ask = shape_keys(batch, "peaked"), Setting(0.9, 32)
    sharp = batch.q.clone()
    flat = sharp * 0.02
    eager = {}
    for name, q in (("sharp", sharp), ("flat", flat)):
        batch.q.copy_(q)
        eager[name] = run(batch, scores, ask, "triton")
    rows, heads = len(batch.lengths), batch.heads * batch.group
    chunks = num_chunks(batch.capacity, batch.unit, ask.microbatch)
    workspace = make_progressive_workspace(rows, heads, batch.heads, batch.dim, chunks, DEVICE)
    got = {name: tensor.clone() for name, tensor in eager["flat"].items() if tensor is not None}
    slots = batch.plan.request_slots.long()
    picked = got["indices"][slots].sort(-1).values.contiguous()
    ranking = batch.lists(got["indices"], got["ranked"])
    stop = MassStop(ALWAYS, ask.microbatch, ask.share, ask.shares(rows))
    expected = torch.ones_like(got["reached"])
    state = StopState(got["reached"], expected, got["counters"])
    blocks = (*scores.shape[:2], padded_blocks(scores.shape[2]))
    scored = Scores(scores, torch.zeros(blocks, device=DEVICE))

    def step() -> None:
        rank_units(scored, batch.plan, picked, ranking, always=ALWAYS, impl="triton")
        progressive_decode_attention(
            batch.q, batch.kv, batch.plan, ranking, stop, state, softmax=batch.softmax(),
            out=got["out"], workspace=workspace, impl="triton",
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name, q in (("sharp", sharp), ("flat", flat), ("sharp", sharp)):
        batch.q.copy_(q)
        got["out"].fill_(NAN)
        graph.replay()
        assert torch.equal(got["out"], eager[name]["out"])
        assert torch.equal(got["reached"][slots], eager[name]["reached"][slots])
