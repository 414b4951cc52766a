# SPDX-License-Identifier: Apache-2.0
"""Which prefixes there are snapshots of, against a list that remembers everything."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_sparse_radix.snapshots import SnapshotStore, token_bytes

SLOTS = (3, 4, 7)
# Few tokens, so that prefixes begin one another; both ends of what a token id may be.
IDS = st.lists(st.sampled_from([0, 1, 255, 256, 2**31]), max_size=5)
KEYS = st.sampled_from([None, "a"])


class Snapshots(RuleBasedStateMachine):
    """A store beside a list of (slot, tokens, key), least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SnapshotStore(SLOTS)
        self.kept: list[tuple[int, list[int], str | None]] = []

    def longest(self, ids: list[int], key: str | None) -> tuple[int, list[int], str | None] | None:
        fitting = [k for k in self.kept if k[2] == key and ids[: len(k[1])] == k[1]]
        if not fitting:
            return None
        found = max(fitting, key=lambda k: len(k[1]))
        self.kept.remove(found)
        self.kept.append(found)
        return found

    @rule(ids=IDS, key=KEYS)
    def match(self, ids: list[int], key: str | None) -> None:
        found, want = self.store.find(token_bytes(ids), key), self.longest(ids, key)
        assert (found is None) == (want is None)
        if found is not None and want is not None:
            assert (found.slot, found.length) == (want[0], len(want[1]))

    @rule(ids=IDS.filter(bool), key=KEYS)
    def take(self, ids: list[int], key: str | None) -> None:
        taken, known = self.store.reserve(token_bytes(ids), key), self.longest(ids, key)
        if known is not None and known[1] == ids:
            assert taken is None
            return
        if len(self.kept) == len(SLOTS):
            assert taken is not None
            assert taken.slot == self.kept.pop(0)[0]
        assert taken is not None
        self.kept.append((taken.slot, ids, key))

    @rule()
    def flush(self) -> None:
        self.store.clear()
        self.kept = []

    @invariant()
    def slots_are_used_once(self) -> None:
        slots = [slot for slot, _, _ in self.kept]
        assert len(self.store) == len(slots) == len(set(slots))
        assert set(slots) <= set(SLOTS)


TestSnapshots = Snapshots.TestCase
TestSnapshots.settings = settings(max_examples=60, deadline=None, stateful_step_count=30)


@given(IDS, IDS)
def test_bytes_begin_as_tokens_do(one: list[int], two: list[int]) -> None:
    begins = two[: len(one)] == one
    assert token_bytes(two).startswith(token_bytes(one)) == begins
    assert token_bytes(array("q", one)) == token_bytes(one)


def test_a_server_without_snapshots_finds_none() -> None:
    store = SnapshotStore(())
    assert store.capacity == 0
    assert store.find(token_bytes([1]), None) is None
    with pytest.raises(IndexError):
        store.reserve(token_bytes([1]), None)
