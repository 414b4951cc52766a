# SPDX-License-Identifier: Apache-2.0
"""What a language model has to beat on a text: ``gzip -9`` and a 5-gram model of its training text.

The 5-gram model is interpolated Kneser-Ney (Chen and Goodman, 1999, section 2.7) over tokens, with
one discount an order, n1 / (n1 + 2 n2).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Counts = NDArray[np.int32]
ORDER = 5


def gzip_bits(texts: list[str]) -> float:
    """Bits a byte that ``gzip -9`` takes, each text compressed alone."""
    packed = sum(len(gzip.compress(t.encode(), 9, mtime=0)) for t in texts)
    return 8 * packed / sum(len(t.encode()) for t in texts)


@dataclass(frozen=True)
class _Table:
    """Counts of one order: n-grams in rising order, and their contexts.

    ``grams`` and ``counts`` are ``[n-grams]``; ``contexts``, ``totals`` (of counts) and ``types``
    (different successors) are ``[contexts]``.
    """

    grams: Keys
    counts: Counts
    contexts: Keys
    totals: Counts
    types: Counts
    discount: float

    @classmethod
    def of(cls, keys: Keys, vocab: int) -> _Table:
        """Count ``keys``, one for each time that an n-gram counts."""
        grams, counts = _count(keys)
        contexts, types = _count(grams // vocab, in_order=True)
        first = np.concatenate(([0], np.cumsum(types[:-1], dtype=np.int64)))
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        # One half if no n-gram came once, or none twice, as in a short text's lowest order.
        discount = ones / (ones + 2 * twos) if ones and twos else 0.5
        totals = np.add.reduceat(counts, first)
        return cls(grams, counts, contexts, totals, types, discount)

    def apply(self, grams: Keys, vocab: int, lower: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probabilities of the last tokens of ``grams``; ``lower`` are those of the order below."""
        seen = _look_up(self.grams, self.counts, grams)
        context = grams // vocab
        total = _look_up(self.contexts, self.totals, context)
        types = _look_up(self.contexts, self.types, context)
        known = total > 0
        safe = np.where(known, total, 1)
        found = np.maximum(seen - self.discount, 0.0) / safe
        return np.where(known, found + self.discount * types / safe * lower, lower)


def _count(keys: Keys, in_order: bool = False) -> tuple[Keys, Counts]:
    """Different keys in rising order, and how often each comes; ``keys`` may be changed."""
    if not in_order:
        keys.sort()
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[first], np.diff(np.append(first, len(keys))).astype(np.int32)


def _look_up(keys: Keys, values: Counts, wanted: Keys) -> Counts:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def _grams(ids: NDArray[np.integer], order: int, vocab: int) -> Keys:
    """Every n-gram of ``ids`` as one number, the last token in its lowest digits."""
    keys = np.zeros(len(ids) - order + 1, dtype=np.int64)
    for place in range(order):
        keys = keys * vocab + ids[place : len(ids) - order + 1 + place]
    return keys


class NGramModel:
    """Interpolated Kneser-Ney of order 5 over token ids."""

    def __init__(self, ids: NDArray[np.integer], vocab: int, order: int = ORDER) -> None:
        """Count the n-grams of ``ids``, ``[tokens]``.

        Raises:
            ValueError: an n-gram of ``vocab`` tokens does not fit in 63 bits.
        """
        if vocab**order >= 2**63:
            raise ValueError(f"{order} tokens out of {vocab} do not fit in 63 bits")
        self.vocab, self.order = vocab, order
        tables = [_Table.of(_grams(ids, order, vocab), vocab)]
        for size in range(order - 1, 0, -1):
            # Lower orders count how many different tokens came before.
            tables.append(_Table.of(tables[-1].grams % vocab**size, vocab))
        self.tables = tables[::-1]

    def probabilities(self, ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """Probability of each token of ``ids`` after the first four, given the four before it."""
        whole = _grams(ids, self.order, self.vocab)
        result = np.full(len(whole), 1.0 / self.vocab)
        for size, table in enumerate(self.tables, start=1):
            result = table.apply(whole % self.vocab**size, self.vocab, result)
        return result


def ngram_bits(
    train: NDArray[np.integer], heldout: NDArray[np.integer], sizes: NDArray[np.int64]
) -> float:
    """Bits a byte of the 5-gram model of ``train`` on ``heldout``.

    Args:
        train, heldout: token ids, ``[tokens]``.
        sizes: ``[vocab]``, bytes of each token. Tokens of none, the markers, are not scored.
    """
    model = NGramModel(train, len(sizes))
    scored = heldout[ORDER - 1 :]
    bits = -np.log2(model.probabilities(heldout))
    return float(bits[sizes[scored] > 0].sum() / sizes[scored].sum())
