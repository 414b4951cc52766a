# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill by tiles of queries (Kascade, section 3.4), written the simple way.

A second implementation beside the kernels' reference: contiguous caches, boolean masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_sparse.reference.policies import keep_best, window_mask


@dataclass
class TilePrefill:
    """Causal attention in which each tile of queries sees its best tokens and itself.

    Attributes:
        fraction, floor: A tile that starts at s sees ``max(floor, ceil(fraction * s))`` tokens of
            the s before it.
        sink, recent: Always among them.
        least: Tiles that start before this are dense.
        tile: Queries a tile.
        anchors, head_maps: As in :class:`~sglang_sparse.reference.policies.Policy`.
    """

    fraction: float
    floor: int = 128
    sink: int = 16
    recent: int = 32
    least: int = 512
    tile: int = 64
    anchors: tuple[int, ...] = ()
    head_maps: tuple[tuple[int, ...], ...] = ()
    _chosen: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer, ``[B, heads, T, D]``; layers must come in order."""
        groups, length = k.shape[1], k.shape[2]
        selects = not self.anchors or layer in self.anchors
        out = torch.empty_like(q)
        for start in range(0, length, self.tile):
            stop = min(start + self.tile, length)
            queries = q[:, :, start:stop].unflatten(1, (groups, -1)).float()
            keys, values = k[:, :, :stop].float(), v[:, :, :stop].float()
            logits = torch.einsum("bghqd,bgnd->bghqn", queries, keys) * q.shape[-1] ** -0.5
            position = torch.arange(stop, device=q.device)
            seen = position <= torch.arange(start, stop, device=q.device)[:, None]
            logits = logits.masked_fill(~seen, -torch.inf)
            if start >= self.least:
                if selects:
                    pooled = logits.softmax(-1).sum((2, 3))[..., :start]
                    self._chosen[start] = self._choose(pooled, start)
                if not self.anchors or layer > 0:
                    kept = self._chosen[start]
                    if not selects and self.head_maps and self.head_maps[layer]:
                        kept = kept[:, list(self.head_maps[layer])]
                    own = kept.new_ones((*kept.shape[:2], stop - start))
                    kept = torch.cat((kept, own), -1)
                    logits = logits.masked_fill(~kept[:, :, None, None], -torch.inf)
            attended = torch.einsum("bghqn,bgnd->bghqd", logits.softmax(-1), values)
            out[:, :, start:stop] = attended.flatten(1, 2).to(out.dtype)
        return out

    def _choose(self, pooled: Tensor, start: int) -> Tensor:
        """``[B, G, start]``: the best tokens before a tile."""
        share = start * round(self.fraction * 1_000_000)
        count = min(max(self.floor, -(-share // 1_000_000)), start)
        lengths = torch.full((len(pooled),), start, device=pooled.device)
        valid = torch.ones_like(pooled[:, 0], dtype=torch.bool)
        return keep_best(pooled, window_mask(start, lengths, self.sink, self.recent), valid, count)
