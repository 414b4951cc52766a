# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of the per-batch decode plan: one launch, page table included."""

import torch
import triton
import triton.language as tl

from .types import DecodePlan, PlanRules, RequestState, TokenTable

# Measured on one H200.
PAGES_PER_PROGRAM = 512


def _page_tiles(max_pages: int) -> int:
    return triton.cdiv(max_pages, PAGES_PER_PROGRAM)


@triton.jit
def _copy_pages(
    req_to_token,
    page_table,
    i_req,
    seq_len,
    stride_req,
    stride_table,
    max_pages,
    PAGE: tl.constexpr,
    BP: tl.constexpr,
):
    i_r = tl.program_id(0)
    o_p = tl.program_id(1) * BP + tl.arange(0, BP)
    m_p = (o_p < tl.cdiv(seq_len, PAGE)) & (o_p < max_pages)
    # [BP], one slot a page
    b_slot = tl.load(req_to_token + i_req * stride_req + o_p * PAGE, mask=m_p, other=0)
    tl.store(page_table + i_r.to(tl.int64) * stride_table + o_p, b_slot // PAGE, mask=m_p)


@triton.jit
def snapshot_page_table_kernel(
    req_to_token,
    request_slots,
    seq_lens,
    page_table,
    stride_req,
    stride_table,
    max_pages,
    PAGE: tl.constexpr,
    BP: tl.constexpr,
):
    i_r = tl.program_id(0)
    i_req = tl.load(request_slots + i_r).to(tl.int64)
    seq_len = tl.load(seq_lens + i_r).to(tl.int32)
    _copy_pages(
        req_to_token, page_table, i_req, seq_len, stride_req, stride_table, max_pages, PAGE, BP
    )


@triton.jit
def plan_decode_kernel(
    req_to_token,
    request_slots,
    seq_lens,
    decode_start,
    budgets,
    page_table,
    out_seq_lens,
    out_tail_start,
    out_k_units,
    out_reselect,
    out_refresh,
    out_request_slots,
    out_update_start,
    stride_req,
    stride_table,
    max_pages,
    capacity_units,
    min_sparse_tokens,
    reselect_every,
    refresh_every,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BP: tl.constexpr,
):
    i_r = tl.program_id(0)
    i_req = tl.load(request_slots + i_r).to(tl.int64)
    seq_len = tl.load(seq_lens + i_r).to(tl.int32)
    _copy_pages(
        req_to_token, page_table, i_req, seq_len, stride_req, stride_table, max_pages, PAGE, BP
    )
    if tl.program_id(1) == 0:
        first_sparse = tl.maximum(tl.load(decode_start + i_req) + 1, min_sparse_tokens)
        age = tl.maximum(seq_len - first_sparse, 0)
        phase = age % reselect_every
        tail_start = tl.where(seq_len >= first_sparse, tl.maximum(seq_len - 1 - phase, 0), 0)
        floor_tokens = tl.load(budgets + i_req * 2)
        fraction_ppm = tl.load(budgets + i_req * 2 + 1)
        fraction_tokens = (tail_start.to(tl.int64) * fraction_ppm + 999999) // 1000000
        k_tokens = tl.maximum(fraction_tokens, floor_tokens)
        k_units = tl.minimum((k_tokens + UNIT - 1) // UNIT, (tail_start + UNIT - 1) // UNIT)
        k_units = tl.minimum(k_units, capacity_units).to(tl.int32)
        sparse = (k_units > 0).to(tl.int32)
        tl.store(out_seq_lens + i_r, seq_len)
        tl.store(out_tail_start + i_r, tail_start * sparse)
        tl.store(out_k_units + i_r, k_units)
        tl.store(out_reselect + i_r, tl.where(phase == 0, sparse, 0))
        tl.store(out_refresh + i_r, tl.where(age % refresh_every == 0, sparse, 0))
        tl.store(out_request_slots + i_r, i_req.to(tl.int32))
        tl.store(out_update_start + i_r, tl.maximum(seq_len - 1, 0))


def _max_pages(tokens: TokenTable, page_table: torch.Tensor, page_size: int) -> int:
    return min(page_table.shape[1], triton.cdiv(tokens.req_to_token.shape[1], page_size))


def snapshot_page_table_triton(tokens: TokenTable, *, page_size: int, out: torch.Tensor) -> None:
    """Launch :func:`snapshot_page_table_kernel`, one program a row and tile of pages."""
    max_pages = _max_pages(tokens, out, page_size)
    snapshot_page_table_kernel[(out.shape[0], _page_tiles(max_pages))](
        tokens.req_to_token, tokens.request_slots, tokens.seq_lens, out,
        tokens.req_to_token.stride(0), out.stride(0), max_pages,
        PAGE=page_size, BP=PAGES_PER_PROGRAM,
    )  # fmt: skip


def plan_decode_triton(
    tokens: TokenTable, state: RequestState, rules: PlanRules, *, plan: DecodePlan
) -> None:
    """Launch :func:`plan_decode_kernel`, one program a row and tile of pages."""
    max_pages = _max_pages(tokens, plan.page_table, rules.page_size)
    plan_decode_kernel[(plan.num_rows, _page_tiles(max_pages))](
        tokens.req_to_token, tokens.request_slots, tokens.seq_lens, state.decode_start,
        state.budgets, plan.page_table, plan.seq_lens, plan.tail_start, plan.k_units, plan.reselect,
        plan.refresh, plan.request_slots, plan.update_start, tokens.req_to_token.stride(0),
        plan.page_table.stride(0), max_pages, rules.capacity_units, rules.min_sparse_tokens,
        rules.reselect_every, rules.refresh_every,
        PAGE=rules.page_size, UNIT=rules.unit, BP=PAGES_PER_PROGRAM,
    )  # fmt: skip
