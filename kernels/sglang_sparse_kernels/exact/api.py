# SPDX-License-Identifier: Apache-2.0
"""Public exact scoring: validates, then dispatches to the implementation asked for."""

from typing import Literal, get_args

import torch

from ..common import (
    IMPLS,
    Impl,
    check_choice,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
    group_size,
)
from ..plan import DecodePlan
from ..select import padded_blocks
from .reference import exact_score_reference
from .types import ExactWorkspace

Pool = Literal["group", "heads"]
POOLS: tuple[str, ...] = get_args(Pool)


def exact_score(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    plan: DecodePlan,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float = 0.0,
    pool: Pool,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
    workspace: ExactWorkspace | None = None,
    impl: Impl,
) -> None:
    """Attention probability of every token of the domain, pooled (Kascade sections 3.4 and 3.6).

    score(h, t) = log2 of the sum of p_j(t) over the query heads j that share a list: those of KV
    head h, or all. p_j is the softmax over the whole row, [0, seq_len). The logarithm ranks as the
    sum does and keeps apart what would underflow. K is read once. Written for positions
    [0, tail_start) of rows with reselect != 0 and k_units > 0; every other entry of ``out`` stays
    untouched. A NaN score is written as -inf, +inf as the largest finite number.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows; D is 64 or
            128.
        k_buffer: [slots, H, D] in q's dtype, contiguous.
        plan: R rows; page_table, seq_lens, tail_start, k_units and reselect are read.
        page_size: tokens a physical page: 16, 32 or 64.
        sm_scale: factor on q.k, usually 1 / sqrt(D).
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
        pool: "group": one score a KV head; "heads": one for the layer.
        out: float32 [R, H, max_units], or [R, 1, max_units] if ``pool`` is "heads" ("torch" also
            float64); max_units >= tail_start.
        block_max: float32 [R, H or 1, padded_blocks(max_units)], optional; "triton" writes the
            largest score of every 8 tokens into it, for :func:`select_topk`; "torch" ignores it.
        workspace: at least R rows, from :func:`make_exact_workspace`. Needed by "triton".
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``pool``, a wrong dtype or shape, a workspace that is
            too small.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("pool", pool, POOLS)
    rows, heads, dim = plan.num_rows, k_buffer.shape[1], q.shape[2]
    check_shape("q", q, (rows, -1, dim))
    check_shape("k_buffer", k_buffer, (-1, heads, dim))
    check_shape("out", out, (rows, 1 if pool == "heads" else heads, -1))
    group = group_size(q.shape[1], heads)
    if page_size not in (16, 32, 64):
        raise ValueError(f"page_size={page_size} is not supported; choose one of 16, 32, 64")
    if impl == "torch":
        exact_score_reference(
            q,
            k_buffer,
            plan,
            page_size=page_size,
            sm_scale=sm_scale,
            logit_cap=logit_cap,
            pool=pool,
            out=out,
        )
        return
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_dtype("k_buffer", k_buffer, q.dtype)
    check_dtype("out", out, torch.float32)
    check_dense_rows("q", q)
    check_contiguous("k_buffer", k_buffer)
    check_contiguous("out", out)
    if block_max is not None:
        check_shape("block_max", block_max, (*out.shape[:2], padded_blocks(out.shape[2])))
        check_dtype("block_max", block_max, torch.float32)
        check_contiguous("block_max", block_max)
    if dim not in (64, 128) or group > 16:
        raise ValueError(f"head_dim={dim} must be 64 or 128, and {group} query heads at most 16")
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    workspace = workspace.rows(rows)
    check_shape("workspace.logits", workspace.logits, (rows, q.shape[1], out.shape[2]))
    from .kernel import exact_score_triton

    exact_score_triton(
        q,
        k_buffer,
        plan,
        page_size=page_size,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        out=out,
        block_max=block_max,
        workspace=workspace,
    )
