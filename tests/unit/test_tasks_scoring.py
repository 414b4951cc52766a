# SPDX-License-Identifier: Apache-2.0
"""Exact scoring: nothing but the expected values passes."""

from dataclasses import replace

import pytest

from sglang_sparse.tasks import Sample, accuracy, is_exact, recall, wilson


def sample(task: str, answer: str, values: tuple[str, ...]) -> Sample:
    return Sample(
        task=task, split="heldout", seed=0, index=0, length=512, content="", prompt="",
        prompt_ids=[], answer=answer, answer_ids=[], values=values, needle_spans=(), depth=0.0,
    )  # fmt: skip


SINGLE = sample("single_key", "The magic number for old-fox is 12345.", ("12345",))
QUERY = sample("multi_query", "", ("11111", "22222"))
VALUE = sample("multi_value", "", ("11111", "22222"))
WORDS = sample("common_words", "The most common words are a, b and c.", ("a", "b", "c"))


@pytest.mark.parametrize(
    ("case", "reply", "exact"),
    [
        (SINGLE, SINGLE.answer, True),
        (SINGLE, "12345", True),
        (SINGLE, "It is 12345, not 54321.", False),
        (SINGLE, "1234", False),
        (SINGLE, "123456", False),
        (SINGLE, "", False),
        (QUERY, "11111 and 22222", True),
        (QUERY, "22222 and 11111", False),
        (QUERY, "11111", False),
        (VALUE, "Magic number 1 is 11111. Magic number 2 is 22222.", True),
        (VALUE, "Magic number 1 is 22222. Magic number 2 is 11111.", False),
        (WORDS, "The most common words are c, a and b.", True),
        (WORDS, "The most common words are c, a and d.", False),
        (WORDS, "The most common words are a, a, b and c.", False),
    ],
)
def test_only_the_expected_values_are_exact(case: Sample, reply: str, exact: bool) -> None:
    assert is_exact(case, reply) is exact


def test_recall_gives_partial_credit() -> None:
    assert recall(QUERY, "22222") == 0.5


def test_accuracy_needs_a_reply_for_each_sample() -> None:
    assert accuracy([SINGLE, replace(SINGLE, index=1)], ["12345", "99999"]) == 0.5
    with pytest.raises(ValueError, match="need as many"):
        accuracy([SINGLE], [])


def test_wilson_interval_holds_its_proportion() -> None:
    low, high = wilson(190, 200)
    assert low < 0.95 < high
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_interval_ends_exactly_where_no_or_every_trial_succeeds() -> None:
    for count in range(1, 500):
        assert wilson(0, count)[0] == 0.0, count
        assert wilson(count, count)[1] == 1.0, count
    # Closed forms of the other ends: z^2 / (n + z^2) and n / (n + z^2).
    z2 = 1.959963985**2
    assert wilson(0, 50)[1] == pytest.approx(z2 / (50 + z2), rel=1e-8)
    assert wilson(50, 50)[0] == pytest.approx(50 / (50 + z2), rel=1e-8)
