# SPDX-License-Identifier: Apache-2.0
"""Counts of decode steps: their definition row by row, and the kernel against it."""

import random

import pytest
import torch
from kernel_cases import DEVICE

import sglang_sparse_kernels as kernels

IMPLS = ("torch", "triton")
WINDOW = 300


def naive_counts(
    plan: kernels.DecodePlan, budgets: list[tuple[int, int]], unit: int, capacity: int
) -> dict[str, int]:
    """What the lists hold, row by row, by the positions that they name."""
    found = dict.fromkeys(kernels.COUNTS, 0)
    for row in range(plan.num_rows):
        slot, length = int(plan.request_slots[row]), int(plan.seq_lens[row])
        if slot == 0:
            continue
        tail, units = int(plan.tail_start[row]), int(plan.k_units[row])
        domain = -(-tail // unit)
        # Which units are listed does not matter, but that the last one is.
        listed = set(range(domain - units, domain))
        attended = [p for p in range(length) if p >= tail or p // unit in listed]
        floor, ppm = budgets[slot]
        wanted = min(-(-max(floor, -(-ppm * tail // 1_000_000)) // unit), domain)
        found["rows"] += 1
        found["dense_rows"] += units == 0
        found["kv_tokens"] += length
        found["attended_tokens"] += len(attended)
        found["selected_units"] += units
        found["selections"] += int(plan.reselect[row])
        found["refreshes"] += int(plan.refresh[row])
        found["cap_hits"] += units > 0 and wanted > capacity
        found["window_tokens"] += min(length, WINDOW) if units else length
    return found


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(4))
def test_counts_add_up_over_steps_and_skip_padding(impl: str, seed: int) -> None:
    source = random.Random(seed)
    rows, unit, capacity = (1, 5, 16, 23)[seed], (1, 16)[seed % 2], (400, 9)[seed % 2]
    slots = source.sample(range(1, rows + 4), rows)
    if seed:
        slots[-1] = 0
    own = [kernels.budget_row(source.randrange(300), source.random()) for _ in range(rows + 4)]
    budgets = torch.tensor(own, dtype=torch.int32, device=DEVICE)
    start = torch.zeros(rows + 4, dtype=torch.int32, device=DEVICE)
    start[slots[0]] = kernels.DENSE_REQUEST if seed else 0
    table = torch.zeros((rows + 4, 1024), dtype=torch.int32, device=DEVICE)
    plan = kernels.DecodePlan.allocate(rows + 3, 16, DEVICE)
    for name in ("seq_lens", "tail_start", "k_units", "request_slots", "reselect", "refresh"):
        getattr(plan, name).fill_(77)  # rows beyond the batch
    plan = plan.rows(rows)
    sums = torch.tensor([2**40] * len(kernels.COUNTS), device=DEVICE)
    expected = dict.fromkeys(kernels.COUNTS, 2**40)
    for _ in range(5):
        lengths = torch.tensor([source.randrange(1, 1024) for _ in range(rows)], device=DEVICE)
        kernels.plan_decode(
            kernels.TokenTable(table, torch.tensor(slots, device=DEVICE), lengths),
            kernels.RequestState(start, budgets),
            kernels.PlanRules(64, unit, capacity, 100, reselect_every=3, refresh_every=2),
            plan=plan,
            impl="torch",
        )
        kernels.count_decode(
            plan, budgets, sums, unit=unit, capacity_units=capacity, window=WINDOW, impl=impl
        )
        for name, count in naive_counts(plan, own, unit, capacity).items():
            expected[name] += count
    assert dict(zip(kernels.COUNTS, sums.tolist(), strict=True)) == expected


def test_bad_arguments_are_named() -> None:
    plan = kernels.DecodePlan.allocate(2, 4, DEVICE)
    budgets = torch.zeros((4, 2), dtype=torch.int32, device=DEVICE)
    sums = torch.zeros(len(kernels.COUNTS), dtype=torch.int64, device=DEVICE)
    settings = {"unit": 1, "capacity_units": 4, "impl": "torch"}
    with pytest.raises(ValueError, match="unit=0"):
        kernels.count_decode(plan, budgets, sums, **settings | {"unit": 0})
    with pytest.raises(ValueError, match="sums"):
        kernels.count_decode(plan, budgets, sums[:3], **settings)
    with pytest.raises(ValueError, match="budgets"):
        kernels.count_decode(plan, budgets.long(), sums, **settings)
    with pytest.raises(ValueError, match="impl='cuda'"):
        kernels.count_decode(plan, budgets, sums, **settings | {"impl": "cuda"})
