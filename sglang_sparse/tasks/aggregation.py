# SPDX-License-Identifier: Apache-2.0
"""Aggregation tasks: the answer needs many places of the context, not one."""

import numpy as np

from sglang_sparse.tasks import composed_forms as composed
from sglang_sparse.tasks import sentences
from sglang_sparse.tasks import training_forms as more
from sglang_sparse.tasks.entities import entities, people
from sglang_sparse.tasks.needles import join, pick
from sglang_sparse.tasks.reading import room_for
from sglang_sparse.tasks.relations import capital, noun, say, statement, wrapped
from sglang_sparse.tasks.sample import Needle, Problem, Question
from sglang_sparse.tasks.templates import Forms
from sglang_sparse.tasks.words import Split

Rng = np.random.Generator
# Rows of training have longer lists, so that no prompt of an evaluation has the longest known.
_MOST_PLACES, _MOST_PLACES_WIDE = 5, 7
_MOST_PEOPLE_WIDE = 5
# Share of the problems of the wide split whose people go to places of one short list.
_MEETING = 0.6
_MOST_VOTES = 256
_VOTE_TOKENS = 48
# The first of three towns has the rest, twice as much as the second.
_SECOND, _THIRD = 0.28, 0.16

VISITS = Forms(
    (
        "{s} spent the morning in {v}.",
        "In the afternoon {s} was seen in {v}.",
        "{s} walked to {v} and stayed for an hour.",
        "We met {s} in {v} by chance.",
        "A ticket shows that {s} had been to {v}.",
    ),
    sentences.heldout()["visits"],
    more.VISITS + composed.VISITS,
    sentences.training()["visits"],
)
VISIT_QUESTIONS = Forms(
    (
        "Where has {s} been?",
        "Which buildings did {s} go to?",
        "List everywhere that {s} went.",
    ),
    (
        "Name each building that saw {s} that day.",
        "Could you list all the stops of {s}?",
    ),
    more.VISIT_QUESTIONS + composed.VISIT_QUESTIONS,
)
VOTES = Forms(
    (
        "For {s}, {p} votes for {v}.",
        "{p} would like {s} in {v}.",
        "{v} is the choice of {p} for {s}.",
        "As to {s}, {p} has picked {v}.",
    ),
    sentences.heldout()["votes"],
    more.VOTES + composed.VOTES,
    sentences.training()["votes"],
)
VOTE_QUESTIONS = Forms(
    (
        "Which town got the most votes for {s}?",
        "Who won the vote on {s}?",
        "Where do most people want {s}?",
    ),
    (
        "Count the votes on {s}: which town leads?",
        "Which town is the most popular for {s}?",
    ),
    more.VOTE_QUESTIONS + composed.VOTE_QUESTIONS,
)


def _counts(rng: Rng, split: Split, length: int) -> list[int]:
    """In how many buildings each person was.

    Of the wide split there are one to five people, with lists of their own lengths. Where there are
    always three with as many, a model counts the visits of all of them, and divides by three.
    """
    # Long answers are learnt in short contexts.
    longest, apart = (_MOST_PLACES_WIDE, 96) if split == "wide" else (_MOST_PLACES, 256)
    most = min(longest, max(2, length // apart))
    if split == "wide":
        persons = int(rng.integers(1, min(_MOST_PEOPLE_WIDE, max(2, length // 256)) + 1))
        return [int(count) for count in rng.integers(2, most + 1, persons)]
    return [int(rng.integers(max(2, most // 2), most + 1))] * (3 if length >= 512 else 2)


def _shared(rng: Rng, split: Split, most: int) -> list[str]:
    """Buildings that all people of a problem go to, or none: each goes to others.

    The other splits have so few that people meet. Of the wide split they have to be made to.
    """
    if split != "wide" or rng.random() >= _MEETING:
        return []
    return entities(rng, split, "place", most + int(rng.integers(most + 1)))


def collect(rng: Rng, split: Split, length: int) -> Problem:
    """All buildings that a person was in, two to five of them, in the order of the text.

    Two others, whose names look alike, were in as many. Of the wide split there are up to seven,
    and up to four others, who were in more or fewer.
    """
    counts = _counts(rng, split, length)
    persons = entities(rng, split, "person", len(counts))
    shared = _shared(rng, split, max(counts))
    needles: list[Needle] = []
    questions: list[Question] = []
    for person, count in zip(persons, counts, strict=True):
        places = pick(rng, shared, count) if shared else entities(rng, split, "place", count)
        at = np.sort(rng.random(count))
        for place, depth in zip(places, at, strict=True):
            parts = (person, noun("place", place))
            text = say(statement(rng, split, VISITS), *parts)
            needles.append(Needle(text, float(depth), parts=parts))
        # Numbered, each place behind its person: one is looked up at a time.
        told = (f"{person} was in {noun('place', place)}." for place in places)
        answer = " ".join(f"{number}. {fact}" for number, fact in enumerate(told, 1))
        prompt = wrapped(rng, split, say(VISIT_QUESTIONS.asked(rng, split), person))
        questions.append(
            Question("collect", prompt, answer, tuple(places), "place", parts=(person,))
        )
    return Problem(tuple(needles), tuple(questions), ordered=True)


def tally(rng: Rng, split: Split, length: int) -> Problem:
    """The winners of two votes among the same people, mixed: one ballot for each 48 tokens.

    Under 512 tokens it is one vote.
    """
    votes = 2 if length >= 512 else 1
    count = max(4, room_for(length, _MOST_VOTES, _VOTE_TOKENS) // votes)
    voters = people(rng, split, count)  # full names, which no town has
    topics = [noun("thing", t) for t in entities(rng, split, "thing", votes)]
    towns = entities(rng, split, "town", 3 * votes)
    needles: list[Needle] = []
    winners: list[str] = []
    for number, topic in enumerate(topics):
        own = towns[3 * number : 3 * number + 3]
        ballots = [own[1]] * round(_SECOND * count) + [own[2]] * round(_THIRD * count)
        ballots += [own[0]] * (count - len(ballots))
        for i, voter in zip(rng.permutation(count), voters, strict=True):
            town = ballots[int(i)]
            text = capital(statement(rng, split, VOTES).format(s=topic, p=voter, v=town))
            needles.append(Needle(text, float(rng.random()), parts=(topic, voter, town)))
        winners.append(own[0])
    asked = join(topics)
    prompt = wrapped(rng, split, VOTE_QUESTIONS.asked(rng, split).format(s=asked))
    answer = " ".join(
        f"Most votes for {t} went to {w}." for t, w in zip(topics, winners, strict=True)
    )
    question = Question("tally", prompt, answer, tuple(winners), "town", parts=(asked,))
    return Problem(tuple(needles), (question,))
