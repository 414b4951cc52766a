# SPDX-License-Identifier: Apache-2.0
"""Public planning functions: validate, then dispatch to the implementation asked for."""

import torch

from ..common import IMPLS, Impl, check_choice
from .reference import plan_decode_reference, snapshot_page_table_reference
from .types import DecodePlan, PlanRules, RequestState, TokenTable


def snapshot_page_table(
    tokens: TokenTable, *, page_size: int, out: torch.Tensor, impl: Impl
) -> None:
    """Copy the physical pages of each row's request out of SGLang's token table.

    Args:
        tokens: R rows.
        page_size: tokens a physical page: 16, 32 or 64.
        out: int32 [R, max_pages]; entry (r, j) becomes the page of positions
            [j * page_size, (j + 1) * page_size). Entries past a row's length stay untouched.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or page size, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    tokens.check(page_size, out)
    if impl != "triton":
        snapshot_page_table_reference(tokens, page_size=page_size, out=out)
        return
    from .kernel import snapshot_page_table_triton

    snapshot_page_table_triton(tokens, page_size=page_size, out=out)


def plan_decode(
    tokens: TokenTable, state: RequestState, rules: PlanRules, *, plan: DecodePlan, impl: Impl
) -> None:
    """Fill ``plan`` for one decode step of R rows, all on the device.

    With L = seq_lens[r] and first_sparse = max(min_sparse_tokens, decode_start + 1), a row with
    L < first_sparse is dense: k_units = tail_start = 0, so that the tail is the whole request.
    Any other row selects from positions [0, tail_start), tail_start = L - 1 - phase with
    phase = (L - first_sparse) % reselect_every, and reselects where phase is 0. The budget is
    max(floor, ceil(fraction * tail_start)) tokens, by the request's own floor and fraction. It is
    rounded up to units, and is at most ``capacity_units`` and the number of units in the domain.
    Channels are refreshed where (L - first_sparse) % refresh_every is 0 (SparCas section 3.4,
    interval U).

    Args:
        tokens: R rows.
        state: of all requests.
        rules: of the server.
        plan: buffers of exactly R rows (see :meth:`DecodePlan.rows`).
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or page size, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    tokens.check(rules.page_size, plan.page_table)
    if impl != "triton":
        plan_decode_reference(tokens, state, rules, plan=plan)
        return
    from .kernel import plan_decode_triton

    plan_decode_triton(tokens, state, rules, plan=plan)
