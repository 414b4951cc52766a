# SPDX-License-Identifier: Apache-2.0
"""Heads at run time: which of this rank's stream, which lists a head reads, and which nobody."""

from dataclasses import dataclass

import torch

from sglang_sparse.choices.build import HeadKinds
from sglang_sparse.choices.role import Role
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.records import HeadWindows


@dataclass(frozen=True)
class Heads:
    """Attention heads of this rank.

    Attributes:
        query: query heads.
        kv: KV heads.
        dim: channels a head.
        first_kv: global id of the first KV head.
        total_kv: KV heads of the model.
        ranks: ranks of tensor parallelism that these are divided over.
        rank: which of them this is.
    """

    query: int
    kv: int
    dim: int
    first_kv: int = 0
    total_kv: int = 0
    ranks: int = 1
    rank: int = 0

    @property
    def global_ids(self) -> range:
        """Global ids of this rank's KV heads."""
        return range(self.first_kv, self.first_kv + self.kv)


def lists_of_heads(role: Role, heads: range, lists: int) -> list[int]:
    """The list that each of a rank's KV heads reads, of ``lists`` that a layer has on the rank.

    ``heads`` are their global ids.
    """
    if lists == 1:
        return [0 for _ in heads]
    # No map crosses ranks: check_ranks refused that before any weight was loaded.
    return [(head if role.heads is None else role.heads[head]) - heads.start for head in heads]


def head_kinds(
    config: SparseConfig, layers: range, heads: Heads, *, lists: int, device: torch.device
) -> HeadKinds:
    """Heads of this rank that stream; of no layer if all heads select.

    Args:
        config: the resolved configuration.
        layers: global ids of this rank's layers.
        heads: of this rank.
        lists: lists a layer.
        device: where kernels read them.
    """
    streams = {
        layer: [head in config.heads.streams_in(layer) for head in heads.global_ids]
        for layer in layers
    }
    if not any(any(own) for own in streams.values()):
        return HeadKinds()
    windows, prompt_windows = {}, {}
    read = {layer: [False] * lists for layer in layers}
    for layer, own in streams.items():
        role = config.layers.role(layer)
        if role.source is None:
            continue
        if any(own):
            words = _words(own, device)
            windows[layer] = HeadWindows(words, *config.heads.window)
            prompt_windows[layer] = HeadWindows(words, *config.heads.prompt_window)
        for head, taken in enumerate(lists_of_heads(role, heads.global_ids, lists)):
            read[role.source][taken] |= not own[head]
    unread = {
        layer: _words([not one for one in read[layer]], device)
        for layer in layers
        if config.layers.role(layer).selects and not all(read[layer])
    }
    return HeadKinds(windows, prompt_windows, unread)


def _words(flags: list[bool], device: torch.device) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.int32, device=device)
