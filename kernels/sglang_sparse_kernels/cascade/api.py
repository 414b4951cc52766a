# SPDX-License-Identifier: Apache-2.0
"""Public operators of the cascading cache: validate, then dispatch to the implementation."""

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
from ..records import Softmax
from .reference import (
    append_tokens_reference,
    cascade_attention_reference,
    close_strides_reference,
)
from .types import AttentionAverage, CascadeBatch, CascadeState, CascadeWorkspace, check_queries


def close_strides(
    state: CascadeState,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    *,
    workspace: CascadeWorkspace | None = None,
    impl: Impl,
) -> None:
    """Evict down to the window, of requests whose stride is full (algorithm 2).

    Level i takes every 2^i-th token. Of two tokens that compete the one with the higher score
    stays, the later one at equal scores. Kept tokens move together, in order. Requests whose
    stride is not full stay as they are.

    Args:
        state: all layers, or some.
        slots: int32 [R]; below 0 for padding.
        tokens: int32 [R], tokens of each request so far.
        workspace: needed by "triton".
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    state.check()
    check_shape("tokens", tokens, tuple(slots.shape))
    for name, column in {"slots": slots, "tokens": tokens}.items():
        check_dtype(name, column, torch.int32)
        check_contiguous(name, column)
    if impl != "triton":
        close_strides_reference(state, slots, tokens)
        return
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    from .close_kernel import close_strides_triton

    close_strides_triton(state, slots, tokens, workspace.winners)


def append_tokens(
    k: torch.Tensor, v: torch.Tensor, state: CascadeState, batch: CascadeBatch, *, impl: Impl
) -> None:
    """Store a batch's new tokens behind those that their requests hold, with scores of 0.

    A new token's row is its cache position. A slot's earlier owner leaves nothing: a request
    reads the rows that it wrote.

    Args:
        k: [tokens, H, D], keys before rotation, any stride between tokens.
        v: the same shape.
        state: of one layer.
        batch: the rows.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    _check_layer(state, batch)
    check_shape("k", k, (-1, state.num_heads, state.k.shape[-1]))
    check_shape("v", v, tuple(k.shape))
    if impl != "triton":
        append_tokens_reference(k, v, state, batch)
        return
    for name, tensor in {"k": k, "v": v}.items():
        check_dtype(name, tensor, state.k.dtype)
        check_dense_rows(name, tensor)
    from .append_kernel import append_tokens_triton

    append_tokens_triton(k, v, state, batch)


def cascade_attention(
    q: torch.Tensor,
    state: CascadeState,
    batch: CascadeBatch,
    cos_sin: torch.Tensor,
    *,
    softmax: Softmax,
    average: AttentionAverage,
    out: torch.Tensor,
    workspace: CascadeWorkspace | None = None,
    impl: Impl,
) -> None:
    """Attend to what requests hold, causally among new tokens, and bring scores up to date.

    Queries and keys are rotated for their cache positions (section 3.2, positional encoding), and
    rounded to their dtype then, as in a dense cache. Up to ``shape.rows`` tokens these are the
    positions in the request, so the output is dense attention's.

    Args:
        q: [tokens, H * G, D] before rotation, bf16 or fp16 ("cpu" and "torch" also fp32, fp64), any
            stride between tokens; D is 64 or 128.
        state: of one layer, which has the new tokens; its scores are rewritten.
        batch: the rows; decoding has one new token a row.
        cos_sin: float32 [positions, D], cosines then sines of each cache position, as SGLang's
            rotary embeddings keep them.
        softmax: scale and cap of the logits.
        average: how scores follow from probabilities.
        out: q's shape and dtype, contiguous; every entry is written.
        workspace: needed by "triton" for one new token a row.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    _check_layer(state, batch)
    group_size(q.shape[1], state.num_heads)
    check_shape("q", q, (-1, -1, state.k.shape[-1]))
    check_shape("out", out, tuple(q.shape))
    check_shape("cos_sin", cos_sin, (-1, q.shape[-1]))
    if cos_sin.shape[0] < state.shape.rows:
        raise ValueError(f"cos_sin has {cos_sin.shape[0]} positions, not {state.shape.rows}")
    if impl != "triton":
        cascade_attention_reference(
            q, state, batch, cos_sin, softmax=softmax, average=average, out=out
        )
        return
    check_queries(q, state)
    check_dense_rows("q", q)
    check_dtype("cos_sin", cos_sin, torch.float32)
    check_dtype("out", out, q.dtype)
    for name, tensor in {"out": out, "cos_sin": cos_sin}.items():
        check_contiguous(name, tensor)
    if batch.most_new == 1 and q.shape[0] == batch.num_rows:
        if workspace is None:
            raise ValueError("impl='triton' needs a workspace")
        from .decode_kernel import cascade_decode_triton

        cascade_decode_triton(
            q, state, batch, cos_sin,
            softmax=softmax, average=average, out=out, workspace=workspace,
        )  # fmt: skip
        return
    from .stride_kernel import cascade_stride_triton

    cascade_stride_triton(q, state, batch, cos_sin, softmax=softmax, average=average, out=out)


def _check_layer(state: CascadeState, batch: CascadeBatch) -> None:
    """Raise ValueError unless ``state`` is one layer's and the batch fits together."""
    state.check()
    check_shape("k of a layer", state.k, (1, -1, -1, -1, -1))
    batch.check()
