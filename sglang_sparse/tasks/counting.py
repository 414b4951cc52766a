# SPDX-License-Identifier: Apache-2.0
"""Word tasks: which words of a long list are the most common, or the most frequent."""

import numpy as np

from sglang_sparse.tasks.needles import join, pick
from sglang_sparse.tasks.sample import Problem, Question
from sglang_sparse.tasks.words import Split, list_words

ASKED = 3
_TOKENS_A_WORD = 2


def common_words(rng: np.random.Generator, split: Split, length: int) -> Problem:
    """Three words come ten times as often as each other one (RULER's common words extraction)."""
    words = max((length - 96) // _TOKENS_A_WORD, 24)
    pool = pick(rng, list_words(split), min(24, len(list_words(split))))
    rare = max(words // (3 * 10 + len(pool) - ASKED), 1)
    bag = [w for w in pool[:ASKED] for _ in range(10 * rare)]
    bag += [w for w in pool[ASKED:] for _ in range(rare)]
    return _problem("common_words", "most common", rng, bag, pool[:ASKED])


def frequent_words(rng: np.random.Generator, split: Split, length: int) -> Problem:
    """Word frequencies follow a zeta law of exponent 2 (RULER's frequent words extraction)."""
    words = max((length - 96) // _TOKENS_A_WORD, 24)
    pool = pick(rng, list_words(split), min(24, len(list_words(split))))
    share = 1.0 / np.arange(1, len(pool) + 1) ** 2
    counts = np.maximum((share / share.sum() * words).astype(int), 1)
    bag = [w for w, c in zip(pool, counts, strict=True) for _ in range(int(c))]
    return _problem("frequent_words", "most frequent", rng, bag, pool[:ASKED])


def _problem(
    task: str, adjective: str, rng: np.random.Generator, bag: list[str], top: list[str]
) -> Problem:
    shuffled = [bag[i] for i in rng.permutation(len(bag))]
    body = tuple(("\n" if i == 0 else " ") + w for i, w in enumerate(shuffled))
    question = Question(
        task,
        f"Which {ASKED} words are the {adjective}?",
        f"The {adjective} words are {join(top)}.",
        tuple(top),
    )
    return Problem((), (question,), body=body)
