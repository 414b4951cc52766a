# SPDX-License-Identifier: Apache-2.0
"""The decode plan: its definition per row, and the kernel against it."""

from dataclasses import fields

import pytest
import torch
from kernel_cases import DEVICE, Batch

import sglang_sparse_kernels as kernels

IMPLS = ("torch", "triton")
ROWS = 24


def naive_plan(
    length: int, start: int, budget: tuple[int, int], s: dict[str, float]
) -> dict[str, int]:
    """The contract, one row at a time, in Python integers."""
    first_sparse = max(int(s["min_sparse_tokens"]), start + 1)
    row = {"seq_lens": length, "update_start": length - 1}
    dense = {"tail_start": 0, "k_units": 0, "reselect": 0, "refresh": 0}
    if length < first_sparse:
        return row | dense
    age = length - first_sparse
    phase = age % int(s["reselect_every"])
    tail_start = max(length - 1 - phase, 0)
    floor, ppm = budget
    tokens = max(floor, -(-ppm * tail_start // 1_000_000))
    unit = int(s["unit"])
    units = min(-(-tokens // unit), -(-tail_start // unit), int(s["capacity_units"]))
    if units == 0:
        return row | dense
    return row | {
        "tail_start": tail_start,
        "k_units": units,
        "reselect": int(phase == 0),
        "refresh": int(age % int(s["refresh_every"]) == 0),
    }


def random_requests(seed: int, page_size: int, index_dtype: torch.dtype) -> tuple:
    rng = torch.Generator().manual_seed(seed)
    width = 20 * page_size
    pages = torch.randint(0, 5000, (ROWS + 8, 20), generator=rng)
    table = (pages[..., None] * page_size + torch.arange(page_size)).flatten(1).int()
    slots = torch.randperm(ROWS + 8, generator=rng)[:ROWS]
    lengths = torch.randint(1, width + 1, (ROWS,), generator=rng)
    lengths[:4] = torch.tensor([1, page_size, page_size + 1, width])
    start = torch.randint(0, width, (ROWS + 8,), generator=rng).int()
    start[slots[5]] = kernels.DENSE_REQUEST
    return (
        table.to(DEVICE),
        slots.to(DEVICE, index_dtype),
        lengths.to(DEVICE, index_dtype),
        start.to(DEVICE),
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(6))
def test_plan_equals_the_contract_row_by_row(impl: str, seed: int) -> None:
    page_size = (16, 32, 64)[seed % 3]
    index_dtype = (torch.int64, torch.int32)[seed % 2]
    table, slots, lengths, start = random_requests(seed, page_size, index_dtype)
    settings = {
        "page_size": page_size,
        "unit": (1, 16)[seed // 3],
        "capacity_units": (4096, 60)[seed % 2],
        "min_sparse_tokens": (0, 1, 200)[seed % 3],
        "reselect_every": (1, 4, 3)[seed % 3],
        "refresh_every": (64, 1, 7)[seed % 3],
    }
    # Each request has a budget of its own; most share the server's.
    rows = [kernels.budget_row((0, 128, 100)[seed % 3], (0.1, 0.0, 1 / 3)[seed % 3])] * (ROWS + 8)
    own = torch.randint(0, 600, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows[3:15] = [kernels.budget_row(floor, floor / 600) for floor in own]
    budgets = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    plan = kernels.DecodePlan.allocate(ROWS + 2, 25, DEVICE)
    for field in fields(plan):
        getattr(plan, field.name).fill_(-77)
    view = plan.rows(ROWS)
    tokens, state = kernels.TokenTable(table, slots, lengths), kernels.RequestState(start, budgets)
    kernels.plan_decode(tokens, state, kernels.PlanRules(**settings), plan=view, impl=impl)
    for row in range(ROWS):
        length = int(lengths[row])
        want = naive_plan(length, int(start[slots[row]]), rows[int(slots[row])], settings)
        want["request_slots"] = int(slots[row])
        assert {name: int(getattr(view, name)[row]) for name in want} == want
        pages = -(-length // page_size)
        expected = table[slots[row], :length:page_size] // page_size
        assert torch.equal(view.page_table[row, :pages], expected)
        assert (view.page_table[row, pages:] == -77).all()
    assert all((getattr(plan, field.name)[ROWS:] == -77).all() for field in fields(plan))


@pytest.mark.parametrize("impl", IMPLS)
def test_snapshot_copies_only_the_pages_in_use(impl: str) -> None:
    table, slots, lengths, _ = random_requests(9, 64, torch.int64)
    out = torch.full((ROWS, 13), -5, dtype=torch.int32, device=DEVICE)
    tokens = kernels.TokenTable(table, slots, lengths)
    kernels.snapshot_page_table(tokens, page_size=64, out=out, impl=impl)
    for row in range(ROWS):
        pages = min(-(-int(lengths[row]) // 64), 13)
        assert torch.equal(out[row, :pages], (table[slots[row], ::64] // 64)[:pages])
        assert (out[row, pages:] == -5).all()


def test_lists_live_between_selections_when_cadence_is_above_one() -> None:
    tails = []
    for length in range(60, 72):
        plan = Batch([length], min_sparse=61, reselect_every=4).plan
        tails.append((int(plan.tail_start[0]), int(plan.reselect[0])))
    assert tails == [
        (0, 0),
        *[(60, 1), (60, 0), (60, 0), (60, 0)],
        *[(64, 1), (64, 0), (64, 0), (64, 0)],
        *[(68, 1), (68, 0), (68, 0)],
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "cuda"}, "impl='cuda' is unknown; choose one of triton, cpu, torch"),
        ({"page_size": 48}, "page_size=48"),
        ({"unit": 24}, "unit=24 must divide"),
        ({"reselect_every": 0}, "reselect_every=0"),
        ({"min_sparse_tokens": -1}, "min_sparse_tokens=-1"),
        ({"budgets": torch.zeros(3, 2, dtype=torch.int32)}, "budgets"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    batch = Batch([100])
    settings = {
        "page_size": 64,
        "unit": 1,
        "capacity_units": 8,
        "min_sparse_tokens": 0,
        "reselect_every": 1,
        "refresh_every": 1,
    }
    asked = {"budgets": batch.budgets, "impl": "torch"} | change
    settings |= {name: asked.pop(name) for name in settings if name in asked}
    tokens = kernels.TokenTable(batch.req_to_token, batch.req_slots, batch.seq_lens)

    def planned() -> None:
        state = kernels.RequestState(batch.decode_start, asked["budgets"])
        kernels.plan_decode(
            tokens, state, kernels.PlanRules(**settings), plan=batch.plan, impl=asked["impl"]
        )

    with pytest.raises(ValueError, match=message):
        planned()


@pytest.mark.parametrize(("floor", "fraction"), [(-1, 0.0), (2**31, 0.0), (1, 1.5), (1, -0.1)])
def test_a_budget_out_of_range_is_refused(floor: int, fraction: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        kernels.budget_row(floor, fraction)


def test_a_plan_has_no_more_rows_than_it_was_given() -> None:
    with pytest.raises(ValueError, match="batch of 5 rows does not fit a plan of 4"):
        kernels.DecodePlan.allocate(4, 2).rows(5)
