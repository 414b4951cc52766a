# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of eviction at the end of a stride.

The first launch finds the winners of each level, with a program for each row, layer and KV head.
The second moves what is kept, in place. A kept token never moves to a later row, and tokens keep
their order. So a program that goes through the rows in order overwrites none that it has yet to
read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..triton_ops import constants
from .device_ops import StateArgs
from .types import CascadeShape, CascadeState

PAIRS, WARPS = 256, 4
# Kept rows and channels that a program moves at a time. Channels are divided among programs, since
# rows must be moved in order: with a program a head, a layer would leave most of a GPU idle.
MOVED, CHANNELS, MOVE_WARPS = 256, 32, 8


class Levels(NamedTuple):
    """A :class:`.types.CascadeShape` as these kernels take it."""

    SINKS: int
    WINDOW: int
    STRIDE: int
    ROWS: int
    N: int
    SIZE: int

    @classmethod
    def of(cls, shape: CascadeShape) -> "Levels":
        sizes = (shape.sinks, shape.window, shape.stride, shape.rows)
        return cls(*sizes, shape.levels, shape.level)


@triton.jit
def _closes(tokens, C: tl.constexpr):
    """Whether the stride of a request of ``tokens`` tokens is full behind a full window."""
    beyond = tokens - C.SINKS - C.WINDOW
    return (beyond > 0) & (beyond % C.STRIDE == 0)


@triton.jit
def _queued(winners, o, level, gained, C: tl.constexpr):
    """Tokens ``o`` of a level's queue: its own, then the ``gained`` ones that won.

    Tokens are numbered by their place behind the sinks. The queue of level 0 has the stride behind
    its own tokens. ``level`` and ``gained`` are numbers, or one for each of ``o``.
    """
    o_own = (C.N - 1 - level) * C.SIZE + o
    m_won = (o >= C.SIZE) & (level > 0)
    # Winners of level 1 fill S / 2 entries, those of level 2 the next S / 4, and so on.
    o_won = C.STRIDE - 2 * gained + o - C.SIZE
    return tl.where(m_won, tl.load(winners + o_won, mask=m_won, other=0), o_own)


@triton.jit
def find_winners_kernel(
    scores, slots, tokens, winners, slots_count, C: tl.constexpr, H: tl.constexpr, BP: tl.constexpr
):
    i_r, i_lh = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + i_r).to(tl.int64)
    if (slot >= 0) & _closes(tl.load(tokens + i_r), C):
        p_won = winners + (i_r.to(tl.int64) * tl.num_programs(1) + i_lh) * C.STRIDE
        i_state = ((i_lh // H).to(tl.int64) * slots_count + slot) * H + i_lh % H
        p_score = scores + i_state * C.ROWS + C.SINKS
        for level in tl.static_range(1, C.N):
            pairs = C.STRIDE >> level
            for i_p in range(0, pairs, BP):
                o_p = i_p + tl.arange(0, BP)
                m_p = o_p < pairs
                o_pair = tl.where(m_p, 2 * o_p, 0)
                b_one = _queued(p_won, o_pair, level - 1, 2 * pairs, C)
                b_two = _queued(p_won, o_pair + 1, level - 1, 2 * pairs, C)
                b_held = tl.load(p_score + b_one)
                b_new = tl.load(p_score + b_two)
                b_won = tl.where(b_new >= b_held, b_two, b_one)
                tl.store(p_won + C.STRIDE - 2 * pairs + o_p, b_won, mask=m_p)
            # The next level reads what other threads wrote.
            tl.debug_barrier()


@triton.jit
def move_kept_kernel(
    state, slots, tokens, winners, slots_count, C: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i_r, i_lh, i_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_r).to(tl.int64)
    if (slot >= 0) & _closes(tl.load(tokens + i_r), C):
        p_won = winners + (i_r.to(tl.int64) * tl.num_programs(1) + i_lh) * C.STRIDE
        i_state = ((i_lh // H).to(tl.int64) * slots_count + slot) * H + i_lh % H
        row = i_state * C.ROWS + C.SINKS
        o_d = i_part // 2 * BD + tl.arange(0, BD)
        for i_n in range(0, C.WINDOW, BN):
            o_n = i_n + tl.arange(0, BN)
            m_n = o_n < C.WINDOW
            b_level = C.N - 1 - tl.minimum(o_n, C.WINDOW - 1) // C.SIZE
            # A level gives up its oldest tokens, as many as it gains.
            b_gained = C.STRIDE >> b_level
            b_from = _queued(p_won, b_gained + o_n % C.SIZE, b_level, b_gained, C)
            if i_part == 2 * (D // BD):
                b_score = tl.load(state.scores + row + b_from, mask=m_n)
                tl.debug_barrier()
                tl.store(state.scores + row + o_n, b_score, mask=m_n)
            else:
                p_x = state.v if i_part % 2 == 1 else state.k
                b_x = tl.load(p_x + (row + b_from)[:, None] * D + o_d[None, :], mask=m_n[:, None])
                # No thread may overwrite a row that another one of this tile has yet to read.
                tl.debug_barrier()
                tl.store(p_x + (row + o_n)[:, None] * D + o_d[None, :], b_x, mask=m_n[:, None])


def close_strides_triton(
    state: CascadeState, slots: torch.Tensor, tokens: torch.Tensor, winners: torch.Tensor
) -> None:
    """Launch :func:`find_winners_kernel` and :func:`move_kept_kernel`, some rows at a time.

    Raises:
        ValueError: if ``winners`` is too small for one row.
    """
    layers, slots_count, heads, _, dim = state.k.shape
    most, width, stride = winners.shape
    if not most or width < layers * heads or stride != state.shape.stride:
        raise ValueError(f"winners has shape {tuple(winners.shape)}, too small for {layers} layers")
    shape = constants(Levels.of(state.shape))
    for first in range(0, slots.shape[0], most):
        some = slice(first, first + most)
        rows = slots[some].shape[0]
        pairs = min(PAIRS, next_power_of_2(max(1, stride // 2)))
        find_winners_kernel[(rows, layers * heads)](
            state.scores, slots[some], tokens[some], winners, slots_count, C=shape, H=heads,
            BP=pairs, num_warps=WARPS,
        )  # fmt: skip
        move_kept_kernel[(rows, layers * heads, 2 * (dim // CHANNELS) + 1)](
            StateArgs.of(state), slots[some], tokens[some], winners, slots_count, C=shape, H=heads,
            D=dim, BN=MOVED, BD=CHANNELS, num_warps=MOVE_WARPS,
        )  # fmt: skip
