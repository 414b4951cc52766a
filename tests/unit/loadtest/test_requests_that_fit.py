# SPDX-License-Identifier: Apache-2.0
"""How many requests were decoded at once, and fewer are sent until none is retracted."""

import random

import pytest
import scripts  # noqa: F401 - makes the folder of scripts importable

from client import Record  # isort: skip
from requests_that_fit import most_at_once, rounds_until_none_is_retracted  # isort: skip


def record(begin: float, end: float, **more: object) -> Record:
    """A request that was sent at 100 s, with its first and last token so many seconds later."""
    return Record("one", started=100.0, first_token=begin, total=end, **more)  # type: ignore[arg-type]


def test_requests_between_their_first_and_last_tokens_are_counted() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([Record("no token")]) == 0
    # The third begins when the first ends, in whose room it runs.
    assert most_at_once([record(1, 5), record(2, 6), record(5, 9)]) == 2
    source = random.Random(5)
    begins = [source.uniform(0, 10) for _ in range(40)]
    records = [record(begin, begin + source.uniform(0, 4)) for begin in begins]
    spans = [(r.first_token or 0.0, r.total) for r in records]
    at = [sum(begin <= time < end for begin, end in spans) for time, _ in spans]
    assert most_at_once(records) == max(at)


@pytest.mark.parametrize(("room", "queue"), [(4, 6), (4, 12), (1, 3), (7, 7)])
def test_one_fewer_is_sent_until_none_is_retracted(room: int, queue: int) -> None:
    def ask(count: int) -> list[Record]:
        """Requests of a server that takes up to ``queue`` of them, ``room`` of which can finish."""
        together = min(count, queue)
        return [
            record(1 if number < together else 10, 9 if number < together else 18,
                   retractions=int(room <= number < together))
            for number in range(count)
        ]  # fmt: skip

    rounds = rounds_until_none_is_retracted(ask, 7)
    assert rounds[-1] == {"sent": room, "at_once": room, "retracted": 0}
    assert all(found["retracted"] for found in rounds[:-1])


def test_a_request_that_fails_or_never_fits_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 requests: aborted"):
        rounds_until_none_is_retracted(lambda _: [record(1, 2), Record("two", error="aborted")], 2)
    with pytest.raises(RuntimeError, match="no room for one"):
        rounds_until_none_is_retracted(lambda _: [record(1, 2, retractions=1)], 1)
