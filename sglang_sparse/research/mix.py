# SPDX-License-Identifier: Apache-2.0
"""Training rows: a stretch of the corpus, or a context with needles of several tasks and a chat.

The context of a chat is corpus or, less often, the tasks' own filler, which is too small to be
learnt: a model would know it by heart.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_sparse.research.cloze import Cloze
from sglang_sparse.research.corpus.tokens import load
from sglang_sparse.research.filler import TokenPieces
from sglang_sparse.tasks.encoding import ASSISTANT, BOS, END, USER, FileEncoder
from sglang_sparse.tasks.entities import entities
from sglang_sparse.tasks.layout import ContextBuilder, DoesNotFit
from sglang_sparse.tasks.needles import depths, pick
from sglang_sparse.tasks.registry import READING_TASKS, TASKS
from sglang_sparse.tasks.relations import wrapped
from sglang_sparse.tasks.sample import FillerStyle, Needle, Problem, Question
from sglang_sparse.tasks.wide_words import WIDE
from sglang_sparse.tasks.words import Split, keys, values

TRAIN_TASKS = (*TASKS, "fact")
_MIXED = (
    "single_key",
    "multi_key",
    "multi_value",
    "multi_query",
    "passkey",
    "variable_tracking",
    "fact",
)
_MIXED_WEIGHTS = np.array([0.10, 0.18, 0.20, 0.18, 0.08, 0.18, 0.08])
_READING = tuple(READING_TASKS)
_READING_WEIGHTS = np.array([0.02, 0.06, 0.04, 0.33, 0.37, 0.03, 0.12, 0.03])
# Their questions lean on those before, or their context is a list.
_ALONE = ("dialogue", "distant_words")
# Share of the other rows with nothing beside one problem, as the prompts of an evaluation have it:
# a model that sees many people in each row counts badly where there are few.
_BARE = 0.5
# So that a long row is worth its time, it has further reading tasks, up to one in so many tokens.
_BESIDE = ("sentences", "forms", "joined", "collect")
_BESIDE_WEIGHTS = np.array([0.10, 0.05, 0.40, 0.45])
_BESIDE_TOKENS, _MOST_BESIDE = 2048, 6
_READING_SHARE = 0.85
# Share of the reading tasks with words and sentences beyond those of the training split.
_WIDE_SHARE = 0.9
# Share of those whose facts are told in sentences of the corpus, and of their facts.
_CLOZE_SHARE, _CLOZE_FACTS = 0.2, 0.8
# Parts of the corpus that words of the wide split are taken from, and the tokens of each.
_STRETCHES, _STRETCH = 400, 8192
# Share of the questions of the wide split that are made of sentences of the corpus, too.
_CLOZE_QUESTIONS = 0.3
# Share of them that stand before or behind a sentence of the corpus.
_AMONG_TEXT = 0.2
_WORD_TASK_SHARE, _WORD_TASK_TOKENS = 0.14, 16384
_OWN_FILLER_SHARE = 0.3
_NOUNS = tuple(
    """door code|PIN|password|secret number|access code|lucky number|room number|phone number|
    account number|order number|combination|secret word|favorite color|release date|capital|winner|
    name of the cat|name of the ship|meeting point|best city|flight number|code word|budget|total|
    serial number|password of the server|address of the shop|price of the ticket|answer""".replace(
        "\n", ""
    ).split("|")
)
_FACT_FORMS = (
    "What is the {}?",
    "What is the {}?",
    "Tell me the {}.",
    "Do you know the {}?",
    "I need the {}.",
    "The {}?",
    "Can you look up the {}?",
    "Could you give me the {}?",
    "I forgot the {}.",
    "Please find the {}.",
    "What was the {}?",
)
_FACT_TOLD = (
    "{v} is the {s}.",
    "The {s} was {v}.",
    "Remember: the {s} is {v}.",
    "The {s} is now {v}.",
)
# Share of the questions with one form in the tasks that are asked with words around them.
_REWORDED = 0.3
# An answer weighs more where a row asks less often than once in so many tokens.
_ASKED_EVERY, _MOST_WEIGHT = 256, 16
# People and towns; words before a name, or at the start of an answer, are none.
_NAME = re.compile(r"\b(?!(?:The|Most|Mrs?|Ms|Dr|Miss|Aunt|Uncle|Captain)\b)[A-Z][a-z]+")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Batch:
    """Rows of token ids, ``[B, T]``, and what to learn from them.

    ``kinds`` says of each position's successor 0 ignore, 1 text, 1 + W answer of weight W;
    ``spans`` is 0, or 1 + the number of its answer; ``tasks`` names each answer's task.
    """

    ids: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    spans: NDArray[np.int32]
    tasks: NDArray[np.uint8]


def general_fact(rng: np.random.Generator, split: Split, length: int) -> Problem:
    """Facts of the form "The door code is 4821." or "The password of Brave Otter is kiwa."."""
    needles, questions = [], []
    for noun in pick(rng, _NOUNS, 2):
        noun = " ".join(noun.split())
        subject = noun
        if rng.random() < 0.5:
            named = rng.random() < 0.5
            owners = entities(rng, "wide", "person", 1) if named else pick(rng, keys(split), 1)
            subject = f"{noun} of {owners[0]}"
        value = _value(rng, split)
        statement = told = f"The {subject} is {value}."
        if rng.random() < 0.3:
            told = _FACT_TOLD[int(rng.integers(len(_FACT_TOLD)))].format(s=subject, v=value)
        needles.append(Needle(told[:1].upper() + told[1:], depths(rng, 1)[0]))
        form = _FACT_FORMS[int(rng.integers(len(_FACT_FORMS)))]
        questions.append(Question("fact", form.format(subject), statement, ()))
    return Problem(tuple(needles), tuple(questions))


def _split(rng: np.random.Generator) -> Split:
    return "wide" if rng.random() < _WIDE_SHARE else "train"


def _reworded(rng: np.random.Generator, question: Question) -> Question:
    if rng.random() >= _REWORDED:
        return question
    return replace(question, prompt=wrapped(rng, "train", question.prompt))


def _value(rng: np.random.Generator, split: Split) -> str:
    kind = rng.random()
    if kind < 0.5:
        digits = int(rng.integers(2, 9))
        if digits == 5:
            return pick(rng, values(split), 1)[0]
        return "".join(str(d) for d in rng.integers(0, 10, digits))
    if kind < 0.75:
        return pick(rng, keys(split), 1)[0].replace("-", " ")
    word = "".join(_LETTERS[i] for i in rng.integers(0, 26, int(rng.integers(3, 8))))
    return word.capitalize() if rng.random() < 0.5 else word


Row = tuple[list[int], list[tuple[int, int, int]]]


class RowMaker:
    """Builds training rows of the training split."""

    def __init__(self, encoder: FileEncoder, corpus: NDArray[np.uint16], text_rows: float) -> None:
        """Prepare both kinds of filler.

        Args:
            corpus: the training text, ``[tokens]``.
            text_rows: share of the rows that are text alone.
        """
        self.encoder = encoder
        self.corpus = corpus
        self.text_rows = text_rows
        pieces = TokenPieces(encoder, corpus)
        WIDE.read(encoder.decode(self._stretches()))
        self.cloze = Cloze(pieces.texts, WIDE.names_no_value)
        self.builder = ContextBuilder(encoder, "train", pieces)
        self.own = ContextBuilder(encoder, "train")
        self._bos = encoder.token_id(BOS)
        self._head = encoder.encode(BOS + USER)

    def _stretches(self) -> list[int]:
        """Parts of the corpus from all over it, to read words from."""
        apart = max(len(self.corpus) // _STRETCHES, _STRETCH)
        starts = range(0, len(self.corpus), apart)
        return [i for at in starts for i in self.corpus[at : at + _STRETCH].tolist()]

    def text(self, rng: np.random.Generator, length: int) -> list[int]:
        """``length`` tokens of the corpus from anywhere on, behind the one that begins a text."""
        start = int(rng.integers(max(len(self.corpus) - length + 1, 1)))
        return [self._bos, *self.corpus[start : start + length - 1].tolist()]

    def row(self, rng: np.random.Generator, length: int, builder: ContextBuilder) -> Row:
        """Token ids, at most ``length``, and ``(first, last + 1, task)`` of every answer."""
        while True:
            try:
                return self._chat(rng, self._problem(rng, length), length, builder)
            except DoesNotFit:  # in a short row
                continue

    def _chat(
        self, rng: np.random.Generator, problem: Problem, length: int, builder: ContextBuilder
    ) -> Row:
        turns: list[tuple[list[int], list[int], int]] = []
        asked = 0
        for question in problem.questions:
            lead = USER if turns else "\n\n"
            prompt = self.encoder.encode(lead + question.prompt + END + ASSISTANT)
            answer = self.encoder.encode(question.answer + END)
            if asked and asked + len(prompt) + len(answer) > length // 3:
                continue
            asked += len(prompt) + len(answer)
            turns.append((prompt, answer, TRAIN_TASKS.index(question.task)))
        room, body = length - len(self._head) - asked, problem.body
        if body is not None:
            while len(self.encoder.encode("".join(body))) > room:
                body = body[: int(len(body) * 0.95)]
        context = builder.build(rng, problem.needles, room, problem.style, body)
        ids = [*self._head, *context.ids.tolist()]
        spans = []
        for needle, (_, last) in zip(problem.needles, context.spans, strict=False):
            if needle.reply is not None:  # the turn ends with the answer and one marker
                answer = self.encoder.encode(needle.reply + END)
                last += len(self._head) - 1
                spans.append((last - len(answer), last, turns[0][2]))
        for prompt, answer, task in turns:
            ids += prompt
            spans.append((len(ids), len(ids) + len(answer), task))
            ids += answer
        return ids, spans

    def _problem(self, rng: np.random.Generator, length: int) -> Problem:
        """A list, a dialogue or one reading task alone, or several that share the context."""
        if rng.random() < _WORD_TASK_SHARE and length <= _WORD_TASK_TOKENS:
            name = "common_words" if rng.random() < 0.4 else "frequent_words"
            return TASKS[name](rng, "train", length)
        count = max(1, min(int(rng.integers(1, 3)) * (length.bit_length() - 8), 10))
        if rng.random() < 0.15:
            count = 1
        drawn = list(rng.choice(_MIXED, size=count, p=_MIXED_WEIGHTS))
        once = ("passkey", "fact")  # two of these would contradict each other
        names = [n for i, n in enumerate(drawn) if n not in once or i == drawn.index(n)]
        if rng.random() < _READING_SHARE:
            reading = str(rng.choice(_READING, p=_READING_WEIGHTS))
            if reading in _ALONE or rng.random() < _BARE:
                return self._reading(rng, reading, length)
            most = min(length // _BESIDE_TOKENS, _MOST_BESIDE)
            size = int(rng.integers(most + 1))
            beside = rng.choice(_BESIDE, size=size, p=_BESIDE_WEIGHTS)
            names = [reading, *map(str, beside), *names[: min(max(length // 4096, 2), 4)]]
        needles: list[Needle] = []
        questions: list[Question] = []
        style: FillerStyle = "text"
        known: set[str] = set()
        for name in names:
            named: set[str] = set()
            if name in READING_TASKS:
                problem = self._reading(rng, name, length)
                named = {n for q in problem.questions for n in _NAME.findall(q.answer)}
                if named & known:  # of two people of one name, an answer may be either's
                    continue
            else:
                make = general_fact if name == "fact" else TASKS[name]
                problem = make(rng, "train", length)
            if needles and 17 * (len(needles) + len(problem.needles)) > length // 3:
                continue
            known |= named
            needles += problem.needles
            plain = name not in READING_TASKS
            questions += [_reworded(rng, q) if plain else q for q in problem.questions]
            style = problem.style
        order = rng.permutation(len(questions))
        return Problem(tuple(needles), tuple(questions[i] for i in order), style)

    def _reading(self, rng: np.random.Generator, name: str, length: int) -> Problem:
        """A reading task; the wide split tells and asks in many more sentences."""
        split = _split(rng)
        problem = TASKS[name](rng, split, length)
        if split == "train":
            return problem
        questions = tuple(self._asked(rng, question) for question in problem.questions)
        problem = replace(problem, questions=questions)
        if rng.random() >= _CLOZE_SHARE:
            return problem
        needles = tuple(
            replace(needle, text=self.cloze.sentence(rng, *needle.parts))
            if needle.parts is not None and rng.random() < _CLOZE_FACTS
            else needle
            for needle in problem.needles
        )
        return replace(problem, needles=needles)

    def _asked(self, rng: np.random.Generator, question: Question) -> Question:
        prompt = question.prompt
        if question.parts is not None and rng.random() < _CLOZE_QUESTIONS:
            prompt = self.cloze.question(rng, *question.parts)
        if rng.random() < _AMONG_TEXT:
            both = [prompt, self.cloze.sentence(rng)]
            prompt = " ".join(both if rng.random() < 0.5 else both[::-1])
        return replace(question, prompt=prompt)

    def batch(self, seed: int, batch: int, length: int) -> Batch:
        """``batch`` rows of ``length`` tokens, padded at the end with token 0."""
        rng = np.random.default_rng([seed, length, 77])
        ids = np.zeros((batch, length), dtype=np.uint16)
        kinds = np.zeros((batch, length), dtype=np.uint8)
        spans = np.zeros((batch, length), dtype=np.int32)
        tasks: list[int] = []
        for i in range(batch):
            if rng.random() < self.text_rows:
                learnt = True
                row: list[int] = self.text(rng, length)
                answers: list[tuple[int, int, int]] = []
            else:
                learnt = rng.random() >= _OWN_FILLER_SHARE
                row, answers = self.row(rng, length, self.builder if learnt else self.own)
            ids[i, : len(row)] = row
            kinds[i, : len(row) - 1] = int(learnt)
            weight = min(max(length // (_ASKED_EVERY * max(len(answers), 1)), 1), _MOST_WEIGHT)
            for first, last, task in answers:
                tasks.append(task)
                kinds[i, first - 1 : last - 1] = 1 + weight
                spans[i, first - 1 : last - 1] = len(tasks)
        return Batch(ids, kinds, spans, np.asarray(tasks, dtype=np.uint8))


@dataclass(frozen=True)
class RowSource:
    """Where rows come from: folder of the tokenizer, token file, share of rows of text alone."""

    tokenizer: Path
    corpus: Path
    text_rows: float


@dataclass
class _Worker:
    maker: RowMaker | None = None
    source: RowSource | None = None


_WORKER = _Worker()


def init_worker(source: RowSource) -> None:
    """Load the tokenizer and the text, for this process and those forked from it."""
    if _WORKER.source == source:
        return
    _WORKER.source = source
    corpus = load(source.corpus).train
    _WORKER.maker = RowMaker(FileEncoder(source.tokenizer), corpus, source.text_rows)


def single_threaded() -> None:
    """Keep the tokenizer from starting threads in a forked process, where they would deadlock."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def worker_batch(job: tuple[int, int, int]) -> Batch:
    """``RowMaker.batch`` in a worker process; ``job`` is its arguments."""
    if _WORKER.maker is None:
        raise RuntimeError("init_worker has not run in this process")
    return _WORKER.maker.batch(*job)
