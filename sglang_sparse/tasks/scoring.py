# SPDX-License-Identifier: Apache-2.0
"""Exact scoring of replies."""

import re
from collections.abc import Sequence

from sglang_sparse.tasks.sample import Sample
from sglang_sparse.tasks.vocabulary import known_words

ORDERED_TASKS = frozenset({"variable_tracking", "multi_query", "multi_value", "tally"})
_NUMBER = re.compile(r"\d+")
WORD_TASKS = frozenset({"common_words", "frequent_words", "distant_words"})


def extract(sample: Sample, reply: str) -> tuple[str, ...]:
    """The values that a reply states: its numbers, or its words of the kind that is asked for.

    For multi-value answers, the running number in front of each value is no value. The counting
    tasks take every word. A value that is said again counts once in the reading tasks.
    """
    if sample.task in WORD_TASKS:
        stated = reply.partition(" are ")[2] or reply
        return tuple(w for w in re.findall(r"[a-z]+", stated) if w != "and")
    if sample.value_kind != "number":
        known = known_words(sample.value_kind)
        found = (w for w in re.findall(r"[a-z]+", reply.lower()) if w in known)
        return tuple(dict.fromkeys(found))
    return tuple(n for n in _NUMBER.findall(reply) if len(n) > 1)


def is_exact(sample: Sample, reply: str) -> bool:
    """Whether the reply states exactly the expected values, no more and no fewer.

    The order counts for tasks that name one; the counting tasks compare sets.
    """
    found, values = extract(sample, reply), _values(sample)
    if sample.task in ORDERED_TASKS:
        return found == values
    return sorted(found) == sorted(values)


def recall(sample: Sample, reply: str) -> float:
    """Fraction of the expected values that the reply states (RULER's partial credit)."""
    found, values = set(extract(sample, reply)), _values(sample)
    return sum(v in found for v in values) / len(values)


def _values(sample: Sample) -> tuple[str, ...]:
    return tuple(v.lower() for v in sample.values)


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
