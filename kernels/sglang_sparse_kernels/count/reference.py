# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the counts of a decode step."""

import torch

from ..plan.types import PPM, DecodePlan


def count_decode_reference(
    plan: DecodePlan,
    budgets: torch.Tensor,
    sums: torch.Tensor,
    *,
    unit: int,
    capacity_units: int,
    window: int,
) -> None:
    """See :func:`sglang_sparse_kernels.count_decode`."""
    real = plan.request_slots > 0
    lens, tail, units = (t[real].long() for t in (plan.seq_lens, plan.tail_start, plan.k_units))
    sparse = units > 0
    # The last unit of the domain may be partly filled.
    list_tokens = units * unit - (-tail) % unit
    attended = torch.where(sparse, list_tokens + lens - tail, lens)
    floor, fraction_ppm = budgets[plan.request_slots[real].long()].long().unbind(1)
    wanted = torch.maximum((tail * fraction_ppm + PPM - 1) // PPM, floor)
    wanted_units = torch.minimum((wanted + unit - 1) // unit, (tail + unit - 1) // unit)
    counts = (
        torch.ones_like(lens),
        ~sparse,
        lens,
        attended,
        units,
        plan.reselect[real],
        plan.refresh[real],
        sparse & (wanted_units > capacity_units),
        torch.where(sparse, lens.clamp(max=window), lens),
    )
    sums += torch.stack([count.long().sum() for count in counts])
