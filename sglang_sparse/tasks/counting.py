# SPDX-License-Identifier: Apache-2.0
"""Word tasks: which words of a long list are the most common, or the most frequent."""

from dataclasses import replace

import numpy as np

from sglang_sparse.tasks.needles import join, pick
from sglang_sparse.tasks.relations import wrapped
from sglang_sparse.tasks.sample import Problem, Question
from sglang_sparse.tasks.words import Split, list_words

ASKED = 3
_TOKENS_A_WORD = 2


def common_words(rng: np.random.Generator, split: Split, length: int) -> Problem:
    """Three words come ten times as often as each other one (RULER's common words extraction)."""
    common, rare = _bags(rng, split, length, 10)
    top = list(dict.fromkeys(common))
    return _problem("common_words", "most common", _shuffled(rng, common + rare), top)


def distant_words(rng: np.random.Generator, split: Split, length: int) -> Problem:
    """Three words come five times as often as each other one, all in the list's first half.

    So the words that were read last say nothing of those that are asked for.
    """
    common, rare = _bags(rng, split, length, 5)
    half = (len(common) + len(rare)) // 2
    rare = _shuffled(rng, rare)
    first = _shuffled(rng, common + rare[: half - len(common)])
    top = list(dict.fromkeys(common))
    problem = _problem("distant_words", "most common", first + rare[half - len(common) :], top)
    (question,) = problem.questions
    prompt = wrapped(rng, split, question.prompt)
    return replace(problem, questions=(replace(question, prompt=prompt),))


def _bags(
    rng: np.random.Generator, split: Split, length: int, times: int
) -> tuple[list[str], list[str]]:
    """The common words, each so many ``times`` as often as each rare one, and the rare ones."""
    words = max((length - 96) // _TOKENS_A_WORD, 24)
    pool = pick(rng, list_words(split), min(24, len(list_words(split))))
    rare = max(words // (ASKED * times + len(pool) - ASKED), 1)
    common = [w for w in pool[:ASKED] for _ in range(times * rare)]
    return common, [w for w in pool[ASKED:] for _ in range(rare)]


def frequent_words(rng: np.random.Generator, split: Split, length: int) -> Problem:
    """Word frequencies follow a zeta law of exponent 2 (RULER's frequent words extraction)."""
    words = max((length - 96) // _TOKENS_A_WORD, 24)
    pool = pick(rng, list_words(split), min(24, len(list_words(split))))
    share = 1.0 / np.arange(1, len(pool) + 1) ** 2
    counts = np.maximum((share / share.sum() * words).astype(int), 1)
    bag = [w for w, c in zip(pool, counts, strict=True) for _ in range(int(c))]
    return _problem("frequent_words", "most frequent", _shuffled(rng, bag), pool[:ASKED])


def _shuffled(rng: np.random.Generator, words: list[str]) -> list[str]:
    return [words[i] for i in rng.permutation(len(words))]


def _problem(task: str, adjective: str, words: list[str], top: list[str]) -> Problem:
    body = tuple(("\n" if i == 0 else " ") + w for i, w in enumerate(words))
    question = Question(
        task,
        f"Which {ASKED} words are the {adjective}?",
        f"The {adjective} words are {join(top)}.",
        tuple(top),
    )
    return Problem((), (question,), body=body)
