# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill by tiles of queries (Kascade, section 3.4), written the simple way.

A second implementation beside the kernels' reference: contiguous caches, boolean masks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_sparse.research.policies import Pool, keep_best, product, window_mask


@dataclass
class TilePrefill:
    """Causal attention in which each tile of queries sees its best tokens and itself.

    Attributes:
        fraction, floor: A tile that starts at s sees ``max(floor, ceil(fraction * s))`` tokens of
            the s before it.
        sink, recent: Always among them.
        least: Tiles that start before this are dense.
        tile: Queries a tile.
        anchors, head_maps, pool: As in :class:`~sglang_sparse.research.policies.Policy`.
    """

    fraction: float
    floor: int = 128
    sink: int = 16
    recent: int = 32
    anchors: tuple[int, ...] = ()
    head_maps: tuple[tuple[int, ...], ...] = ()
    pool: Pool = "group"
    least: int = 512
    tile: int = 64
    _chosen: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer, ``[B, heads, T, D]``; layers must come in order."""
        groups, length = k.shape[1], k.shape[2]
        selects = not self.anchors or layer in self.anchors
        k, v, out = k.contiguous(), v.contiguous(), torch.empty_like(q)
        for start in range(0, length, self.tile):
            stop = min(start + self.tile, length)
            queries = q[:, :, start:stop].unflatten(1, (groups, -1)) * q.shape[-1] ** -0.5
            shape = queries.shape
            logits = product(queries.flatten(2, 3), k[:, :, :stop].transpose(2, 3))
            # Tokens before the tile are seen by all of it.
            hidden = torch.ones(stop - start, stop - start, device=q.device).triu(1).bool()
            logits.unflatten(2, shape[2:4])[..., start:].masked_fill_(hidden, -torch.inf)
            weights = logits.softmax(-1)
            if start >= self.least:
                if selects:
                    self._chosen[start] = self._choose(weights[..., :start].sum(2), start)
                if not self.anchors or layer > 0:
                    kept = self._chosen[start]
                    if not selects and self.head_maps and self.head_maps[layer]:
                        kept = kept[:, list(self.head_maps[layer])]
                    weights[..., :start] *= kept[:, :, None]
            attended = product(weights, v[:, :, :stop]) / weights.sum(-1, keepdim=True)
            out[:, :, start:stop] = attended.unflatten(2, shape[2:4]).flatten(1, 2).to(out.dtype)
        return out

    def _choose(self, pooled: Tensor, start: int) -> Tensor:
        """``[B, G, start]``: the best tokens before a tile, by attention ``[B, G, start]``."""
        if self.pool == "heads":
            pooled = pooled.sum(1, keepdim=True).expand_as(pooled)
        share = start * round(self.fraction * 1_000_000)
        count = min(max(self.floor, -(-share // 1_000_000)), start)
        lengths = torch.full((len(pooled),), start, device=pooled.device)
        valid = torch.ones_like(pooled[:, 0], dtype=torch.bool)
        return keep_best(pooled, window_mask(start, lengths, self.sink, self.recent), valid, count)
