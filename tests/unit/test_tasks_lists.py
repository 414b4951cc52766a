# SPDX-License-Identifier: Apache-2.0
"""Lists of ``collect`` in training: longer than in an evaluation, of one to five people."""

import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from sglang_sparse.tasks import Split
from sglang_sparse.tasks.aggregation import collect
from sglang_sparse.tasks.sample import Problem


def lists(problem: Problem) -> dict[str, list[str]]:
    """The places that each person was in."""
    places = defaultdict(list)
    for needle in problem.needles:
        assert needle.parts is not None
        places[needle.parts[0]].append(needle.parts[1])
    return places


@pytest.mark.parametrize(("split", "longest"), [("heldout", 5), ("train", 5), ("wide", 7)])
def test_lists_of_training_are_longer_than_those_asked_for(split: Split, longest: int) -> None:
    rng = np.random.default_rng(3)
    counts = {len(v) for _ in range(60) for v in lists(collect(rng, split, 8192)).values()}
    assert counts == set(range(2, longest + 1))


def test_people_of_a_training_row_have_lists_of_their_own_lengths() -> None:
    rng = np.random.default_rng(5)
    drawn = [lists(collect(rng, "wide", 8192)) for _ in range(80)]
    assert {len(people) for people in drawn} == set(range(1, 6))
    several = [{len(v) for v in people.values()} for people in drawn if len(people) > 1]
    assert sum(len(counts) > 1 for counts in several) > len(several) // 2
    short = {len(lists(collect(rng, "wide", 300))) for _ in range(40)}
    assert short == {1, 2}


def test_people_of_a_training_row_meet_as_those_of_a_prompt_do() -> None:
    def met(split: Split) -> float:
        """Share of the places, of problems with several people, that several were in."""
        rng, counts = np.random.default_rng(7), Counter[bool]()
        for _ in range(300):
            people = lists(collect(rng, split, 4096))
            visits = Counter(place for places in people.values() for place in places)
            if len(people) > 1:
                counts.update(count > 1 for count in visits.values())
        return counts[True] / counts.total()

    assert met("wide") > met("heldout") > 0.1


@pytest.mark.parametrize("split", ["heldout", "train"])
def test_two_others_of_a_prompt_were_in_as_many_places(split: Split) -> None:
    rng = np.random.default_rng(6)
    for length, persons in ((300, 2), (512, 3), (8192, 3)):
        for _ in range(20):
            people = lists(collect(rng, split, length))
            assert len(people) == persons
            assert len({len(places) for places in people.values()}) == 1


def test_some_questions_of_training_ask_for_the_places_behind_one() -> None:
    rng, left = np.random.default_rng(4), Counter[int]()
    for _ in range(60):
        problem = collect(rng, "wide", 8192)
        for question in problem.questions:
            if question.parts is not None:
                continue
            (first,) = re.findall(r"^After (the .+?), .+? was ", question.answer)
            (person,) = set(re.findall(r"After the .+?, (.+?) was ", question.answer))
            places = lists(problem)[person]
            behind = places[places.index(first) + 1 :]
            assert [f"the {place}" for place in question.values] == behind
            assert question.answer.endswith(f"After {places[-1]}, {person} was nowhere else.")
            left[len(behind)] += 1
    assert set(left) == set(range(7))
    for split in ("heldout", "train"):
        assert all(q.parts for _ in range(20) for q in collect(rng, split, 4096).questions)
