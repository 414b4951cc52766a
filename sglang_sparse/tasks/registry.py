# SPDX-License-Identifier: Apache-2.0
"""The tasks by name, and the one function that draws samples of them."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from sglang_sparse.tasks.aggregation import collect, tally
from sglang_sparse.tasks.counting import common_words, distant_words, frequent_words
from sglang_sparse.tasks.dialogues import dialogue
from sglang_sparse.tasks.encoding import ASSISTANT, BOS, END, USER, Encoder, split_turns
from sglang_sparse.tasks.layout import ContextBuilder
from sglang_sparse.tasks.needles import multi_key, multi_query, multi_value, passkey, single_key
from sglang_sparse.tasks.reading import forms, joined, sentences, similar_keys
from sglang_sparse.tasks.sample import Problem, Sample
from sglang_sparse.tasks.tracing import variable_tracking
from sglang_sparse.tasks.words import PARTLY_HELD_OUT, SPLITS, Split, check_split

MIN_LENGTH, MAX_LENGTH = 256, 32768

Generator = Callable[[np.random.Generator, Split, int], Problem]

# In the style of RULER: one form of sentence and question.
RULER_TASKS: dict[str, Generator] = {
    "single_key": single_key,
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "passkey": passkey,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
# Natural sentences, and a list: held-out words, sentences and forms of a question are new to a
# trained model.
READING_TASKS: dict[str, Generator] = {
    "similar_keys": similar_keys,
    "sentences": sentences,
    "forms": forms,
    "joined": joined,
    "collect": collect,
    "tally": tally,
    "dialogue": dialogue,
    "distant_words": distant_words,
}
TASKS = RULER_TASKS | READING_TASKS
_STREAMS = (*SPLITS, *PARTLY_HELD_OUT)
NEEDLE_TASKS = ("single_key", "multi_key", "multi_value", "multi_query")


class TaskSuite:
    """Draws samples of one split with one tokenizer; the filler is encoded once.

    The sample ``(task, length, seed, index)`` of a split is the same whatever else was drawn.
    """

    def __init__(self, encoder: Encoder, split: Split = "heldout") -> None:
        """Prepare the filler of ``split``.

        Raises:
            ValueError: unknown split.
        """
        check_split(split)
        self.encoder = encoder
        self.split: Split = split
        self.builder = ContextBuilder(encoder, split)

    def rng(self, task: str, length: int, seed: int, index: int) -> np.random.Generator:
        """The generator behind one sample; splits never share a stream."""
        entropy = [seed, index, length, zlib.crc32(task.encode()), _STREAMS.index(self.split)]
        return np.random.default_rng(entropy)

    def sample(
        self, task: str, length: int, seed: int = 0, index: int = 0, depth: float | None = None
    ) -> Sample:
        """One sample whose prompt and answer fit in ``length`` tokens.

        Args:
            task: A key of ``TASKS``.
            length: 256 to 32,768 tokens.
            depth: Puts the needle that the question asks about at this depth ("needle at depth d").

        Raises:
            ValueError: unknown task, length or depth out of range, or a depth for a task that has
                no needle or whose needles stand in an order.
        """
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; allowed: {', '.join(TASKS)}")
        if not MIN_LENGTH <= length <= MAX_LENGTH:
            raise ValueError(f"length {length} is outside {MIN_LENGTH} to {MAX_LENGTH} tokens")
        rng = self.rng(task, length, seed, index)
        problem = TASKS[task](rng, self.split, length)
        if depth is not None:
            problem = _at_depth(problem, depth)
        question = problem.questions[0]
        tail = f"\n\n{question.prompt}"
        head_ids = self.encoder.encode(BOS + USER)
        tail_ids = self.encoder.encode(tail + END + ASSISTANT)
        answer_ids = self.encoder.encode(question.answer + END)
        room = length - len(head_ids) - len(tail_ids) - len(answer_ids)
        body = _trim(self.encoder, problem.body, room)
        context = self.builder.build(rng, problem.needles, room, problem.style, body)
        shift = len(head_ids)
        *history, (_, content) = split_turns(context.text + tail)
        return Sample(
            task=task,
            split=self.split,
            seed=seed,
            index=index,
            length=length,
            content=content,
            prompt=BOS + USER + context.text + tail + END + ASSISTANT,
            prompt_ids=[*head_ids, *map(int, context.ids), *tail_ids],
            answer=question.answer,
            answer_ids=answer_ids,
            values=question.values,
            needle_spans=tuple((a + shift, b + shift) for a, b in context.spans),
            depth=problem.needles[0].depth if problem.needles else 0.0,
            value_kind=question.value_kind,
            history=tuple(history),
        )

    def samples(
        self, task: str, length: int, count: int, seed: int = 0, depth: float | None = None
    ) -> list[Sample]:
        """The first ``count`` samples under ``seed``."""
        return [self.sample(task, length, seed, i, depth) for i in range(count)]

    def heldout_text(self, tokens: int, count: int) -> Iterator[list[int]]:
        """``count`` stretches of consecutive text, each of ``tokens`` token ids, for perplexity."""
        ids = self.builder.text.ids
        step = max((len(ids) - tokens) // max(count, 1), 1)
        for i in range(count):
            start = (i * step) % max(len(ids) - tokens, 1)
            yield [int(t) for t in ids[start : start + tokens]]


def _at_depth(problem: Problem, depth: float) -> Problem:
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth {depth} is outside 0 to 1")
    if not problem.needles:
        raise ValueError("this task has no needle, so no depth can be set")
    if problem.ordered:
        raise ValueError("the needles of this task stand in an order, so no depth can be set")
    first = replace(problem.needles[0], depth=depth)
    return replace(problem, needles=(first, *problem.needles[1:]))


def _trim(encoder: Encoder, body: tuple[str, ...] | None, room: int) -> tuple[str, ...] | None:
    if body is None:
        return None
    while len(encoder.encode("".join(body))) > room:
        body = body[: int(len(body) * 0.97)]
    return body
