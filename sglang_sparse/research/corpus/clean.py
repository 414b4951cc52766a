# SPDX-License-Identifier: Apache-2.0
"""Cleaning: ASCII, English paragraphs, each of them once."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator

_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201c": '"', "\u201d": '"', "\u201e": '"',
        "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "--", "\u2015": "--",
        "\u2026": "...", "\u2022": "*", "\u00b7": "*", "\u00a0": " ", "\u00ad": None,
        "\u200b": None, "\u00b6": None, "\u00a9": "(c)", "\u2192": "->",
        "\u00d7": "x", "\u2212": "-", "\ufeff": None,
    }
)  # fmt: skip
_COMMON_WORDS = "a an and are as at be by for from if in is it not of on or that the to with"
_COMMON = frozenset(_COMMON_WORDS.split())
_SHORT = 40
_LONG_LINE = 4000
_LEAST_LETTERS = 0.55


def to_ascii(text: str) -> str:
    """``text`` with typographic marks and accents replaced; other characters are dropped."""
    text = text.translate(_PUNCTUATION)
    if text.isascii():
        return text
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def is_english(paragraph: str) -> bool:
    """Whether a paragraph reads as English: mostly letters and, if long, common short words.

    A short one, such as a heading, needs letters alone.
    """
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    if letters < _LEAST_LETTERS * len(paragraph):
        return False
    words = re.findall("[a-z]+", paragraph.lower())
    return len(words) < 12 or sum(w in _COMMON for w in words) >= 0.12 * len(words)


class Cleaner:
    """Cleans paragraphs and lets each pass once in its life, so splits share short ones alone."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def clean(self, paragraphs: Iterable[str]) -> Iterator[str]:
        """The paragraphs to keep; headings are kept only before a paragraph that is kept."""
        heading = ""
        for raw in paragraphs:
            original = raw
            lines = [re.sub(r"[ \t]+", " ", line).strip() for line in to_ascii(raw).split("\n")]
            text = "\n".join(line for line in lines if line)[:_LONG_LINE]
            dropped = sum(c.isalpha() and not c.isascii() for c in original)
            if not text or dropped > 0.2 * len(original) or not is_english(text):
                heading = ""
                continue
            if len(text) < _SHORT:
                heading = text
                continue
            if self._is_new(text):
                if heading:
                    yield heading
                yield text
            heading = ""

    def _is_new(self, text: str) -> bool:
        """Whether no paragraph before had the same letters and digits."""
        key = hashlib.blake2b(
            re.sub(r"[^a-z0-9]", "", text.lower()).encode(), digest_size=12
        ).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
