# SPDX-License-Identifier: Apache-2.0
"""Words of the wide split, drawn anew for each problem, so that none is learnt by heart.

A model that is trained on some hundred names reads those and no others: it tells a value from the
words around it, or a subject from those that look alike, by having seen it. So a word comes from
the training split, from a list of WordNet's nouns, from random syllables, or from a text; many
begin as another does. Nouns that a few of training's own sentences have are values, too, so
that an ordinary noun is not told from a value by its look; those that many have, and the most
frequent of a text, are none, but stand beside values.
"""

import re
from collections import Counter
from functools import cache
from typing import get_args

import numpy as np

from sglang_sparse.tasks import sentences
from sglang_sparse.tasks.training_words import WORDS
from sglang_sparse.tasks.vocabulary import Kind, held_out, known_words, names, pool

_ONSETS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sp st t th tr v w y z
"""
_VOWELS = "a e i o u ai ea ee ie oa oo ou"
_CODAS = "b ck d ft g k l lt m mp n nd ng nt p r rd rk rn s sh sk st t th x"
_SYLLABLES = (1, 2, 2, 2, 3)
# Share of the draws that take no word from training's lists: a model that knows half of a problem's
# words by heart reads worse where it knows none.
_UNLISTED = 0.6
# Share of the draws with words that begin as an earlier one does, and of the words in them: a model
# that copies a word token by token may go on with another's end.
_ALIKE, _ALIKE_WORDS = 0.7, 0.6
# Kinds that are written with a capital.
NAMES = ("first name", "surname", "town", "river")
# A capital within a sentence; what stands between an article and a word that ends its phrase.
_NAME = re.compile(r"[a-z,] ([A-Z][a-z]{2,11})\b")
_NOUN = re.compile(
    r"\b(?:the|an?) ([a-z]{3,12})"
    r"(?=[.,;]| (?:of|in|is|was|are|to|and|at|on|for|with|that|which|from|by|or)\b)"
)

# Nouns beside a value: so many of a text's most frequent ones, and those of training's sentences.
_BESIDE = 1000
# In so many of training's sentences a noun says what they speak of ("a pet"), and is no value.
_OFTEN = 5

Rng = np.random.Generator


class WideWords:
    """Draws words of any kind; what it has read of a text is empty at first."""

    def __init__(self) -> None:
        self._read: dict[bool, tuple[str, ...]] = {True: (), False: ()}
        self._beside = tuple(_told())
        self._no_values = frozenset(self._beside)

    def read(self, text: str) -> None:
        """Draw names and nouns of ``text``, too, in place of those of an earlier one."""
        self._read[True] = tuple(w for w in sorted(set(_NAME.findall(text))) if not held_out(w))
        counts = Counter(_NOUN.findall(text))
        valued, told = _values(), _told()
        nouns = sorted(counts, key=lambda noun: (-counts[noun], noun))
        nouns = [noun for noun in nouns if not held_out(noun)]
        # Where a text is short, half of its nouns may still be values.
        beside = min(_BESIDE, len(nouns) // 2)
        self._read[False] = tuple(sorted(set(nouns[beside:]).difference(told)))
        frequent = (noun for noun in nouns[:beside] if noun not in valued)
        self._beside = tuple(dict.fromkeys((*told, *frequent)))
        self._no_values = frozenset(self._beside)

    def beside(self, rng: Rng) -> str:
        """A noun as :meth:`no_value` draws, or, half of the time, one as others have as values.

        So a value is told from it by the sentence, not by the word.
        """
        if rng.random() < 0.5:
            return self.draw(rng, ("place", "thing")[int(rng.integers(2))], 1)[0]
        return self.no_value(rng)

    def no_value(self, rng: Rng) -> str:
        """A noun of training's sentences, or a frequent one: seldom a value, or never."""
        return self._beside[int(rng.integers(len(self._beside)))]

    def names_no_value(self, text: str) -> bool:
        """Whether ``text`` has no name, and of nouns only such as :meth:`no_value`'s."""
        if _NAME.search(text):
            return False
        return all(noun in self._no_values for noun in _NOUN.findall(text))

    def draw(self, rng: Rng, kind: str, count: int) -> list[str]:
        """``count`` different words, none of which is held out.

        Args:
            kind: of :data:`sglang_sparse.tasks.vocabulary.Kind` but numbers, ``first name`` or
                ``surname``.
        """
        lists = () if rng.random() < _UNLISTED else _listed(kind)
        ordinary = () if kind in NAMES else _ordinary()
        listed = [own for own in (*lists, ordinary, self._read[kind in NAMES]) if own]
        alike = rng.random() < _ALIKE
        words: dict[str, None] = {}
        while len(words) < count:
            source = int(rng.integers(len(listed) + 1))
            if source < len(listed):
                word = listed[source][int(rng.integers(len(listed[source])))]
            else:
                word = invented(rng)
                word = word.capitalize() if kind in NAMES else word
            if words and alike and rng.random() < _ALIKE_WORDS:
                word = _begun(rng, list(words)[int(rng.integers(len(words)))], word)
            if (source < len(listed) or len(word) > 3) and not held_out(word):
                words[word] = None
        return list(words)


def invented(rng: Rng) -> str:
    """A word of one to three random syllables."""
    onsets, vowels, codas = _ONSETS.split(), _VOWELS.split(), _CODAS.split()
    word = ""
    for _ in range(_SYLLABLES[int(rng.integers(len(_SYLLABLES)))]):
        word += onsets[int(rng.integers(len(onsets)))] + vowels[int(rng.integers(len(vowels)))]
        word += codas[int(rng.integers(len(codas)))] if rng.random() < 0.6 else ""
    return word


def _begun(rng: Rng, other: str, word: str) -> str:
    """A word that begins as ``other`` does and ends as ``word``: two letters of each, or more."""
    cut = int(rng.integers(2, max(len(other) - 1, 3)))
    end = int(rng.integers(2, max(len(word) - 1, 3)))
    return other[:cut] + word[-end:].lower()


@cache
def _values() -> frozenset[str]:
    """All words that problems have as values."""
    listed = (words.split() for words in WORDS.values())
    return frozenset().union(*listed, *map(known_words, get_args(Kind)))


@cache
def _told() -> dict[str, int]:
    """Nouns of the sentences that training alone sees, by how many have one; no list has them."""
    lines = (line for told in sentences.training().values() for line in told)
    counts = Counter(noun for line in lines for noun in set(_NOUN.findall(line)))
    return {noun: counts[noun] for noun in sorted(set(counts) - _values())}


@cache
def _ordinary() -> tuple[str, ...]:
    """Those that few sentences have."""
    return tuple(n for n, count in _told().items() if count < _OFTEN and not held_out(n))


@cache
def _listed(kind: str) -> tuple[tuple[str, ...], ...]:
    if kind in ("first name", "surname"):
        return (names("train")[kind == "surname"],)
    more = (word for word in WORDS.get(kind, "").split() if not held_out(word))
    return pool(kind, "train"), tuple(more)


WIDE = WideWords()
"""What :func:`sglang_sparse.tasks.entities.entities` draws from."""
