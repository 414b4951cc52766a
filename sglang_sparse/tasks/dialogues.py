# SPDX-License-Identifier: Apache-2.0
"""Dialogues of several turns: facts in each message, corrections, questions cut short."""

from dataclasses import replace

import numpy as np

from sglang_sparse.tasks import training_forms as more
from sglang_sparse.tasks.entities import entities
from sglang_sparse.tasks.reading import answered, room_for
from sglang_sparse.tasks.relations import RELATIONS, noun, say, statement, wrapped
from sglang_sparse.tasks.sample import Needle, Problem, Question
from sglang_sparse.tasks.templates import Forms
from sglang_sparse.tasks.words import Split

Rng = np.random.Generator
CORRECTIONS = Forms(
    (
        "A correction to what was said before: {f}",
        "This has changed since: {f}",
        "Forget what I wrote earlier. {f}",
    ),
    ("I was wrong above, please note: {f}", "News, and it replaces the old: {f}"),
    more.CORRECTIONS,
)
FOLLOW_UPS = Forms(
    ("And {s}?", "What about {s}?", "Now the same for {s}."),
    ("How about {s}?", "The same question again, but for {s}."),
    more.FOLLOW_UPS,
)


def dialogue(rng: Rng, split: Split, length: int) -> Problem:
    """One to four turns before the last question; each message brings text and facts.

    A later message corrects some of the facts, and the last one counts. Half of the questions name
    the subject alone ("And the kite?"), after a turn that asked in full.
    """
    single = [r for r in RELATIONS.values() if r.value != "person"]
    relation = single[int(rng.integers(len(single)))]
    count = room_for(length, 10, 128)
    spare = 1 if length < 1024 else count // 3
    subjects = [noun(relation.subject, s) for s in entities(rng, split, relation.subject, count)]
    values = entities(rng, split, relation.value, count + spare)
    depths = rng.random(count) * 0.6
    needles: list[Needle] = []
    latest: dict[str, list[tuple[float, str]]] = {}

    def state(subject: str, word: str, depth: float, frame: str | None = None) -> None:
        template = statement(rng, split, relation.statements)
        parts = (subject, noun(relation.value, word))
        text = say(template, *parts)
        text = frame.format(f=text) if frame is not None else text
        needles.append(Needle(text, depth, parts=parts))
        latest.setdefault(subject, []).append((depth, word))

    for subject, word, depth in zip(subjects, values, depths, strict=False):
        state(subject, word, float(depth))
    for i in rng.choice(count, size=spare, replace=False):
        after = float(depths[i] + 0.05 + rng.random() * (0.9 - depths[i]))
        state(subjects[i], values[-1], after, CORRECTIONS.draw(rng, split))
        values.pop()

    asked_before = 1 if length < 1024 else int(rng.integers(1, 5))
    for depth in np.sort(rng.random(asked_before)) * 0.35 + 0.62:
        subject = subjects[int(rng.integers(count))]
        known = [word for at, word in latest[subject] if at < depth]
        turn = _ask(rng, split, relation.question, subject, full=True)
        needles.append(
            Needle(turn, float(depth), answered("", relation, "", subject, known[-1]).answer)
        )

    questions: list[Question] = []
    for subject in subjects[:3]:
        prompt = _ask(rng, split, relation.question, subject, full=rng.random() < 0.5)
        word = latest[subject][-1][1]
        question = answered("dialogue", relation, prompt, subject, word)
        questions.append(replace(question, parts=(subject,)))
    return Problem(tuple(needles), tuple(questions), ordered=True)


def _ask(rng: Rng, split: Split, question: str, subject: str, full: bool) -> str:
    if full:
        return wrapped(rng, split, say(question, subject))
    return say(FOLLOW_UPS.asked(rng, split), subject)
