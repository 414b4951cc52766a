# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the per-batch decode plan."""

import torch

from .types import PPM, DecodePlan


def snapshot_page_table_reference(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.snapshot_page_table`."""
    columns = min(out.shape[1], -(-req_to_token.shape[1] // page_size))
    first_slots = req_to_token[req_pool_indices, ::page_size][:, :columns]
    num_pages = (seq_lens + page_size - 1) // page_size
    defined = torch.arange(columns, device=out.device) < num_pages[:, None]
    out[:, :columns] = torch.where(defined, (first_slots // page_size).int(), out[:, :columns])


def plan_decode_reference(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    decode_start: torch.Tensor,
    budgets: torch.Tensor,
    *,
    page_size: int,
    unit: int,
    capacity_units: int,
    min_sparse_tokens: int,
    reselect_every: int,
    refresh_every: int,
    plan: DecodePlan,
) -> None:
    """See :func:`sglang_sparse_kernels.plan_decode`."""
    snapshot_page_table_reference(
        req_to_token, req_pool_indices, seq_lens, page_size=page_size, out=plan.page_table
    )
    lens = seq_lens.long()
    first_sparse = (decode_start[req_pool_indices].long() + 1).clamp(min=min_sparse_tokens)
    age = lens - first_sparse
    sparse = age >= 0
    phase = age % reselect_every
    tail_start = torch.where(sparse, lens - 1 - phase, 0).clamp(min=0)

    floor, fraction_ppm = budgets[req_pool_indices].long().unbind(1)
    fraction_tokens = (tail_start * fraction_ppm + PPM - 1) // PPM
    k_tokens = torch.maximum(fraction_tokens, floor)
    domain_units = (tail_start + unit - 1) // unit
    k_units = torch.minimum((k_tokens + unit - 1) // unit, domain_units).clamp(max=capacity_units)
    k_units = torch.where(sparse, k_units, 0)
    # A row with nothing to select from is dense: the tail is all it needs.
    sparse = k_units > 0

    plan.seq_lens.copy_(lens)
    plan.tail_start.copy_(torch.where(sparse, tail_start, 0))
    plan.k_units.copy_(k_units)
    plan.reselect.copy_(sparse & (phase == 0))
    plan.refresh.copy_(sparse & (age % refresh_every == 0))
    plan.list_rows.copy_(req_pool_indices)
    plan.update_start.copy_((lens - 1).clamp(min=0))
