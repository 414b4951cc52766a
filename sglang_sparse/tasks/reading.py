# SPDX-License-Identifier: Apache-2.0
"""Reading tasks: similar keys, natural sentences, forms of a question, facts to be joined."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from sglang_sparse.tasks.entities import entities
from sglang_sparse.tasks.needles import depths, fact
from sglang_sparse.tasks.relations import (
    RELATIONS,
    Relation,
    noun,
    say,
    statement,
    wrapped,
)
from sglang_sparse.tasks.sample import Needle, Problem, Question
from sglang_sparse.tasks.words import Split

Rng = np.random.Generator
# From the subject on; the last relation gives the value.
CHAINS = (
    ("owns", "stands"),
    ("lives", "river"),
    ("mayor", "works"),
    ("mayor", "keeps"),
    ("owns", "code"),
    ("lives", "mayor", "works"),
    ("lives", "mayor", "keeps"),
    ("mayor", "owns", "stands"),
)
_SIMILAR = (4, 8, 16, 32, 64)
_KEY_TOKENS = 52
_MOST_ASKED = 16
_FACT_TOKENS = 80


def room_for(length: int, most: int, tokens: int = _FACT_TOKENS) -> int:
    """How many facts a context of ``length`` tokens gets: one for ``tokens``; 2 to ``most``."""
    return max(2, min(most, length // tokens))


def similar_keys(rng: Rng, split: Split, length: int) -> Problem:
    """One question among 8 to 64 keys of three words, each of which shares two with others.

    Keys are all combinations of two, three or four words at each place. As many as fit: 4 under 512
    tokens, 64 from 4K on; longer contexts draw 16, 32 or 64.
    """
    fitting = [n for n in _SIMILAR if n * _KEY_TOKENS <= length] or [_SIMILAR[0]]
    count = int(rng.choice(fitting[-3:])) if length > 4096 else fitting[-1]
    side = {4: (1, 2, 2), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)}[count]
    parts = [
        entities(rng, split, kind, n)
        for kind, n in zip(("thing", "animal", "place"), side, strict=True)
    ]
    keys = ["-".join(words) for words in product(*parts)]
    keys = [keys[i] for i in rng.permutation(len(keys))]
    numbers = entities(rng, split, "number", count)
    needles = tuple(
        Needle(fact(k, v), d) for k, v, d in zip(keys, numbers, depths(rng, count), strict=True)
    )
    questions = tuple(
        Question("similar_keys", f"What is the magic number for {k}?", fact(k, v), (v,))
        for k, v in list(zip(keys, numbers, strict=True))[:_MOST_ASKED]
    )
    return Problem(needles, questions)


def sentences(rng: Rng, split: Split, length: int) -> Problem:
    """Facts of one relation, each in a sentence of its own; the question is plain."""
    return _told(rng, split, length, "sentences")


def forms(rng: Rng, split: Split, length: int) -> Problem:
    """Facts of one relation, stated plainly; the question takes one of many forms."""
    return _told(rng, split, length, "forms")


def _told(rng: Rng, split: Split, length: int, task: str) -> Problem:
    single = [r for r in RELATIONS.values() if r.value != "person"]
    relation = single[int(rng.integers(len(single)))]
    count = room_for(length, 12)
    subjects = entities(rng, split, relation.subject, count)
    values = entities(rng, split, relation.value, count)
    needles, questions = [], []
    for name, word, depth in zip(subjects, values, depths(rng, count), strict=True):
        subject, value = noun(relation.subject, name), noun(relation.value, word)
        plainly, question = task == "forms", relation.question
        template = relation.plain if plainly else statement(rng, split, relation.statements)
        if plainly:
            question = wrapped(rng, split, say(relation.questions.asked(rng, split), subject))
        parts = None if plainly else (subject, value)
        needles.append(Needle(say(template, subject, value), depth, parts=parts))
        asked = answered(task, relation, say(question, subject), subject, word)
        # Of a fact that is told plainly, the question need not say what it asks for.
        questions.append(replace(asked, parts=(subject,)) if plainly else asked)
    return Problem(tuple(needles), tuple(questions))


def answered(task: str, relation: Relation, prompt: str, subject: str, word: str) -> Question:
    """The question ``prompt`` about ``subject``, whose value is ``word``."""
    assert relation.value != "person"
    answer = say(relation.plain, subject, noun(relation.value, word))
    return Question(task, prompt, answer, (word,), relation.value)


def joined(rng: Rng, split: Split, length: int) -> Problem:
    """Chains of two or three facts; the question names the first subject, the reply every hop.

    All chains have the same relations, so that each fact that is wanted has look-alikes.
    """
    fitting = [c for c in CHAINS if len(c) == 2 or length >= 512]
    chain = [RELATIONS[name] for name in fitting[int(rng.integers(len(fitting)))]]
    count = max(1, room_for(length, 24) // (2 * len(chain)))
    levels = _levels(rng, split, chain, count)
    kinds = [_kinds(relation) for relation in chain]
    needles: list[Needle] = []
    questions: list[Question] = []
    for nodes in zip(*levels, strict=True):
        hops = []
        for step, relation in enumerate(chain):
            subject, value = (
                noun(relation.subject, nodes[step]),
                noun(relation.value, nodes[step + 1]),
            )
            template = statement(rng, split, relation.statements)
            # Who lives in a town and who governs it are told apart by their sentences alone.
            parts = None if kinds.count(_kinds(relation)) > 1 else (subject, value)
            text = say(template, subject, value)
            needles.append(Needle(text, float(rng.random()), parts=parts))
            hops.append(say(relation.plain, subject, value))
        phrase = noun(chain[0].subject, nodes[0])
        for relation in chain[:-1]:
            phrase = relation.phrase.asked(rng, split).format(s=phrase)
        last = chain[-1]
        assert last.value != "person"
        questions.append(
            Question("joined", say(last.question, phrase), " ".join(hops), (nodes[-1],), last.value)
        )
    return Problem(tuple(needles), tuple(questions))


def _kinds(relation: Relation) -> set[str]:
    return {relation.subject, relation.value}


def _levels(rng: Rng, split: Split, chain: Sequence[Relation], count: int) -> list[list[str]]:
    """For the subject and each value of a chain, ``count`` entities; none stands at two levels."""
    kinds = [chain[0].subject, *(relation.value for relation in chain)]
    drawn = {k: entities(rng, split, k, count * kinds.count(k)) for k in dict.fromkeys(kinds)}
    return [[drawn[kind].pop() for _ in range(count)] for kind in kinds]
