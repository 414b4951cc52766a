# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of rotation: the queries and keys of a prompt's stride, once a layer.

Attention reads each key for every tile of queries, and the mass pass each query for every tile of
keys. Both read what is written here, rounded as a dense cache holds it.
"""

import torch
import triton
import triton.language as tl

from ..triton_ops import constants
from .device_ops import BatchArgs, Shape, StateArgs, batch_row, rotated
from .types import CascadeBatch, CascadeState

TILE_TOKENS, WARPS = 32, 4


@triton.jit
def _store_halves(p_x, b_low, b_high, m, D: tl.constexpr):
    o_d = tl.arange(0, D // 2)[None, :]
    tl.store(p_x + o_d, b_low, mask=m[:, None])
    tl.store(p_x + D // 2 + o_d, b_high, mask=m[:, None])


@triton.jit
def rotate_queries_kernel(
    q, batch, cos_sin, out, stride_q, C: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    i_r, i_h = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    _, begin, new, held = batch_row(batch, i_r, C)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = (o_t < new) & (held > 0)
    o_x = (begin + o_t).to(tl.int64)[:, None]
    p_q = q + o_x * stride_q + i_h * D
    b_low, b_high = rotated(p_q, cos_sin, tl.maximum(held - new, 0) + o_t, m_t, D)
    _store_halves(out + (o_x * HEADS + i_h) * D, b_low, b_high, m_t, D)


@triton.jit
def rotate_keys_kernel(
    state, batch, cos_sin, out, C: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr
):
    i_r, i_h = tl.program_id(1) // H, tl.program_id(1) % H
    slot, _, _, held = batch_row(batch, i_r, C)
    o_n = tl.program_id(0) * BT + tl.arange(0, BT)
    m_n = o_n < held
    o_k = ((slot * H + i_h) * C.ROWS + o_n)[:, None] * D
    b_low, b_high = rotated(state.k + o_k, cos_sin, o_n, m_n, D)
    o_out = ((i_r.to(tl.int64) * H + i_h) * C.ROWS + o_n)[:, None] * D
    _store_halves(out + o_out, b_low, b_high, m_n, D)


def rotate_triton(
    q: torch.Tensor, state: CascadeState, batch: CascadeBatch, cos_sin: torch.Tensor, *,
    queries: torch.Tensor, keys: torch.Tensor,
) -> None:  # fmt: skip
    """Launch both kernels.

    Args:
        q: [tokens, H * G, D] before rotation, any stride between tokens.
        state: of one layer.
        batch: the rows.
        cos_sin: float32 [positions, D].
        queries: q's shape and dtype, contiguous: new tokens of these rows are written.
        keys: [rows, H, shape.rows, D], contiguous: as many as each row holds are written.
    """
    _, query_heads, dim = q.shape
    args, info, heads = BatchArgs.of(batch), constants(Shape.of(state.shape)), state.num_heads
    rotate_queries_kernel[
        (triton.cdiv(batch.most_new, TILE_TOKENS), batch.num_rows * query_heads)
    ](
        q, args, cos_sin, queries, q.stride(0), C=info, HEADS=query_heads, D=dim, BT=TILE_TOKENS,
        num_warps=WARPS,
    )  # fmt: skip
    rotate_keys_kernel[(triton.cdiv(state.shape.rows, TILE_TOKENS), batch.num_rows * heads)](
        StateArgs.of(state), args, cos_sin, keys, C=info, H=heads, D=dim, BT=TILE_TOKENS,
        num_warps=WARPS,
    )  # fmt: skip
