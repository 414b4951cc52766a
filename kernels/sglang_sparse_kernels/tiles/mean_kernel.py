# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of the mean query of each tile."""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..triton_ops import cast
from .types import TilePlan


@triton.jit
def tile_mean_kernel(
    q, q_rows, first, seq_lens, out, stride_q, HQ: tl.constexpr, D: tl.constexpr, BT: tl.constexpr
):
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    count = tl.load(seq_lens + i_t) - tl.load(first + i_t)
    o_t, o_d = tl.arange(0, BT), tl.arange(0, D)
    o_q = (tl.load(q_rows + i_t) + o_t).to(tl.int64)
    p_q = q + o_q[:, None] * stride_q + i_h * D + o_d[None, :]
    # [BT, D]
    b_q = tl.load(p_q, mask=(o_t < count)[:, None], other=0.0).to(tl.float32)
    b_mean = tl.sum(b_q, 0) / count
    p_out = out + (i_t.to(tl.int64) * HQ + i_h) * D + o_d
    tl.store(p_out, cast(b_mean, out.dtype.element_ty))


def tile_mean_triton(q: torch.Tensor, plan: TilePlan, out: torch.Tensor) -> None:
    """Launch :func:`tile_mean_kernel`, one program a tile and query head."""
    tiles, heads, dim = out.shape
    tile_mean_kernel[(tiles, heads)](
        q, plan.q_rows, plan.rows.update_start, plan.rows.seq_lens, out, q.stride(0),
        HQ=heads, D=dim, BT=next_power_of_2(plan.tile_tokens), num_warps=4,
    )  # fmt: skip
