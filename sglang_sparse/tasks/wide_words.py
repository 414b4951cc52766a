# SPDX-License-Identifier: Apache-2.0
"""Words of the wide split, drawn anew for each problem, so that none is learnt by heart.

A model that is trained on some hundred names reads those and no others: it tells a value from the
words around it, or a subject from those that look alike, by having seen it. So a word comes from
the training split, from a list of WordNet's nouns, from random syllables, or from a text.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from sglang_sparse.tasks.training_words import WORDS
from sglang_sparse.tasks.vocabulary import held_out, names, pool

_ONSETS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sp st t th tr v w y z
"""
_VOWELS = "a e i o u ai ea ee ie oa oo ou"
_CODAS = "b ck d ft g k l lt m mp n nd ng nt p r rd rk rn s sh sk st t th x"
_SYLLABLES = (1, 2, 2, 2, 3)
# Kinds that are written with a capital.
NAMES = ("first name", "surname", "town", "river")
# A capital within a sentence; what stands between an article and a word that ends its phrase.
_NAME = re.compile(r"[a-z,] ([A-Z][a-z]{2,11})\b")
_NOUN = re.compile(
    r"\b(?:the|an?) ([a-z]{3,12})"
    r"(?=[.,;]| (?:of|in|is|was|are|to|and|at|on|for|with|that|which|from|by|or)\b)"
)

Rng = np.random.Generator


class WideWords:
    """Draws words of any kind; what it has read of a text is empty at first."""

    def __init__(self) -> None:
        self._read: dict[bool, tuple[str, ...]] = {True: (), False: ()}

    def read(self, text: str) -> None:
        """Draw names and nouns of ``text``, too, in place of those of an earlier one."""
        for named, found in ((True, _NAME), (False, _NOUN)):
            words = sorted(set(found.findall(text)))
            self._read[named] = tuple(word for word in words if not held_out(word))

    def draw(self, rng: Rng, kind: str, count: int) -> list[str]:
        """``count`` different words, none of which is held out.

        Args:
            kind: of :data:`sglang_sparse.tasks.vocabulary.Kind` but numbers, ``first name`` or
                ``surname``.
        """
        listed = [own for own in (*_listed(kind), self._read[kind in NAMES]) if own]
        words: dict[str, None] = {}
        while len(words) < count:
            source = int(rng.integers(len(listed) + 1))
            if source < len(listed):
                words[listed[source][int(rng.integers(len(listed[source])))]] = None
            else:
                word = invented(rng)
                word = word.capitalize() if kind in NAMES else word
                if len(word) > 3 and not held_out(word):
                    words[word] = None
        return list(words)


WIDE = WideWords()
"""What :func:`sglang_sparse.tasks.relations.entities` draws from."""


def invented(rng: Rng) -> str:
    """A word of one to three random syllables."""
    onsets, vowels, codas = _ONSETS.split(), _VOWELS.split(), _CODAS.split()
    word = ""
    for _ in range(_SYLLABLES[int(rng.integers(len(_SYLLABLES)))]):
        word += onsets[int(rng.integers(len(onsets)))] + vowels[int(rng.integers(len(vowels)))]
        word += codas[int(rng.integers(len(codas)))] if rng.random() < 0.6 else ""
    return word


@cache
def _listed(kind: str) -> tuple[tuple[str, ...], ...]:
    if kind in ("first name", "surname"):
        return (names("train")[kind == "surname"],)
    more = (word for word in WORDS.get(kind, "").split() if not held_out(word))
    return pool(kind, "train"), tuple(more)
