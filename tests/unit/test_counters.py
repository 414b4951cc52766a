# SPDX-License-Identifier: Apache-2.0
"""Counts of decode steps reach the host without a step that waits for them."""

import torch
from machine import HAS_GPU

from sglang_sparse.backend.counters import DecodeCounters
from sglang_sparse_kernels import DecodePlan, budget_row

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def step_of(counters: DecodeCounters, length: int) -> None:
    """Count one dense row of `length` tokens."""
    plan = DecodePlan.allocate(1, 4, DEVICE)
    plan.request_slots.fill_(1)
    plan.seq_lens.fill_(length)
    budgets = torch.tensor([budget_row(64, 0.0)] * 2, dtype=torch.int32, device=DEVICE)
    counters.count(plan, budgets)


def test_a_snapshot_is_taken_behind_the_step_after_it_was_asked_for() -> None:
    counters = DecodeCounters(
        unit=1, capacity_units=64, impl="triton" if HAS_GPU else "torch", device=DEVICE
    )
    assert counters.poll() is None
    step_of(counters, 10)  # the first step behind the question: this is what the snapshot holds
    step_of(counters, 20)
    if HAS_GPU:
        torch.cuda.synchronize()
    found = counters.poll()
    assert found is not None
    assert (found["rows"], found["kv_tokens"]) == (1, 10)
    step_of(counters, 30)
    if HAS_GPU:
        torch.cuda.synchronize()
    again = counters.poll()
    assert again is not None
    assert (again["rows"], again["kv_tokens"]) == (3, 60)


def test_reading_gives_everything_and_settles_what_changed() -> None:
    counters = DecodeCounters(
        unit=1, capacity_units=64, impl="triton" if HAS_GPU else "torch", device=DEVICE
    )
    assert not counters.changed
    step_of(counters, 7)
    assert counters.changed
    found = counters.read()
    assert (found["dense_rows"], found["attended_tokens"]) == (1, 7)
    assert not counters.changed


def test_a_snapshot_older_than_what_was_read_is_dropped() -> None:
    counters = DecodeCounters(
        unit=1, capacity_units=64, impl="triton" if HAS_GPU else "torch", device=DEVICE
    )
    counters.poll()
    step_of(counters, 1)  # its snapshot is on its way
    step_of(counters, 2)
    assert counters.read()["kv_tokens"] == 3
    assert counters.poll() is None
    step_of(counters, 3)
    if HAS_GPU:
        torch.cuda.synchronize()
    found = counters.poll()
    assert found is not None
    assert found["kv_tokens"] == 6
