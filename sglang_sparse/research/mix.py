# SPDX-License-Identifier: Apache-2.0
"""Training rows: a context with the needles of several tasks, then a chat that asks for them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_sparse.tasks.encoding import ASSISTANT, BOS, END, USER, FileEncoder
from sglang_sparse.tasks.layout import ContextBuilder
from sglang_sparse.tasks.needles import depths, pick
from sglang_sparse.tasks.registry import RULER_TASKS, TASKS
from sglang_sparse.tasks.sample import FillerStyle, Needle, Problem, Question
from sglang_sparse.tasks.words import Split, keys, values

TRAIN_TASKS = (*RULER_TASKS, "fact")
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
_WORD_TASK_SHARE = 0.06
_NOUNS = tuple(
    """door code|PIN|password|secret number|access code|lucky number|room number|phone number|
    account number|order number|combination|secret word|favorite color|release date|capital|winner|
    name of the cat|name of the ship|meeting point|best city|flight number|code word|budget|total|
    serial number|password of the server|address of the shop|price of the ticket|answer""".replace(
        "\n", ""
    ).split("|")
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Batch:
    """Rows of token ids, ``[B, T]``, and what to learn from them.

    ``kinds`` says of each position's successor 0 ignore, 1 text, 2 answer; ``spans`` is 0, or 1 +
    the number of the answer that it is in; ``tasks`` names each answer's task.
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
        subject = noun if rng.random() < 0.6 else f"{noun} of {pick(rng, keys(split), 1)[0]}"
        statement = f"The {subject} is {_value(rng, split)}."
        needles.append(Needle(statement, depths(rng, 1)[0]))
        questions.append(Question("fact", f"What is the {subject}?", statement, ()))
    return Problem(tuple(needles), tuple(questions))


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


class RowMaker:
    """Builds training rows of the training split."""

    def __init__(
        self, encoder: FileEncoder, builder: ContextBuilder | None = None, text_share: float = 1.0
    ) -> None:
        """``text_share`` of the rows also train on their text. More would be learnt by heart."""
        self.encoder = encoder
        self.text_share = text_share
        self.builder = builder or ContextBuilder(encoder, "train")
        self._head = encoder.encode(BOS + USER)

    def row(
        self, rng: np.random.Generator, length: int
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Token ids, at most ``length``, and ``(first, last + 1, task)`` of every answer."""
        words = rng.random() < _WORD_TASK_SHARE and length <= 4096
        if words:
            name = "common_words" if rng.random() < 0.5 else "frequent_words"
            problem = TASKS[name](rng, "train", length)
            needles, questions, style = problem.needles, list(problem.questions), problem.style
            body = problem.body
        else:
            needles, questions, style = self._mixed(rng, length)
            body = None
        turns: list[tuple[list[int], list[int], int]] = []
        asked = 0
        limit = length // 3
        for question in questions:
            lead = USER if turns else "\n\n"
            prompt = self.encoder.encode(lead + question.prompt + END + ASSISTANT)
            answer = self.encoder.encode(question.answer + END)
            if asked and asked + len(prompt) + len(answer) > limit:
                continue
            asked += len(prompt) + len(answer)
            turns.append((prompt, answer, TRAIN_TASKS.index(question.task)))
        room = length - len(self._head) - asked
        if body is not None:
            while len(self.encoder.encode("".join(body))) > room:
                body = body[: int(len(body) * 0.95)]
        context = self.builder.build(rng, needles, room, style, body)
        ids = [*self._head, *context.ids.tolist()]
        spans = []
        for prompt, answer, task in turns:
            ids += prompt
            spans.append((len(ids), len(ids) + len(answer), task))
            ids += answer
        return ids, spans

    def _mixed(
        self, rng: np.random.Generator, length: int
    ) -> tuple[tuple[Needle, ...], list[Question], FillerStyle]:
        count = max(1, min(int(rng.integers(1, 3)) * (length.bit_length() - 8), 10))
        if rng.random() < 0.15:
            count = 1
        names = list(rng.choice(_MIXED, size=count, p=_MIXED_WEIGHTS))
        if names.count("passkey") > 1:
            names = [
                n for i, n in enumerate(names) if n != "passkey" or i == names.index("passkey")
            ]
        if names.count("fact") > 1:
            names = [n for i, n in enumerate(names) if n != "fact" or i == names.index("fact")]
        needles: list[Needle] = []
        questions: list[Question] = []
        style: FillerStyle = "text"
        for name in names:
            make = general_fact if name == "fact" else TASKS[name]
            problem = make(rng, "train", length)
            if needles and 17 * (len(needles) + len(problem.needles)) > length // 3:
                continue
            needles += problem.needles
            questions += problem.questions
            style = problem.style
        order = rng.permutation(len(questions))
        return tuple(needles), [questions[i] for i in order], style

    def batch(self, seed: int, batch: int, length: int) -> Batch:
        """``batch`` rows of ``length`` tokens, padded at the end with token 0."""
        rng = np.random.default_rng([seed, length, 77])
        ids = np.zeros((batch, length), dtype=np.uint16)
        kinds = np.zeros((batch, length), dtype=np.uint8)
        spans = np.zeros((batch, length), dtype=np.int32)
        tasks: list[int] = []
        for i in range(batch):
            row, answers = self.row(rng, length)
            ids[i, : len(row)] = row
            learnt = self.text_share >= 1 or rng.random() < self.text_share
            kinds[i, : len(row) - 1] = int(learnt)
            for first, last, task in answers:
                tasks.append(task)
                kinds[i, first - 1 : last - 1] = 2
                spans[i, first - 1 : last - 1] = len(tasks)
        return Batch(ids, kinds, spans, np.asarray(tasks, dtype=np.uint8))


@dataclass
class _Worker:
    maker: RowMaker | None = None
    source: tuple[str, float] | None = None


_WORKER = _Worker()


def init_worker(tokenizer: str, text_share: float) -> None:
    """Load the tokenizer and the filler, for this process and those forked from it."""
    if _WORKER.source == (tokenizer, text_share):
        return
    _WORKER.source = (tokenizer, text_share)
    _WORKER.maker = RowMaker(FileEncoder(tokenizer), text_share=text_share)


def single_threaded() -> None:
    """Keep the tokenizer from starting threads in a forked process, where they would deadlock."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def worker_batch(job: tuple[int, int, int]) -> Batch:
    """``RowMaker.batch`` in a worker process; ``job`` is its arguments."""
    if _WORKER.maker is None:
        raise RuntimeError("init_worker has not run in this process")
    return _WORKER.maker.batch(*job)
