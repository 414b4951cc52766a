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
    group_size,
)
from ..exact import POOLS, Pool
from ..select import padded_blocks
from .reference import tile_attention_reference, tile_score_reference
from .types import TilePlan

MAX_TILE = 128  # queries, those of a group of heads counted in


def _check(q: torch.Tensor, k_buffer: torch.Tensor, plan: TilePlan, page_size: int) -> None:
    heads, dim = k_buffer.shape[1], q.shape[2]
    check_shape("q", q, (-1, -1, dim))
    check_shape("k_buffer", k_buffer, (-1, heads, dim))
    group_size(q.shape[1], heads)
    check_shape("q_rows", plan.q_rows, (plan.rows.num_rows,))
    if page_size not in (16, 32, 64):
        raise ValueError(f"page_size={page_size} is not supported; choose one of 16, 32, 64")


def _check_triton(
    q: torch.Tensor, buffers: dict[str, torch.Tensor], plan: TilePlan, heads: int
) -> None:
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_dense_rows("q", q)
    for name, tensor in buffers.items():
        check_dtype(name, tensor, q.dtype)
        check_contiguous(name, tensor)
    queries = plan.tile_tokens * group_size(q.shape[1], heads)
    if q.shape[2] not in (64, 128) or queries > MAX_TILE:
        raise ValueError(
            f"head_dim={q.shape[2]} must be 64 or 128, and {queries} queries a tile at most "
            f"{MAX_TILE}"
        )


def tile_score(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    plan: TilePlan,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float = 0.0,
    pool: Pool,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
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
        k_buffer: [slots, H, D] in q's dtype, contiguous; holds the batch's own tokens.
        plan: the batch's tiles.
        page_size: tokens a physical page: 16, 32 or 64.
        sm_scale: factor on q.k, usually 1 / sqrt(D).
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
        pool: "group": one score a KV head; "heads": one for the layer.
        out: float32 [T, H, width], or [T, 1, width] if ``pool`` is "heads" ("torch" also float64);
            width >= tail_start.
        block_max: float32 [T, H or 1, padded_blocks(width)], optional; "triton" writes the largest
            score of every 8 tokens into it, for :func:`select_topk`; "torch" ignores it.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``pool``, a wrong dtype or shape, too large a tile.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("pool", pool, POOLS)
    _check(q, k_buffer, plan, page_size)
    heads = k_buffer.shape[1]
    check_shape("out", out, (plan.rows.num_rows, 1 if pool == "heads" else heads, -1))
    if impl == "torch":
        tile_score_reference(
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
    _check_triton(q, {"k_buffer": k_buffer}, plan, heads)
    check_dtype("out", out, torch.float32)
    check_contiguous("out", out)
    if block_max is not None:
        check_shape("block_max", block_max, (*out.shape[:2], padded_blocks(out.shape[2])))
        check_dtype("block_max", block_max, torch.float32)
        check_contiguous("block_max", block_max)
    from .kernel import tile_score_triton

    tile_score_triton(
        q,
        k_buffer,
        plan,
        page_size=page_size,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        out=out,
        block_max=block_max,
    )


def tile_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: TilePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float = 0.0,
    head_map: torch.Tensor | None = None,
    out: torch.Tensor,
    impl: Impl,
) -> None:
    """Causal attention of tiles over their lists and over themselves (Kascade section 3.4).

    A query at position p, KV head h, attends to the tokens
    ``indices[list_rows[t], h, :counts[list_rows[t], h]]`` of its tile t and to [tail_start, p]. A
    tile with k_units 0 has an empty list; with tail_start 0 it is dense. With a ``head_map`` it is
    list ``head_map[h]`` that head h takes (section 3.5).

    Args:
        q: [tokens, H * G, D] of the batch, bf16 or fp16 ("torch" also fp32, fp64), any stride
            between rows; D is 64 or 128.
        k_buffer: [slots, H, D] in q's dtype, contiguous; holds the batch's own tokens.
        v_buffer: the same.
        plan: the batch's tiles.
        indices: int32 [list rows, H, capacity], positions, distinct within a list; with a
            ``head_map`` any number of lists may take the place of H.
        counts: int32 [list rows, H]; entries of a list past k_units are not attended to.
        page_size: tokens a physical page: 16, 32 or 64.
        sm_scale: factor on q.k, usually 1 / sqrt(D).
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
        head_map: int32 [H], the list that each KV head takes; its own if None.
        out: [tokens, H * G, D], q's dtype, contiguous; written for every token of a tile.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, too large a tile.
    """
    check_choice("impl", impl, IMPLS)
    _check(q, k_buffer, plan, page_size)
    heads = k_buffer.shape[1]
    check_shape("v_buffer", v_buffer, tuple(k_buffer.shape))
    check_shape("out", out, tuple(q.shape))
    lists = heads if head_map is None else indices.shape[1]
    check_shape("indices", indices, (-1, lists, -1))
    check_shape("counts", counts, (indices.shape[0], lists))
    if head_map is not None:
        check_shape("head_map", head_map, (heads,))
        check_dtype("head_map", head_map, torch.int32)
    if impl == "torch":
        tile_attention_reference(
            q,
            k_buffer,
            v_buffer,
            plan,
            indices,
            counts,
            page_size=page_size,
            sm_scale=sm_scale,
            logit_cap=logit_cap,
            head_map=head_map,
            out=out,
        )
        return
    _check_triton(q, {"k_buffer": k_buffer, "v_buffer": v_buffer, "out": out}, plan, heads)
    check_contiguous("indices", indices)
    check_contiguous("counts", counts)
    from .kernel import tile_attention_triton

    tile_attention_triton(
        q,
        k_buffer,
        v_buffer,
        plan,
        indices,
        counts,
        page_size=page_size,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        head_map=head_map,
        out=out,
    )
