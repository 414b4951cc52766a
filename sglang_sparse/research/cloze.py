# SPDX-License-Identifier: Apache-2.0
"""Sentences of a text in which words give way to the subject and the value of a fact.

A model that sees a few hundred sentences that state facts, or forms of a question, learns those by
heart, and reads no others. Of these no two are alike, so what is left to learn is where a subject
stands, and which word beside it is of the kind that is asked for. So no other word may be of it.
"""

from collections.abc import Callable, Sequence

import numpy as np

_FEWEST, _MOST = 5, 28  # words of a sentence
_ARTICLES = ("a", "an", "the", "this", "that", "these", "those")
_ENDS, _MARKS = ".!?", ".,;:!?"
_TRIES = 1000
_ASKED = 0.7  # share of questions that end with a mark
_OPENERS = """
,Which,What,Where,Who,When,How,In which,Of which,By whom,Tell me,Say,Name,List,Count,Show me,
Could you say,Could you name,Could you tell me,Do you know,I would like to know,I wonder,Find out,
Look up,According to the text,What about,How about,And
""".replace("\n", "").split(",")


class Cloze:
    """Draws such sentences, and questions made of them.

    Attributes:
        texts: pieces of text, each about a sentence.
        fits: whether a piece can be used.
    """

    def __init__(self, texts: Sequence[str], fits: Callable[[str], bool] | None = None) -> None:
        self.texts, self.fits = texts, fits

    def sentence(self, rng: np.random.Generator, *phrases: str) -> str:
        """A sentence with all ``phrases``, in any order.

        The last one, a fact's value, never stands before "of": in "the door of the cellar" it is
        the cellar.

        Raises:
            ValueError: of many pieces none is a sentence with room for them.
        """
        for _ in range(_TRIES):
            piece = self.texts[int(rng.integers(len(self.texts)))]
            words = piece.split()
            plain = [word.rstrip(_MARKS).isalpha() for word in words]
            free = [i for i, word in enumerate(words) if plain[i] and word.lower() not in _ARTICLES]
            odd = len(words) - sum(plain)
            if not _FEWEST <= len(words) <= _MOST or odd > 1 or len(free) < len(phrases):
                continue
            if self.fits is not None and not self.fits(piece):
                continue
            places = rng.choice(free, size=len(phrases), replace=False).tolist()
            if places and words[places[-1] + 1 : places[-1] + 2] == ["of"]:
                continue
            for place, phrase in sorted(zip(places, phrases, strict=True), reverse=True):
                _put(words, place, phrase)
            text = " ".join(words).rstrip(",;:")
            return text[:1].upper() + text[1:] + ("" if text[-1] in _ENDS else ".")
        raise ValueError("the text has no sentences")

    def question(self, rng: np.random.Generator, *phrases: str) -> str:
        """A question with all ``phrases`` that does not say what it asks for.

        Raises:
            ValueError: as ``sentence`` does.
        """
        body = self.sentence(rng, *phrases).rstrip(_ENDS)
        opener = _OPENERS[int(rng.integers(len(_OPENERS)))]
        if opener:
            named = any(body.startswith(phrase) for phrase in phrases)  # a name stays a name
            body = f"{opener} {body if named else body[:1].lower() + body[1:]}"
        return body + ("?" if rng.random() < _ASKED else ".")


def _put(words: list[str], place: int, phrase: str) -> None:
    """Replace a word, and an article before it where the phrase has its own."""
    word = words[place]
    words[place] = phrase + word[len(word.rstrip(_MARKS)) :]
    own = phrase.split(" ", 1)[0].lower() in _ARTICLES
    if own and place and words[place - 1].lower() in _ARTICLES:
        del words[place - 1]
