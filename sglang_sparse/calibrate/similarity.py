# SPDX-License-Identifier: Apache-2.0
"""How much attention mass one layer keeps with the keys that another chose (Kascade, 3.2 to 3.5).

Queries are taken in blocks, so that no tensor has the size heads x tokens x tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BLOCK_BYTES = 256 << 20


@dataclass(frozen=True)
class LayerQK:
    """Rotated queries [Hq, N, D] and keys [H, N, D] of one layer, and the factor on q.k."""

    q: Tensor
    k: Tensor
    scaling: float


def attention(layer: LayerQK, start: int, stop: int) -> Tensor:
    """fp32 [H, stop - start, N]: causal attention of some queries, mean over each head's group."""
    heads, length = layer.k.shape[:2]
    q = layer.q[:, start:stop].unflatten(0, (heads, -1)).float()
    logits = torch.einsum("hgqd,hnd->hgqn", q, layer.k.float()) * layer.scaling
    position = torch.arange(length, device=logits.device)
    hidden = position > torch.arange(start, stop, device=logits.device)[:, None]
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1).mean(1)


def _recovered(p: Tensor, top_k: int, per_layer: int) -> tuple[Tensor, Tensor]:
    """(smallest, sum) over queries of the share of t's best mass that the top-k keys of s hold.

    Both are [S, S], for rows s and t of ``p`` [S, Q, N]. Each layer has ``per_layer`` rows. Only
    rows s of earlier layers than t's are measured.
    """
    rows, queries, length = p.shape
    best = p.topk(min(top_k, length), dim=-1)
    own = best.values.sum(-1)
    lowest = torch.ones((rows, rows), device=p.device)
    total = torch.full((rows, rows), float(queries), device=p.device)
    for t in range(per_layer, rows):
        sources = t // per_layer * per_layer
        index = best.indices[:sources].transpose(0, 1).reshape(queries, -1)
        mass = p[t].gather(1, index).view(queries, sources, -1).sum(-1)
        share = (mass / own[t][:, None]).clamp_(max=1.0)
        lowest[:sources, t], total[:sources, t] = share.amin(0), share.sum(0)
    return lowest, total


@dataclass(frozen=True)
class Similarity:
    """Similarity measured on one prompt.

    Attributes:
        layers: [L, L], by the attention averaged over heads (equation 3); 1 where a >= b.
        heads: [L, L, H, H]; entry (a, b, i, j) is the share that head j of layer b keeps with the
            keys of head i of layer a, the smallest over queries.
        head_means: the same, but the mean over queries.
    """

    layers: Tensor
    heads: Tensor
    head_means: Tensor


def prompt_similarity(
    layers: Sequence[LayerQK],
    top_k: int,
    *,
    block: int | None = None,
    advance: Callable[[int], None] = lambda queries: None,
) -> Similarity:
    """Similarity of every pair of layers and of heads, over a prompt's queries.

    Args:
        layers: all layers' queries and keys of one prompt.
        top_k: keys that a query selects.
        block: queries at a time; by default as many as fit in :data:`MOST_BLOCK_BYTES`.
        advance: called with the number of queries that were done.
    """
    heads, length = layers[0].k.shape[:2]
    count = len(layers)
    if block is None:
        block = max(1, MOST_BLOCK_BYTES // (4 * length * heads * count))
    device = layers[0].k.device
    by_layer = torch.ones((count, count), device=device)
    by_head = torch.ones((count * heads, count * heads), device=device)
    summed = torch.zeros((count * heads, count * heads), dtype=torch.float64, device=device)
    for start in range(0, length, block):
        stop = min(start + block, length)
        # Keys after the block are hidden from all of its queries.
        seen = [LayerQK(layer.q, layer.k[:, :stop], layer.scaling) for layer in layers]
        p = torch.stack([attention(layer, start, stop) for layer in seen])
        by_layer = torch.minimum(by_layer, _recovered(p.mean(1), top_k, 1)[0])
        lowest, total = _recovered(p.flatten(0, 1), top_k, heads)
        by_head = torch.minimum(by_head, lowest)
        summed += total
        advance(stop - start)
    grids = (
        matrix.view(count, heads, count, heads).transpose(1, 2).contiguous().cpu()
        for matrix in (by_head, summed / length)
    )
    return Similarity(by_layer.cpu(), *grids)
