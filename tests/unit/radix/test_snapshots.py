# SPDX-License-Identifier: Apache-2.0
"""Which prefixes there are snapshots of, against a list that remembers everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_sparse_radix.snapshots import SnapshotTree, radix_key

SLOTS = (3, 4, 7)
# Few tokens, so that prefixes begin one another; both ends of what a token id may be.
IDS = st.lists(st.sampled_from([0, 1, 255, 256, 2**31]), max_size=6)
KEYS = st.sampled_from([None, "a"])


class Snapshots(RuleBasedStateMachine):
    """A tree beside a list of (slot, tokens, key), least recently used first."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.tree = SnapshotTree(SLOTS, self.page_size)
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
        found, want = self.tree.find(radix_key(ids, key)), self.longest(ids, key)
        assert (found is None) == (want is None)
        if found is not None and want is not None:
            assert (found.slot, found.length) == (want[0], len(want[1]))

    @rule(ids=IDS, key=KEYS)
    def take(self, ids: list[int], key: str | None) -> None:
        ids = ids[: len(ids) // self.page_size * self.page_size]
        if not ids:
            return
        taken, known = self.tree.reserve(radix_key(ids, key)), self.longest(ids, key)
        if known is not None and known[1] == ids:
            assert taken is None
            return
        assert taken is not None
        if len(self.kept) == len(SLOTS):
            assert taken.slot == self.kept.pop(0)[0]
        assert taken.length == len(ids)
        self.kept.append((taken.slot, ids, key))

    @rule()
    def flush(self) -> None:
        self.tree.clear()
        self.kept = []

    @invariant()
    def slots_are_used_once(self) -> None:
        slots = [slot for slot, _, _ in self.kept]
        assert len(self.tree) == len(slots) == len(set(slots))
        assert set(slots) <= set(SLOTS)

    @invariant()
    def tokens_are_held_once_and_only_while_they_lead_to_a_snapshot(self) -> None:
        ends = range(self.page_size, 7, self.page_size)
        pages = {(key, *ids[:end]) for _, ids, key in self.kept for end in ends if end <= len(ids)}
        assert self.tree._tree.total_size() == len(pages) * self.page_size


class SnapshotsOfPages(Snapshots):
    """The same, where prefixes are pages of two tokens."""

    page_size = 2


TestSnapshots = Snapshots.TestCase
TestSnapshotsOfPages = SnapshotsOfPages.TestCase
for case in (TestSnapshots, TestSnapshotsOfPages):
    case.settings = settings(max_examples=60, deadline=None, stateful_step_count=30)


@given(IDS, IDS, st.integers(0, 6))
def test_a_capped_prompt_matches_as_if_it_were_shorter(
    ids: list[int], more: list[int], cap: int
) -> None:
    """SGLang caps a key where at least one token has to be computed."""
    if not ids:
        return
    tree = SnapshotTree(SLOTS, 1)
    assert tree.reserve(radix_key(ids, None)) is not None
    key = radix_key(ids + more, None)
    key.limit = cap
    assert (tree.find(key) is not None) == (cap >= len(ids))


def test_a_server_without_snapshots_finds_none() -> None:
    tree = SnapshotTree((), 1)
    assert tree.capacity == 0
    assert tree.find(radix_key([1], None)) is None
    with pytest.raises(KeyError):
        tree.reserve(radix_key([1], None))
