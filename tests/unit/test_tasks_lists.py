# SPDX-License-Identifier: Apache-2.0
"""Lists of ``collect`` in training: longer than in an evaluation, of one to five people."""

from collections import Counter

import numpy as np
import pytest

from sglang_sparse.tasks import Split
from sglang_sparse.tasks.aggregation import collect


@pytest.mark.parametrize(("split", "longest"), [("heldout", 5), ("train", 5), ("wide", 7)])
def test_lists_of_training_are_longer_than_those_asked_for(split: Split, longest: int) -> None:
    rng = np.random.default_rng(3)
    counts = {len(q.values) for _ in range(60) for q in collect(rng, split, 8192).questions}
    assert counts == set(range(2, longest + 1))


def test_people_of_a_training_row_have_lists_of_their_own_lengths() -> None:
    rng = np.random.default_rng(5)
    lists = [[len(q.values) for q in collect(rng, "wide", 8192).questions] for _ in range(80)]
    assert {len(counts) for counts in lists} == set(range(1, 6))
    several = [set(counts) for counts in lists if len(counts) > 1]
    assert sum(len(counts) > 1 for counts in several) > len(several) // 2
    short = [len(collect(rng, "wide", 300).questions) for _ in range(40)]
    assert set(short) == {1, 2}


def test_people_of_a_training_row_meet_as_those_of_a_prompt_do() -> None:
    def met(split: Split) -> float:
        """Share of the places, of problems with several people, that several were in."""
        rng, counts = np.random.default_rng(7), Counter[bool]()
        for _ in range(300):
            lists = [set(q.values) for q in collect(rng, split, 4096).questions]
            visits = Counter(place for places in lists for place in places)
            if len(lists) > 1:
                counts.update(count > 1 for count in visits.values())
        return counts[True] / counts.total()

    assert met("wide") > met("heldout") > 0.1


@pytest.mark.parametrize("split", ["heldout", "train"])
def test_two_others_of_a_prompt_were_in_as_many_places(split: Split) -> None:
    rng = np.random.default_rng(6)
    for length, persons in ((300, 2), (512, 3), (8192, 3)):
        for _ in range(20):
            counts = [len(q.values) for q in collect(rng, split, length).questions]
            assert len(counts) == persons
            assert len(set(counts)) == 1
