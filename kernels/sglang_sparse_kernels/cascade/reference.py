# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the cascading cache, a stride at a time.

Scores are fixed while a stride is inserted, so algorithm 2 has a closed form. Where the window is
full, level i takes the tokens that level i - 1 gives up in pairs: the first by its clock, the
second in place of the first if its score is at least as high. So a level gains the winners of
those pairs, and gives up as many of its oldest tokens.
"""

from __future__ import annotations

import torch

from ..common import accumulate_dtype
from ..records import Softmax
from .types import AttentionAverage, CascadeBatch, CascadeShape, CascadeState

_QUERIES = 256  # tokens whose probabilities are held at once


def kept_rows(scores: torch.Tensor, shape: CascadeShape) -> torch.Tensor:
    """Which tokens of a full window and a full stride are kept (algorithm 2).

    Args:
        scores: [..., W + S], of the window and the stride in the order of the cache.
        shape: the cache's.

    Returns:
        int64 [..., W], ascending.
    """
    size, most = shape.level, shape.levels - 1
    index = torch.arange(shape.window + shape.stride, device=scores.device)
    index = index.expand(scores.shape).contiguous()
    queue = index[..., most * size :]
    given, kept = queue[..., : shape.stride], [queue[..., shape.stride :]]
    for level in range(1, shape.levels):
        pairs = given.unflatten(-1, (-1, 2))
        held = scores.gather(-1, given).unflatten(-1, (-1, 2))
        winners = torch.where(held[..., 1] >= held[..., 0], pairs[..., 1], pairs[..., 0])
        own = index[..., (most - level) * size : (most - level + 1) * size]
        queue = torch.cat((own, winners), -1)
        given, new = queue.tensor_split([winners.shape[-1]], -1)
        kept.append(new)
    return torch.cat(kept[::-1], -1)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """``x`` [..., n, D] rotated by ``cos_sin`` [n, D], in the reference's precision.

    Rounded to the dtype of ``x``, as the keys and queries of a dense cache are.
    """
    acc = accumulate_dtype(x.dtype)
    cos, sin = cos_sin.to(acc).chunk(2, -1)
    low, high = x.to(acc).chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype).to(acc)


def close_strides_reference(state: CascadeState, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """See :func:`sglang_sparse_kernels.close_strides`."""
    shape = state.shape
    for slot, count in zip(slots.tolist(), tokens.tolist(), strict=True):
        if slot < 0 or not shape.closes(count):
            continue
        kept = kept_rows(state.scores[:, slot, :, shape.sinks :], shape) + shape.sinks
        window = slice(shape.sinks, shape.full)
        state.scores[:, slot, :, window] = state.scores[:, slot].gather(-1, kept)
        rows = kept[..., None].expand(*kept.shape, state.k.shape[-1])
        for tensor in (state.k, state.v):
            tensor[:, slot, :, window] = tensor[:, slot].gather(-2, rows)


def append_tokens_reference(
    k: torch.Tensor, v: torch.Tensor, state: CascadeState, batch: CascadeBatch
) -> None:
    """See :func:`sglang_sparse_kernels.append_tokens`."""
    for slot, begin, new, held in _rows(state.shape, batch):
        rows = slice(held - new, held)
        state.k[0, slot, :, rows] = k[begin : begin + new].transpose(0, 1)
        state.v[0, slot, :, rows] = v[begin : begin + new].transpose(0, 1)
        state.scores[0, slot, :, rows] = 0


def cascade_attention_reference(
    q: torch.Tensor,
    state: CascadeState,
    batch: CascadeBatch,
    cos_sin: torch.Tensor,
    *,
    softmax: Softmax,
    average: AttentionAverage,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.cascade_attention`."""
    heads, acc = state.num_heads, accumulate_dtype(q.dtype)
    out[: int(batch.first[-1])] = 0
    for slot, begin, new, held in _rows(state.shape, batch):
        keys = rotate(state.k[0, slot, :, :held], cos_sin[:held])
        values = state.v[0, slot, :, :held].to(acc)
        scores = state.scores[0, slot, :, :held].to(acc) * average.beta**new
        for at in range(0, new, _QUERIES):
            count = min(_QUERIES, new - at)
            tokens = slice(begin + at, begin + at + count)
            position = torch.arange(held - new + at, held - new + at + count, device=q.device)
            # [H, G, tokens, D]
            query = q[tokens].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
            query = rotate(query, cos_sin[position])
            logits = softmax.logits(query @ keys[:, None].transpose(-1, -2))
            hidden = torch.arange(held, device=q.device) > position[:, None]
            given = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
            out[tokens] = (given @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            # [H, tokens, held]
            reduced = given.mean(1) if average.reduce == "mean" else given.amax(1)
            age = held - 1 - position
            weights = average.gain * average.beta ** age.to(acc)
            scores += (weights[:, None] * reduced).sum(1)
        state.scores[0, slot, :, :held] = scores.to(state.scores.dtype)


def _rows(shape: CascadeShape, batch: CascadeBatch) -> list[tuple[int, int, int, int]]:
    """(slot, first new token, new tokens, tokens held) of each row that is no padding."""
    first = batch.first.tolist()
    return [
        (slot, first[i], first[i + 1] - first[i], shape.held(length))
        for i, (slot, length) in enumerate(
            zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True)
        )
        if slot >= 0 and first[i + 1] > first[i]
    ]
