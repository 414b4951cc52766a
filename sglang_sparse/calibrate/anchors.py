# SPDX-License-Identifier: Apache-2.0
"""Chooses the layers that select, and the list that each other head takes (Kascade, 3.3, 3.5)."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def choose_anchors(similarity: Floats, importance: Floats, count: int) -> list[int]:
    """The anchors that keep most similarity, by dynamic programming (Algorithm 1).

    Args:
        similarity: [L, L]; entry (a, b), a <= b, is the mass share that layer b keeps with the
            lists of layer a.
        importance: [L], weight of each layer.
        count: anchors to choose, layer 0 among them.

    Returns:
        ``count`` layers, ascending from 0, with the largest sum over all layers b of
        ``importance[b] * similarity[a, b]``, where a is the last anchor up to b. Of equal choices
        it takes the one whose last anchors are lowest.

    Raises:
        ValueError: ``count`` is not from 1 to L.
    """
    layers = len(similarity)
    if not 1 <= count <= layers:
        raise ValueError(f"{count} anchors of {layers} layers")
    weighted = np.triu(similarity * importance)
    # kept[a, b]: layers a to b - 1 under anchor a.
    kept = np.concatenate((np.zeros((layers, 1)), weighted.cumsum(1)), axis=1)
    best = np.full((count + 1, layers + 1), -np.inf)  # best[m, b]: m anchors cover the first b
    last = np.zeros((count + 1, layers + 1), dtype=int)
    best[0, 0] = 0.0
    for m in range(1, count + 1):
        for b in range(m, layers + 1):
            totals = best[m - 1, :b] + kept[:b, b]
            last[m, b] = int(totals.argmax())
            best[m, b] = totals[last[m, b]]
    anchors, end = [], layers
    for m in range(count, 0, -1):
        end = int(last[m, end])
        anchors.append(end)
    return anchors[::-1]


def map_heads(similarity: Floats, ranks: int) -> NDArray[np.int64]:
    """For each head of a layer, the head of another layer whose list suits it best.

    Several heads may take the same list.

    Args:
        similarity: [..., H, H]; entry (i, j) is the mass share that head j keeps with the list of
            head i.
        ranks: tensor-parallel ranks; a head takes a list of its own rank.

    Returns:
        int64 [..., H], the head i for each j. Of equal heads it takes i = j, then the lowest.
    """
    heads = similarity.shape[-1]
    rank = np.arange(heads) // max(1, heads // ranks)
    allowed = np.where(rank[:, None] == rank, similarity, -np.inf)
    best = allowed.argmax(-2)
    own = np.broadcast_to(np.arange(heads), best.shape)
    is_own = np.diagonal(allowed, axis1=-2, axis2=-1) >= allowed.max(-2)
    return np.where(is_own, own, best)


def mapped_similarity(head_similarity: Floats, taken: NDArray[np.int64]) -> Floats:
    """[L, L] similarity under head maps [L, L, H]: mean over heads of [L, L, H, H]."""
    kept: Floats = np.take_along_axis(head_similarity, taken[..., None, :], axis=-2)
    return kept.mean((-2, -1))
