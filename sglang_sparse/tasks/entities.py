# SPDX-License-Identifier: Apache-2.0
"""Draws the people, things and places that a problem of a reading task speaks of."""

import math

import numpy as np

from sglang_sparse.tasks.needles import pick
from sglang_sparse.tasks.vocabulary import names, pool
from sglang_sparse.tasks.wide_words import WIDE
from sglang_sparse.tasks.words import Split, words_of

Rng = np.random.Generator
# Share of the draws of the wide split where two first names do for all, up to so many people: what
# follows a first name is then not told by it.
_NAMESAKES, _MOST_NAMESAKES = 0.5, 12
_TITLES = ("Mr.", "Mrs.", "Ms.", "Dr.", "Miss", "Aunt", "Uncle", "Captain")


def people(rng: Rng, split: Split, count: int) -> list[str]:
    """``count`` different full names that share first names and surnames with one another."""
    first, last = names(words_of(split))
    wide = min(math.isqrt(2 * count) + 1, len(last))
    high = min(3 * count // (2 * wide) + 2, len(first))
    if split == "wide":
        if count <= _MOST_NAMESAKES and rng.random() < _NAMESAKES:
            high, wide = 2, count // 2 + 1
        firsts, lasts = WIDE.draw(rng, "first name", high), WIDE.draw(rng, "surname", wide)
    else:
        firsts, lasts = pick(rng, first, high), pick(rng, last, wide)
    pairs = [f"{one} {other}" for one in firsts for other in lasts]
    return pick(rng, pairs, count)


def _named(rng: Rng, count: int) -> list[str]:
    """People of the wide split: full names, first names alone, or surnames behind a title."""
    dice = rng.random()
    if dice < 0.8:
        return people(rng, "wide", count)
    if dice < 0.9:
        return WIDE.draw(rng, "first name", count)
    titles = [_TITLES[int(i)] for i in rng.integers(len(_TITLES), size=count)]
    surnames = WIDE.draw(rng, "surname", count)
    return [f"{title} {name}" for title, name in zip(titles, surnames, strict=True)]


def entities(rng: Rng, split: Split, kind: str, count: int) -> list[str]:
    """``count`` different words of a kind, or names of people."""
    if kind == "person":
        return _named(rng, count) if split == "wide" else people(rng, split, count)
    if split == "wide" and kind != "number":
        return WIDE.draw(rng, kind, count)
    return pick(rng, pool(kind, words_of(split)), count)
