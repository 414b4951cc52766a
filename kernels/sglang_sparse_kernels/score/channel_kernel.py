# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of channel selection."""

import torch
import triton
import triton.language as tl

from ..plan import DecodePlan
from ..triton_ops import HeadShape, constants


@triton.jit
def best_channels(p_q, S: tl.constexpr, KEPT: tl.constexpr):
    """(kept or not, position among the kept) [BD] of the channels by the group's sum of |q|."""
    o_g, o_d = tl.arange(0, S.BG), tl.arange(0, S.BD)
    m_d = o_d < S.D
    m_q = (o_g < S.G)[:, None] & m_d[None, :]
    # [BG, BD]
    b_q = tl.load(p_q + o_g[:, None] * S.D + o_d[None, :], mask=m_q, other=0.0).to(tl.float32)
    b_i = tl.sum(tl.abs(b_q), 0)
    # NaN ranks last: all comparisons with it are false, and too many channels would be kept.
    b_i = tl.where(m_d & (b_i == b_i), b_i, -1.0)
    # [BD, BD]: entry (i, j) says that channel i ranks before channel j.
    row = tl.expand_dims(b_i, 1)
    col = tl.expand_dims(b_i, 0)
    before = (row > col) | ((row == col) & (o_d[:, None] < o_d[None, :]))
    m_kept = tl.sum(before.to(tl.int32), 0) < KEPT
    return m_kept, tl.cumsum(m_kept.to(tl.int32), 0) - 1


@triton.jit
def select_channels_kernel(
    q,
    channels,
    request_slots,
    refresh,
    k_units,
    stride_q,
    S: tl.constexpr,
    KEPT: tl.constexpr,
):
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    if (tl.load(refresh + i_r) != 0) & (tl.load(k_units + i_r) > 0):
        p_q = q + i_r.to(tl.int64) * stride_q + i_h * S.G * S.D
        o_d = tl.arange(0, S.BD)
        m_kept, o_c = best_channels(p_q, S, KEPT)
        i_l = tl.load(request_slots + i_r).to(tl.int64)
        tl.store(channels + (i_l * S.H + i_h) * KEPT + o_c, o_d, mask=m_kept)


def select_channels_triton(q: torch.Tensor, channels: torch.Tensor, plan: DecodePlan) -> None:
    """Launch :func:`select_channels_kernel`, one program a row and KV head."""
    _, heads, kept = channels.shape
    select_channels_kernel[(q.shape[0], heads)](
        q, channels, plan.request_slots, plan.refresh, plan.k_units, q.stride(0),
        S=constants(HeadShape.of(q, heads)), KEPT=kept, num_warps=4,
    )  # fmt: skip
