# SPDX-License-Identifier: Apache-2.0
"""Public functions of sparse prefill: validate, then dispatch to the implementation asked for."""

import torch

from ..common import (
    IMPLS,
    Impl,
    check_choice,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
)
from ..exact import Pool, lists_of
from ..records import KVView, Lists, Scores, Softmax
from .reference import tile_attention_reference, tile_mean_reference, tile_score_reference
from .types import TilePlan

MAX_TILE = 128  # queries, those of a group of heads counted in


def _check(q: torch.Tensor, kv: KVView, plan: TilePlan) -> None:
    kv.group_of(q)
    check_shape("q_rows", plan.q_rows, (plan.rows.num_rows,))


def _check_triton(q: torch.Tensor, kv: KVView, plan: TilePlan) -> None:
    kv.check_triton(q)
    queries = plan.tile_tokens * kv.group_of(q)
    if queries > MAX_TILE:
        raise ValueError(f"{queries} queries a tile at most {MAX_TILE}")


def tile_score(
    q: torch.Tensor,
    kv: KVView,
    plan: TilePlan,
    *,
    softmax: Softmax,
    pool: Pool,
    out: Scores,
    impl: Impl,
) -> None:
    """Attention probability of every token before a tile, pooled over it (Kascade section 3.4).

    score(h, t) = log2 of the sum of p(t) over the tile's queries and the query heads that share a
    list: those of KV head h, or all. p is a query's softmax over all tokens up to itself. Written
    for positions [0, tail_start) of tiles with reselect != 0 and k_units > 0; every other entry of
    ``out`` stays untouched. A NaN score is written as -inf, and "triton" may write it for
    scores below -200.

    Args:
        q: [tokens, H * G, D] of the batch, bf16 or fp16 ("torch" also fp32, fp64), any stride
            between rows; D is 64 or 128.
        kv: the page table has a row for each tile; KV of the batch's own tokens is written. V is
            not read.
        plan: the batch's tiles, T of them.
        softmax: scale and cap of the logits.
        pool: "group": one score a KV head; "heads": one for the layer.
        out: T rows of H lists, or of one if ``pool`` is "heads"; at least tail_start units.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``pool``, a wrong dtype or shape, too large a tile.
    """
    check_choice("impl", impl, IMPLS)
    _check(q, kv, plan)
    out.check(plan.rows.num_rows, lists_of(pool, kv.num_heads))
    if impl != "triton":
        tile_score_reference(q, kv, plan, softmax=softmax, pool=pool, out=out.values)
        return
    _check_triton(q, kv, plan)
    out.check_triton()
    from .score_kernel import tile_score_triton

    tile_score_triton(q, kv, plan, softmax=softmax, out=out)


def tile_mean(q: torch.Tensor, plan: TilePlan, *, out: torch.Tensor, impl: Impl) -> None:
    """Mean query of each tile and query head, what MInference pools blocks of queries to.

    The sum is in fp32 and is rounded once. MInference: arXiv 2407.02490, section 3.2.

    Args:
        q: [tokens, query heads, D] of the batch, bf16 or fp16 ("torch" also fp32, fp64), any stride
            between rows; D is a power of two for "triton".
        plan: the batch's tiles, T of them.
        out: [T, query heads, D], q's dtype, contiguous; every entry is written.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    check_shape("q", q, (-1, -1, -1))
    check_shape("out", out, (plan.rows.num_rows, *q.shape[1:]))
    check_shape("q_rows", plan.q_rows, (plan.rows.num_rows,))
    check_dtype("out", out, q.dtype)
    check_contiguous("out", out)
    if impl != "triton":
        tile_mean_reference(q, plan, out)
        return
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_dense_rows("q", q)
    from .mean_kernel import tile_mean_triton

    tile_mean_triton(q, plan, out)


def tile_attention(
    q: torch.Tensor,
    kv: KVView,
    plan: TilePlan,
    lists: Lists,
    *,
    softmax: Softmax,
    out: torch.Tensor,
    impl: Impl,
) -> None:
    """Causal attention of tiles over their lists and over themselves (Kascade section 3.4).

    A query at position p, KV head h, attends to the tokens
    of the units ``indices[rows[t], h, :counts[rows[t], h]]`` of its tile t, as far as they lie
    before tail_start, and to [tail_start, p]. A tile with
    k_units 0 has an empty list; with tail_start 0 it is dense. With a ``head_map`` it is list
    ``head_map[h]`` that head h takes (section 3.5).

    Args:
        q: [tokens, H * G, D] of the batch, bf16 or fp16 ("torch" also fp32, fp64), any stride
            between rows; D is 64 or 128.
        kv: the page table has a row for each tile; KV of the batch's own tokens is written.
        plan: the batch's tiles, T of them.
        lists: for T rows; entries past k_units are not attended to. Of heads with windows no list
            is read: in tiles with tail_start above 0 they attend to the positions below ``sink``
            and to (p - local, p], and only those are loaded (LServe, section 3.3).
        softmax: scale and cap of the logits.
        out: [tokens, H * G, D], q's dtype, contiguous; written for every token of a tile.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, too large a tile.
    """
    check_choice("impl", impl, IMPLS)
    _check(q, kv, plan)
    check_shape("out", out, tuple(q.shape))
    lists.check_read(plan.rows.num_rows, kv.num_heads)
    if impl != "triton":
        tile_attention_reference(q, kv, plan, lists, softmax=softmax, out=out)
        return
    _check_triton(q, kv, plan)
    check_dtype("out", out, q.dtype)
    check_contiguous("out", out)
    from .attend_kernel import tile_attention_triton

    tile_attention_triton(q, kv, plan, lists, softmax=softmax, out=out)
