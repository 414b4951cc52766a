# SPDX-License-Identifier: Apache-2.0
"""Exact scoring of replies."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sglang_sparse.tasks.sample import Sample

ORDERED_TASKS = frozenset({"variable_tracking", "multi_query", "multi_value"})
_NUMBER = re.compile(r"\d+")
WORD_TASKS = frozenset({"common_words", "frequent_words"})


def extract(sample: Sample, reply: str) -> tuple[str, ...]:
    """The values that a reply states: its numbers, or its words for the counting tasks.

    For multi-value answers, the running number in front of each value is no value.
    """
    if sample.task in WORD_TASKS:
        stated = reply.partition(" are ")[2] or reply
        return tuple(w for w in re.findall(r"[a-z]+", stated) if w != "and")
    return tuple(n for n in _NUMBER.findall(reply) if len(n) > 1)


def is_exact(sample: Sample, reply: str) -> bool:
    """Whether the reply states exactly the expected values, no more and no fewer.

    The order counts for tasks that name one; the counting tasks compare sets.
    """
    found = extract(sample, reply)
    if sample.task in ORDERED_TASKS:
        return found == sample.values
    return sorted(found) == sorted(sample.values)


def recall(sample: Sample, reply: str) -> float:
    """Fraction of the expected values that the reply states (RULER's partial credit)."""
    found = set(extract(sample, reply))
    return sum(v in found for v in sample.values) / len(sample.values)


def accuracy(samples: Sequence[Sample], replies: Sequence[str]) -> float:
    """Fraction of replies that are exact.

    Raises:
        ValueError: the two sequences differ in length or are empty.
    """
    if len(samples) != len(replies) or not samples:
        raise ValueError(
            f"{len(samples)} samples, {len(replies)} replies; need as many, at least 1"
        )
    return sum(is_exact(s, r) for s, r in zip(samples, replies, strict=True)) / len(samples)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a proportion.

    It begins at exactly 0 where no trial succeeds, and ends at exactly 1 where every one does.
    """
    from scipy.stats import binomtest  # takes a second, which only a report needs

    if count == 0:
        return 0.0, 1.0
    interval = binomtest(successes, count).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)
