# SPDX-License-Identifier: Apache-2.0
"""Public exact scoring: validates, then dispatches to the implementation asked for."""

from typing import Literal, get_args

import torch

from ..common import IMPLS, Impl, check_choice, check_shape
from ..plan import DecodePlan
from ..records import KVView, Scores, Softmax
from .cpu import exact_score_cpu
from .reference import exact_score_reference
from .types import ExactWorkspace

Pool = Literal["group", "heads"]
POOLS: tuple[str, ...] = get_args(Pool)


def lists_of(pool: Pool, heads: int) -> int:
    """Lists a layer of ``heads`` KV heads: one a KV head, or one that all share.

    Raises:
        ValueError: on an unknown ``pool``.
    """
    check_choice("pool", pool, POOLS)
    return 1 if pool == "heads" else heads


def exact_score(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    *,
    softmax: Softmax,
    pool: Pool,
    out: Scores,
    workspace: ExactWorkspace | None = None,
    impl: Impl,
) -> None:
    """Attention probability of every token of the domain, pooled (Kascade sections 3.4 and 3.6).

    score(h, t) = log2 of the sum of p_j(t) over the query heads j that share a list: those of KV
    head h, or all. p_j is the softmax over the whole row, [0, seq_len). The logarithm ranks as the
    sum does, and still tells sums apart that would underflow. K is read once. Written for positions
    [0, tail_start) of rows with reselect != 0 and k_units > 0, in lists that are read; every other
    entry of ``out`` stays untouched. A NaN score is written as -inf, +inf as the largest finite
    number.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows; D is 64 or
            128.
        kv: KV rows in q's dtype or fp8 e4m3, with their scales; V is not read.
        plan: R rows; seq_lens, tail_start, k_units and reselect are read.
        softmax: scale and cap of the logits.
        pool: "group": one score a KV head; "heads": one for the layer.
        out: R rows of H lists, or of one if ``pool`` is "heads"; at least tail_start units.
        workspace: at least R rows, from :func:`make_exact_workspace`. Needed by "triton".
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``pool``, a wrong dtype or shape, a workspace that is
            too small.
    """
    check_choice("impl", impl, IMPLS)
    kv.group_of(q)
    out.check(plan.num_rows, lists_of(pool, kv.num_heads))
    if impl != "triton":
        score = exact_score_reference if impl == "torch" else exact_score_cpu
        score(q, kv, plan, softmax=softmax, pool=pool, out=out)
        return
    kv.check_triton(q)
    out.check_triton()
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    workspace = workspace.rows(plan.num_rows)
    check_shape("workspace.logits", workspace.logits, (*q.shape[:2], out.values.shape[2]))
    from .kernel import exact_score_triton

    exact_score_triton(q, kv, plan, softmax=softmax, out=out, workspace=workspace)
