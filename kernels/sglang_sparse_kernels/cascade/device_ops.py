# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Device functions of the cascading cache: how many tokens are held, and rotation in registers."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..triton_ops import cast
from .types import CascadeBatch, CascadeShape, CascadeState


class Shape(NamedTuple):
    """A :class:`.types.CascadeShape` as kernels take it."""

    FULL: int
    STRIDE: int
    ROWS: int

    @classmethod
    def of(cls, shape: CascadeShape) -> "Shape":
        return cls(shape.full, shape.stride, shape.rows)


class StateArgs(NamedTuple):
    """A layer of a :class:`.types.CascadeState` as kernels take it."""

    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def of(cls, state: CascadeState) -> "StateArgs":
        return cls(state.k, state.v, state.scores)


class BatchArgs(NamedTuple):
    """A :class:`.types.CascadeBatch` as kernels take it."""

    slots: torch.Tensor
    seq_lens: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, batch: CascadeBatch) -> "BatchArgs":
        return cls(batch.slots, batch.seq_lens, batch.first)


@triton.jit
def held_tokens(tokens, FULL: tl.constexpr, STRIDE: tl.constexpr):
    """Tokens that a request of ``tokens`` tokens holds, the last of them included."""
    beyond = tokens - FULL
    return tl.where(beyond > 0, FULL + (tl.maximum(beyond, 1) - 1) % STRIDE + 1, tokens)


@triton.jit
def batch_row(batch, i_r, C: tl.constexpr):
    """(slot, first new token, new tokens, tokens held) of a row; nothing is held in padding."""
    slot = tl.load(batch.slots + i_r).to(tl.int64)
    begin = tl.load(batch.first + i_r)
    new = tl.load(batch.first + i_r + 1) - begin
    held = held_tokens(tl.load(batch.seq_lens + i_r), C.FULL, C.STRIDE)
    is_row = slot >= 0
    return tl.maximum(slot, 0), begin, new, tl.where(is_row, held, 0)


@triton.jit
def rotated(p_x, cos_sin, o_p, m, D: tl.constexpr):
    """Two halves [N, D / 2] of vectors at ``p_x`` [N, 1], rotated for cache positions ``o_p`` [N].

    ``m`` [N] says which there are; others are 0. Rounded to the dtype in memory, as a dense cache
    holds them.
    """
    o_d = tl.arange(0, D // 2)[None, :]
    b_low = tl.load(p_x + o_d, mask=m[:, None], other=0.0).to(tl.float32)
    b_high = tl.load(p_x + D // 2 + o_d, mask=m[:, None], other=0.0).to(tl.float32)
    p_c = cos_sin + o_p[:, None] * D + o_d
    b_cos = tl.load(p_c, mask=m[:, None], other=0.0)
    b_sin = tl.load(p_c + D // 2, mask=m[:, None], other=0.0)
    dtype: tl.constexpr = p_x.dtype.element_ty
    return (
        cast(b_low * b_cos - b_high * b_sin, dtype),
        cast(b_high * b_cos + b_low * b_sin, dtype),
    )
