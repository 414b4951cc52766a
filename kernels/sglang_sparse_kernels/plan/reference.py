# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the per-batch decode plan."""

import torch

from .types import PPM, DecodePlan, PlanRules, RequestState, TokenTable


def snapshot_page_table_reference(tokens: TokenTable, *, page_size: int, out: torch.Tensor) -> None:
    """See :func:`sglang_sparse_kernels.snapshot_page_table`."""
    columns = min(out.shape[1], -(-tokens.req_to_token.shape[1] // page_size))
    first_slots = tokens.req_to_token[tokens.request_slots, ::page_size][:, :columns]
    num_pages = (tokens.seq_lens + page_size - 1) // page_size
    defined = torch.arange(columns, device=out.device) < num_pages[:, None]
    out[:, :columns] = torch.where(defined, (first_slots // page_size).int(), out[:, :columns])


def plan_decode_reference(
    tokens: TokenTable, state: RequestState, rules: PlanRules, *, plan: DecodePlan
) -> None:
    """See :func:`sglang_sparse_kernels.plan_decode`."""
    snapshot_page_table_reference(tokens, page_size=rules.page_size, out=plan.page_table)
    slots, unit = tokens.request_slots, rules.unit
    lens = tokens.seq_lens.long()
    first_sparse = (state.decode_start[slots].long() + 1).clamp(min=rules.min_sparse_tokens)
    age = lens - first_sparse
    sparse = age >= 0
    phase = age % rules.reselect_every
    tail_start = torch.where(sparse, lens - 1 - phase, 0).clamp(min=0)

    floor, fraction_ppm = state.budgets[slots].long().unbind(1)
    fraction_tokens = (tail_start * fraction_ppm + PPM - 1) // PPM
    k_tokens = torch.maximum(fraction_tokens, floor)
    domain_units = (tail_start + unit - 1) // unit
    k_units = torch.minimum((k_tokens + unit - 1) // unit, domain_units)
    k_units = k_units.clamp(max=rules.capacity_units)
    k_units = torch.where(sparse, k_units, 0)
    # A row with nothing to select from is dense: the tail is all it needs.
    sparse = k_units > 0

    plan.seq_lens.copy_(lens)
    plan.tail_start.copy_(torch.where(sparse, tail_start, 0))
    plan.k_units.copy_(k_units)
    plan.reselect.copy_(sparse & (phase == 0))
    plan.refresh.copy_(sparse & (age % rules.refresh_every == 0))
    plan.request_slots.copy_(slots)
    plan.update_start.copy_((lens - 1).clamp(min=0))
