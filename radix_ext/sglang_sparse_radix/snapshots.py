# SPDX-License-Identifier: Apache-2.0
"""States of prefixes, kept for later requests that begin alike.

A state follows from the tokens before it, so a copy serves every request that begins with these
tokens. Snapshots lie in state slots of their own. The least recently used one makes room.

A request that begins with a snapshot's tokens has a prefix of as many token slots. Nothing is
stored in token slots (:mod:`.state_pool`), so the prefix consists of SGLang's padding slot over and
over: it belongs to nobody, and is never freed. A request adds whole pages behind it, hence a
snapshot's length is a multiple of the page size.

:mod:`.snapshot_cache` gives them to requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_TOKEN = "q"  # as SGLang holds token ids: 64 bits each


def token_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as bytes: one prefix begins another exactly if its bytes do."""
    return (ids if isinstance(ids, array) else array(_TOKEN, ids)).tobytes()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A prefix and where its state lies.

    Attributes:
        slot: state slot.
        tokens: the prefix, by :func:`token_bytes`.
        extra_key: SGLang's namespace of the request.
    """

    slot: int
    tokens: bytes
    extra_key: Any

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.tokens) // array(_TOKEN).itemsize


class SnapshotStore:
    """The snapshots of a server, least recently used first.

    Attributes:
        taken, restored: how many were made, and how many requests began with one.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        """``slots``: state slots that no request runs in."""
        self._slots = list(slots)
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
        self._free, self._kept = list(self._slots), list[Snapshot]()

    def find(self, tokens: bytes, extra_key: Any) -> Snapshot | None:
        """The longest prefix of ``tokens`` that there is; it becomes the most recently used."""
        fitting = (
            s for s in self._kept if s.extra_key == extra_key and tokens.startswith(s.tokens)
        )
        found = max(fitting, key=lambda snapshot: len(snapshot.tokens), default=None)
        if found is not None:
            self._kept.remove(found)
            self._kept.append(found)
        return found

    def reserve(self, tokens: bytes, extra_key: Any) -> Snapshot | None:
        """A slot for the state of ``tokens``, which the caller fills; None if there is one."""
        found = self.find(tokens, extra_key)
        if found is not None and found.tokens == tokens:
            return None
        slot = self._free.pop() if self._free else self._kept.pop(0).slot
        self._kept.append(Snapshot(slot, tokens, extra_key))
        self.taken += 1
        return self._kept[-1]
