# SPDX-License-Identifier: Apache-2.0
"""Needle tasks: a fact, or several, hidden in filler and asked for at the end."""

from collections.abc import Sequence

import numpy as np

from sglang_sparse.tasks.sample import Needle, Problem, Question
from sglang_sparse.tasks.words import Split, keys, values

Rng = np.random.Generator


def pick(rng: Rng, pool: Sequence[str], count: int) -> list[str]:
    """``count`` different entries of ``pool``."""
    return [pool[i] for i in rng.choice(len(pool), size=count, replace=False)]


def join(parts: Sequence[str]) -> str:
    """``a``, ``a and b`` or ``a, b and c``."""
    if len(parts) == 1:
        return parts[0]
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def depths(rng: Rng, count: int) -> list[float]:
    """``count`` uniform depths."""
    return [float(d) for d in rng.random(count)]


def fact(key: str, value: str) -> str:
    """The sentence that ties a value to a key."""
    return f"The magic number for {key} is {value}."


def _keyed(rng: Rng, split: Split, task: str, count: int) -> Problem:
    names, numbers = pick(rng, keys(split), count), pick(rng, values(split), count)
    needles = tuple(
        Needle(fact(k, v), d) for k, v, d in zip(names, numbers, depths(rng, count), strict=True)
    )
    questions = tuple(
        Question(task, f"What is the magic number for {k}?", fact(k, v), (v,))
        for k, v in zip(names, numbers, strict=True)
    )
    return Problem(needles, questions)


def single_key(rng: Rng, split: Split, length: int) -> Problem:
    """One needle, one question."""
    return _keyed(rng, split, "single_key", 1)


def multi_key(rng: Rng, split: Split, length: int) -> Problem:
    """One question among needles that differ in the key alone: 4, or 8 from 1K tokens on."""
    return _keyed(rng, split, "multi_key", 8 if length >= 1024 else 4)


def multi_query(rng: Rng, split: Split, length: int) -> Problem:
    """Four keys asked for at once (two under 512 tokens), among twice as many needles."""
    asked = 4 if length >= 512 else 2
    names, numbers = pick(rng, keys(split), 2 * asked), pick(rng, values(split), 2 * asked)
    needles = tuple(
        Needle(fact(k, v), d)
        for k, v, d in zip(names, numbers, depths(rng, 2 * asked), strict=True)
    )
    question = Question(
        "multi_query",
        f"What are the magic numbers for {join(names[:asked])}?",
        " ".join(fact(k, v) for k, v in zip(names[:asked], numbers[:asked], strict=True)),
        tuple(numbers[:asked]),
    )
    return Problem(needles, (question,))


def multi_value(rng: Rng, split: Split, length: int) -> Problem:
    """Four numbered values of one key (two under 512 tokens), beside a second key with as many."""
    count = 4 if length >= 512 else 2
    names, numbers = pick(rng, keys(split), 2), pick(rng, values(split), 2 * count)
    groups: list[list[str]] = []
    for i, name in enumerate(names):
        own = numbers[i * count : (i + 1) * count]
        groups.append([f"Magic number {n} for {name} is {v}." for n, v in enumerate(own, 1)])
    sentences = [sentence for group in groups for sentence in group]
    places = depths(rng, len(sentences))
    needles = tuple(Needle(s, d) for s, d in zip(sentences, places, strict=True))
    questions = tuple(
        Question(
            "multi_value",
            f"What are all magic numbers for {name}?",
            " ".join(groups[i]),
            tuple(numbers[i * count : (i + 1) * count]),
        )
        for i, name in enumerate(names)
    )
    return Problem(needles, questions)


def passkey(rng: Rng, split: Split, length: int) -> Problem:
    """One pass key; half of the samples hide it in five noise sentences, over and over."""
    value = pick(rng, values(split), 1)[0]
    question = Question("passkey", "What is the pass key?", f"The pass key is {value}.", (value,))
    tail = " Remember it." if rng.random() < 0.5 else ""
    needle = Needle(f"The pass key is {value}.{tail}", float(rng.random()))
    return Problem((needle,), (question,), "noise" if rng.random() < 0.5 else "text")
