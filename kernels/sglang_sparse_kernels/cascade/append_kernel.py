# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of storing new tokens in the rows of their cache positions."""

import torch
import triton
import triton.language as tl

from ..triton_ops import constants
from .device_ops import BatchArgs, Shape, StateArgs, batch_row
from .types import CascadeBatch, CascadeState

TILE_TOKENS = 32


@triton.jit
def append_tokens_kernel(
    k, v, state, batch, stride_k, stride_v, C: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    i_r, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    slot, begin, new, held = batch_row(batch, i_r, C)
    o_t, o_d = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, D)
    m_t = (o_t < new) & (held > 0)
    o_x = (begin + o_t).to(tl.int64)
    o_row = (slot * H + i_h) * C.ROWS + held - new + o_t
    o_kv = o_row[:, None] * D + o_d[None, :]
    b_k = tl.load(k + o_x[:, None] * stride_k + i_h * D + o_d[None, :], mask=m_t[:, None])
    b_v = tl.load(v + o_x[:, None] * stride_v + i_h * D + o_d[None, :], mask=m_t[:, None])
    tl.store(state.k + o_kv, b_k, mask=m_t[:, None])
    tl.store(state.v + o_kv, b_v, mask=m_t[:, None])
    tl.store(state.scores + o_row, tl.zeros((BT,), tl.float32), mask=m_t)


def append_tokens_triton(
    k: torch.Tensor, v: torch.Tensor, state: CascadeState, batch: CascadeBatch
) -> None:
    """Launch :func:`append_tokens_kernel`."""
    _, heads, dim = k.shape
    tile = 1 if batch.most_new == 1 else TILE_TOKENS
    grid = (batch.num_rows * heads, triton.cdiv(batch.most_new, tile))
    append_tokens_kernel[grid](
        k, v, StateArgs.of(state), BatchArgs.of(batch), k.stride(0), v.stride(0),
        C=constants(Shape.of(state.shape)), H=heads, D=dim, BT=tile, num_warps=4,
    )  # fmt: skip
