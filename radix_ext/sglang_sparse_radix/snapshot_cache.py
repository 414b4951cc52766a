# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache of a server that keeps states of prefixes; for SGLang 0.5.17 alone.

Seams (`sglang/srt/mem_cache/`): `chunk_cache.py: ChunkCache`, which shares nothing and frees what
lies behind `Req.cache_protected_len`; 0.5.23 has no such class. `sglang/srt/managers/
schedule_policy.py: PrefillAdder.add_one_req` reads ``disable``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.chunk_cache import ChunkCache

from sglang_sparse_radix.snapshots import SnapshotTree

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class SnapshotCache(ChunkCache):
    """Gives a request the longest prefix that the tree has a snapshot of.

    Token slots come and go with their request, as they hold nothing that a tree could share.

    Matched snapshots need no lock. A request is matched and its batch prepared, where states are
    copied, without another batch in between; only a batch that is prepared takes slots away.
    """

    # A cache without this is taken for one that never matches, and SGLang then asserts that a
    # request which ignores the end of an answer begins at its first token.
    disable = False

    def __init__(self, params: CacheInitParams, tree: SnapshotTree) -> None:
        super().__init__(params)
        self.tree = tree

    def reset(self) -> None:
        """Forget every prefix, as a flush of the cache asks."""
        if hasattr(self, "tree"):
            self.tree.clear()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As many padding slots as the longest snapshot has tokens; the snapshot is the node."""
        miss = super().match_prefix(params)
        found = self.tree.find(params.key)
        if found is None:
            return miss
        prefix = torch.zeros(found.length, dtype=torch.int64, device=self.device)
        return miss._replace(device_indices=prefix, last_device_node=found)
