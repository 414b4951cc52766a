# SPDX-License-Identifier: Apache-2.0
"""Facts in natural sentences: how each relation is stated, asked for and answered.

Every sentence and every form of a question belongs to one split. The first form of a question is
plain and known to both. An answer has one form, which restates the fact before the value ends it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sglang_sparse.tasks import composed_forms as composed
from sglang_sparse.tasks import sentences
from sglang_sparse.tasks import training_forms as more
from sglang_sparse.tasks.templates import Forms
from sglang_sparse.tasks.vocabulary import Kind
from sglang_sparse.tasks.wide_words import WIDE
from sglang_sparse.tasks.words import Split

Rng = np.random.Generator
Subject = Literal["person", "thing", "town"]
_ARTICLE = {"place": "the ", "thing": "the ", "river": "the ", "animal": "a ", "job": "a "}


@dataclass(frozen=True)
class Relation:
    """One kind of fact: a subject ``{s}`` and its value ``{v}``.

    Attributes:
        subject, value: kinds of the two; a value of kind ``person`` is only passed through.
        plain: the sentence that answers repeat.
        question: the plain question.
        statements, questions: further sentences and forms.
        phrase: names the value by its subject, where facts are joined.
    """

    subject: Subject
    value: Kind | Literal["person"]
    plain: str
    question: str
    statements: Forms
    questions: Forms
    phrase: Forms


_RELATIONS: dict[str, Relation] = {
    "lives": Relation(
        "person",
        "town",
        "{s} lives in {v}.",
        "Where does {s} live?",
        Forms(
            (
                "{s} has settled in {v} for good.",
                "{v} is where {s} has had a home for years.",
                "Since the flood, {s} has been living in {v} with two cousins.",
                "The letters for {s} are always sent to {v}, to the old address.",
                "Few people know it, but {s} moved to {v} last winter.",
            ),
        ),
        Forms(
            (
                "In which town does {s} live?",
                "Which town does {s} live in?",
                "Tell me where {s} lives.",
                "{s} lives in which town?",
                "I wonder where {s} lives.",
            ),
            (
                "What is the name of the town that {s} lives in?",
                "Could you say where {s} has a home?",
                "Name the town where one finds {s}.",
            ),
        ),
        Forms(
            ("the town where {s} lives", "the town {s} lives in"),
            ("the home town of {s}", "the town that {s} calls home"),
        ),
    ),
    "works": Relation(
        "person",
        "job",
        "{s} works as {v}.",
        "What does {s} work as?",
        Forms(
            (
                "For ten years {s} has earned a living as {v}.",
                "{s} was trained as {v} and still does that work.",
                "Everybody on our street calls on {s} when they need {v}.",
                "On weekdays {s} is {v}, on Sundays nothing at all.",
            ),
        ),
        Forms(
            (
                "What is the job of {s}?",
                "Which job does {s} have?",
                "Tell me what {s} does for a living.",
                "What kind of work does {s} do?",
            ),
            (
                "How does {s} earn money?",
                "Could you name the trade of {s}?",
                "By profession, what is {s}?",
            ),
        ),
        Forms(("the job of {s}",), ("the profession of {s}",)),
    ),
    "keeps": Relation(
        "person",
        "animal",
        "{s} keeps {v}.",
        "Which animal does {s} keep?",
        Forms(
            (
                "{s} has raised {v} from a very young age.",
                "In the yard of {s} there is {v} that is fed twice a day.",
                "Against all advice, {s} bought {v} at the fair.",
                "The neighbors complain that {s} owns {v} that is never quiet.",
            ),
        ),
        Forms(
            (
                "What animal does {s} keep?",
                "Tell me which animal {s} has.",
                "{s} keeps which animal?",
            ),
            (
                "What kind of creature lives with {s}?",
                "Could you name the pet of {s}?",
            ),
        ),
        Forms(("the animal of {s}",), ("the pet of {s}",)),
    ),
    "owns": Relation(
        "person",
        "thing",
        "{s} owns {v}.",
        "What does {s} own?",
        Forms(
            (
                "{v} belongs to {s} and to nobody else.",
                "At the auction {s} paid a good price for {v}.",
                "{s} inherited {v} from an aunt.",
                "It is well known that {v} is the property of {s}.",
            ),
        ),
        Forms(
            (
                "Which object does {s} own?",
                "Tell me what {s} owns.",
                "Which object belongs to {s}?",
            ),
            (
                "What is the property of {s}?",
                "Could you name the object that is owned by {s}?",
            ),
        ),
        Forms(
            ("the object that {s} owns", "the object of {s}"),
            ("the object that belongs to {s}", "the property of {s}"),
        ),
    ),
    "stands": Relation(
        "thing",
        "place",
        "{s} is in {v}.",
        "Where is {s}?",
        Forms(
            (
                "Someone has put {s} in {v} again.",
                "You will find {s} in {v}, behind the second door.",
                "After a long search they found {s} in {v}.",
                "{s} was taken to {v} and stayed there.",
            ),
        ),
        Forms(
            (
                "In which building or room is {s}?",
                "Tell me where {s} is.",
                "Where can I find {s}?",
                "Do you know where {s} is?",
            ),
            (
                "What is the location of {s}?",
                "Where would I have to look for {s}?",
                "Say where {s} has been left.",
            ),
        ),
        Forms(("the location of {s}",), ("the spot of {s}",)),
    ),
    "code": Relation(
        "thing",
        "number",
        "The number of {s} is {v}.",
        "What is the number of {s}?",
        Forms(
            (
                "In the register {s} carries the number {v}.",
                "{v} is written in red ink on {s}.",
                "The clerk gave {s} the number {v} and put it on the list.",
                "Remember that {s} has the number {v}.",
            ),
        ),
        Forms(
            (
                "Which number does {s} have?",
                "Tell me the number of {s}.",
                "What number was given to {s}?",
            ),
            (
                "Under which number is {s} listed?",
                "Could you look up the number of {s}?",
            ),
        ),
        Forms(("the number of {s}",), ("the number given to {s}",)),
    ),
    "river": Relation(
        "town",
        "river",
        "The river of {s} is {v}.",
        "Which river flows through {s}?",
        Forms(
            (
                "{v} flows right through the middle of {s}.",
                "{s} was built on both banks of {v}.",
                "The bridges of {s} all cross {v}.",
                "Barges on {v} bring coal and grain to {s}.",
            ),
        ),
        Forms(
            (
                "What is the river of {s}?",
                "Tell me which river flows through {s}.",
                "Which river does one see in {s}?",
            ),
            (
                "On which river was {s} built?",
                "Could you name the river that runs through {s}?",
            ),
        ),
        Forms(("the river of {s}",), ("the river that passes {s}",)),
    ),
    "mayor": Relation(
        "town",
        "person",
        "The mayor of {s} is {v}.",
        "Who is the mayor of {s}?",
        Forms(
            (
                "The people of {s} have elected {v} as their mayor.",
                "{v} has been the mayor of {s} for two terms.",
                "As mayor of {s}, {v} opened the new school.",
            ),
        ),
        Forms(("Tell me who the mayor of {s} is.",), ("By whom is {s} governed?",)),
        Forms(("the mayor of {s}",), ("the person who is mayor of {s}",)),
    ),
}

RELATIONS = {
    name: replace(
        relation,
        statements=replace(
            relation.statements,
            heldout=sentences.heldout()[name],
            wide=more.STATEMENTS[name] + composed.STATEMENTS.get(name, ()),
            plain=sentences.training()[name],
        ),
        questions=replace(relation.questions, wide=more.QUESTIONS[name]),
        phrase=replace(relation.phrase, wide=more.PHRASES[name]),
    )
    for name, relation in _RELATIONS.items()
}

# Around a statement of the wide split.
_LEADS = more.LEADS + composed.LEADS
_TAILS = more.TAILS + composed.TAILS
# Share of training's statements that are drawn again until the value stands before the subject, at
# most so often. What is asked for is then read before it is known to be, which models learn later.
_VALUE_FIRST, _MOST_DRAWS = 0.25, 16
# Share of the questions without capitals, and in training, which knows names by those too well.
_LOWER, _LOWER_WIDE = 0.1, 0.25
# Around a whole question. The first is none.
WRAPPINGS = Forms(
    (
        "{q}",
        "Please tell me: {q}",
        "Question: {q}",
        "{q} Answer in one sentence.",
        "I have read the text, but I forgot something. {q}",
        "Can you help me? {q}",
    ),
    (
        "{q} Look in the text above.",
        "My question is this. {q}",
        "There is one thing that I must know: {q}",
        "According to what I sent you: {q}",
    ),
    more.WRAPPINGS,
)


def capital(sentence: str) -> str:
    """``sentence`` with a capital first letter."""
    return sentence[:1].upper() + sentence[1:]


def noun(kind: str, word: str) -> str:
    """``word`` with the article that its kind takes in a sentence."""
    return _ARTICLE.get(kind, "") + word


def say(template: str, subject: str, value: str = "") -> str:
    """A template filled in."""
    return capital(template.format(s=subject, v=value))


def statement(rng: Rng, split: Split, forms: Forms) -> str:
    """A sentence that states a fact; of the wide split, at times with words around it."""
    template = forms.told(rng, split)
    if split != "wide":
        return template
    if rng.random() < _VALUE_FIRST:
        for _ in range(_MOST_DRAWS - 1):
            if template.index("{v}") < template.index("{s}"):
                break
            template = forms.told(rng, split)
    if rng.random() < 0.15:
        lead = _LEADS[int(rng.integers(len(_LEADS)))]
        template = lead + template[:1].lower() + template[1:]
    if rng.random() < 0.15:
        template = template.rstrip(".") + _TAILS[int(rng.integers(len(_TAILS)))]
    while "{d}" in template:
        template = template.replace("{d}", WIDE.beside(rng), 1)
    return template


def wrapped(rng: Rng, split: Split, question: str) -> str:
    """``question`` as people ask: with words around it, or in lower case without a mark."""
    if rng.random() < (_LOWER_WIDE if split == "wide" else _LOWER):
        return question.lower().rstrip("?.")
    return WRAPPINGS.asked(rng, split).format(q=question)
