# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of the counts of a decode step: one program, so nothing is atomic."""

import torch
import triton
import triton.language as tl

from ..plan.types import DecodePlan

# Batches of up to so many rows share one compiled kernel, captured in a graph or not.
LEAST_ROWS = 256


@triton.jit
def _add(sums, i_count: tl.constexpr, b_values):
    tl.store(sums + i_count, tl.load(sums + i_count) + tl.sum(b_values.to(tl.int64), 0))


@triton.jit(do_not_specialize=["rows"])
def count_decode_kernel(
    seq_lens,
    tail_start,
    k_units,
    reselect,
    refresh,
    request_slots,
    budgets,
    sums,
    rows,
    capacity_units,
    window,
    UNIT: tl.constexpr,
    BR: tl.constexpr,
):
    o_r = tl.arange(0, BR)
    b_slot = tl.load(request_slots + o_r, mask=o_r < rows, other=0).to(tl.int64)
    m_r = b_slot > 0
    b_len = tl.load(seq_lens + o_r, mask=m_r, other=0).to(tl.int64)
    b_tail = tl.load(tail_start + o_r, mask=m_r, other=0).to(tl.int64)
    b_units = tl.load(k_units + o_r, mask=m_r, other=0).to(tl.int64)
    b_floor = tl.load(budgets + b_slot * 2, mask=m_r, other=0).to(tl.int64)
    b_ppm = tl.load(budgets + b_slot * 2 + 1, mask=m_r, other=0).to(tl.int64)
    m_sparse = b_units > 0
    b_domain = (b_tail + UNIT - 1) // UNIT
    # The last unit of the domain may be partly filled.
    b_listed = b_units * UNIT - (b_domain * UNIT - b_tail)
    b_wanted = tl.maximum((b_tail * b_ppm + 999999) // 1000000, b_floor)
    b_wanted = tl.minimum((b_wanted + UNIT - 1) // UNIT, b_domain)
    _add(sums, 0, m_r)
    _add(sums, 1, m_r & (b_units == 0))
    _add(sums, 2, b_len)
    _add(sums, 3, tl.where(m_sparse, b_listed + b_len - b_tail, b_len))
    _add(sums, 4, b_units)
    _add(sums, 5, tl.load(reselect + o_r, mask=m_r, other=0))
    _add(sums, 6, tl.load(refresh + o_r, mask=m_r, other=0))
    _add(sums, 7, m_sparse & (b_wanted > capacity_units))
    _add(sums, 8, tl.where(m_sparse, tl.minimum(b_len, window), b_len))


def count_decode_triton(
    plan: DecodePlan,
    budgets: torch.Tensor,
    sums: torch.Tensor,
    *,
    unit: int,
    capacity_units: int,
    window: int,
) -> None:
    """Launch :func:`count_decode_kernel`, one program for all rows."""
    count_decode_kernel[(1,)](
        plan.seq_lens,
        plan.tail_start,
        plan.k_units,
        plan.reselect,
        plan.refresh,
        plan.request_slots,
        budgets,
        sums,
        plan.num_rows,
        capacity_units,
        window,
        UNIT=unit,
        BR=max(LEAST_ROWS, triton.next_power_of_2(plan.num_rows)),
    )
