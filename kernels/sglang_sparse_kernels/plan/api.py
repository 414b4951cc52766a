# SPDX-License-Identifier: Apache-2.0
"""Public planning functions: validate, then dispatch to the implementation asked for."""

import torch

from ..common import IMPLS, Impl, check_choice, check_dtype, check_shape
from .reference import plan_decode_reference, snapshot_page_table_reference
from .types import DecodePlan


def _check_requests(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    impl: str,
) -> None:
    check_choice("impl", impl, IMPLS)
    check_shape("req_to_token", req_to_token, (-1, -1))
    check_dtype("req_to_token", req_to_token, torch.int32)
    check_dtype("req_pool_indices", req_pool_indices, torch.int32, torch.int64)
    check_dtype("seq_lens", seq_lens, torch.int32, torch.int64)
    check_shape("req_pool_indices", req_pool_indices, (seq_lens.shape[0],))
    check_shape("page_table", out, (seq_lens.shape[0], -1))
    check_dtype("page_table", out, torch.int32)
    if page_size not in (16, 32, 64):
        raise ValueError(f"page_size={page_size} is not supported; choose one of 16, 32, 64")


def snapshot_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor,
    impl: Impl,
) -> None:
    """Copy the physical pages of each row's request out of SGLang's token table.

    Args:
        req_to_token: int32 [request slots, max context], KV slot of each position.
        req_pool_indices: int32 or int64 [R], request slot of each row.
        seq_lens: int32 or int64 [R], tokens of each row.
        page_size: tokens a physical page: 16, 32 or 64.
        out: int32 [R, max_pages]; entry (r, j) becomes the page of positions
            [j * page_size, (j + 1) * page_size). Entries past a row's length stay untouched.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or page size, a wrong dtype or shape.
    """
    _check_requests(req_to_token, req_pool_indices, seq_lens, page_size, out, impl)
    if impl == "torch":
        snapshot_page_table_reference(
            req_to_token, req_pool_indices, seq_lens, page_size=page_size, out=out
        )
        return
    from .kernel import snapshot_page_table_triton

    snapshot_page_table_triton(
        req_to_token, req_pool_indices, seq_lens, page_size=page_size, out=out
    )


def plan_decode(
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
    impl: Impl,
) -> None:
    """Fill ``plan`` for one decode step of R rows, all on the device.

    With L = seq_lens[r] and first_sparse = max(min_sparse_tokens, decode_start + 1), a row with
    L < first_sparse is dense: k_units = tail_start = 0, so that the tail is the whole request.
    Any other row selects from positions [0, tail_start), tail_start = L - 1 - phase with
    phase = (L - first_sparse) % reselect_every, and reselects where phase is 0. The budget is
    max(floor, ceil(fraction * tail_start)) tokens of its request's own floor and fraction, in
    units rounded up, at most ``capacity_units`` and at most the units there are. Channels are
    refreshed where (L - first_sparse) % refresh_every is 0 (SparCas section 3.4, interval U).

    Args:
        req_to_token: int32 [request slots, max context], KV slot of each position.
        req_pool_indices: int32 or int64 [R].
        seq_lens: int32 or int64 [R], the token being decoded included.
        decode_start: int32 [request slots], tokens a request had when its last prefill ended;
            :data:`DENSE_REQUEST` keeps a request dense.
        budgets: int32 [request slots, 2], contiguous: floor in tokens and fraction in millionths
            of each request (:func:`budget_row`).
        page_size: tokens a physical page: 16, 32 or 64.
        unit: tokens a selection unit (1: tokens; 16: logical pages); divides ``page_size``.
        capacity_units: units a list holds.
        min_sparse_tokens: rows shorter than this are dense.
        reselect_every: steps between selections (C), at least 1.
        refresh_every: steps between channel refreshes (U), at least 1.
        plan: buffers of exactly R rows (see :meth:`DecodePlan.rows`).
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a number out of range.
    """
    _check_requests(req_to_token, req_pool_indices, seq_lens, page_size, plan.page_table, impl)
    check_dtype("decode_start", decode_start, torch.int32)
    check_dtype("budgets", budgets, torch.int32)
    check_shape("budgets", budgets, (decode_start.shape[0], 2))
    if not budgets.is_contiguous():
        raise ValueError("budgets must be contiguous")
    if unit < 1 or page_size % unit:
        raise ValueError(f"unit={unit} must divide page_size={page_size}")
    at_least_one = {
        "capacity_units": capacity_units,
        "reselect_every": reselect_every,
        "refresh_every": refresh_every,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if min_sparse_tokens < 0:
        raise ValueError(f"min_sparse_tokens={min_sparse_tokens} must not be negative")
    settings = {
        "page_size": page_size,
        "unit": unit,
        "capacity_units": capacity_units,
        "min_sparse_tokens": min_sparse_tokens,
        "reselect_every": reselect_every,
        "refresh_every": refresh_every,
    }
    if impl == "torch":
        plan_decode_reference(
            req_to_token, req_pool_indices, seq_lens, decode_start, budgets, plan=plan, **settings
        )
        return
    from .kernel import plan_decode_triton

    plan_decode_triton(
        req_to_token, req_pool_indices, seq_lens, decode_start, budgets, plan=plan, **settings
    )
