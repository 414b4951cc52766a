# SPDX-License-Identifier: Apache-2.0
"""States of prefixes, kept on a radix tree for later requests that begin alike.

A state follows from the tokens before it, so a copy serves every request that begins with these
tokens. Snapshots lie in state slots of their own and hang on nodes of SGLang's radix tree, as those
of recurrent models do: a node ends where a snapshot was taken, or where two part. A prompt's match
is cut at the deepest node that has one. The least recently used snapshot makes room, and its node
goes once nothing hangs below it. So token ids that prefixes share are held once, and a match reads
a prompt once, however many snapshots there are.

A request that begins with a snapshot's tokens has a prefix of as many token slots. Nothing is
stored in token slots (:mod:`.state_pool`), so the prefix consists of SGLang's padding slot over and
over: it belongs to nobody, and is never freed. A request adds whole pages behind it, hence a
snapshot's length is a multiple of the page size.

Seams (`sglang/srt/mem_cache/radix_cache.py`): `RadixCache.create_simulated`, a tree without pools;
`insert`, `reset`, `_delete_leaf`; `RadixKey.match`, `child_key`; `TreeNode`.

:mod:`.snapshot_cache` gives snapshots to requests.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode


def radix_key(ids: Iterable[int], extra_key: Any) -> RadixKey:
    """Token ids as SGLang's tree holds them, in a request's namespace."""
    return RadixKey(ids if isinstance(ids, array) else array("q", ids), extra_key)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Where the state of a prefix lies.

    Attributes:
        slot: state slot.
        length: tokens of the prefix.
    """

    slot: int
    length: int


class SnapshotTree:
    """The snapshots of a server, on the nodes of a radix tree.

    Attributes:
        taken, restored: how many were made, and how many requests began with one.
    """

    def __init__(self, slots: Iterable[int], page_size: int) -> None:
        """``slots``: state slots that no request runs in. Prefixes are whole pages."""
        self._slots = list(slots)
        self._tree = RadixCache.create_simulated(page_size=page_size)
        # Least recently used first; a node keeps its end when it is split.
        self._kept: OrderedDict[TreeNode, Snapshot] = OrderedDict()
        self.taken = self.restored = 0
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def capacity(self) -> int:
        """The most prefixes that are kept."""
        return len(self._slots)

    def clear(self) -> None:
        """Forget every prefix."""
        self._kept.clear()
        self._free = list(self._slots)
        self._tree.reset()

    def find(self, key: RadixKey) -> Snapshot | None:
        """The snapshot of the longest prefix of ``key``; it becomes the most recently used."""
        node = self._deepest(key)
        if node is None:
            return None
        self._kept.move_to_end(node)
        return self._kept[node]

    def reserve(self, key: RadixKey) -> Snapshot | None:
        """A slot for the state of a prefix, which the caller fills; None if there is one."""
        found = self.find(key)
        if found is not None and found.length == len(key):
            return None
        slot = self._free.pop() if self._free else self._drop_oldest()
        # A tree holds a value for each token; these have none.
        values = torch.zeros(len(key), dtype=torch.int8)
        node = self._tree.insert(InsertParams(key=key, value=values)).last_device_node
        self._kept[node] = made = Snapshot(slot, len(key))
        self.taken += 1
        return made

    def _deepest(self, key: RadixKey) -> TreeNode | None:
        """The last node on the path of ``key`` that has a snapshot. Splits nothing."""
        page, node, found = self._tree.page_size, self._tree.root_node, None
        while len(key) >= page:
            node = node.children.get(key.child_key(page))
            if node is None or node.key.match(key, page_size=page) < len(node.key):
                break
            key = key[len(node.key) :]
            if node in self._kept:
                found = node
        return found

    def _drop_oldest(self) -> int:
        """Forget the least recently used prefix, and nodes that lead nowhere then; its slot."""
        node, oldest = self._kept.popitem(last=False)
        while node is not self._tree.root_node and not node.children and node not in self._kept:
            self._tree._delete_leaf(node)
            node = node.parent
        return oldest.slot
