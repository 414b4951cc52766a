# SPDX-License-Identifier: Apache-2.0
"""The log line on progressive attention says what changed since the one before."""

from sglang_sparse.progress_log import line
from sglang_sparse_kernels import COUNTERS


def sums(*counts: int) -> dict[str, int]:
    return dict(zip(COUNTERS, counts, strict=True))


def test_the_line_is_about_the_interval_alone() -> None:
    before = {1: sums(100, 900, 4000, 98_000_000, 7), 2: sums(100, 900, 4000, 98_000_000, 0)}
    after = {1: sums(110, 1000, 5000, 107_500_000, 9), 2: sums(110, 950, 5000, 107_900_000, 0)}
    assert line(before, after) == (
        "Sparse decode, #lists: 20, blocks attended: 7.5 of 100.0, estimated share: 0.970, "
        "cap hits: 2, blocks by layer: 1: 10.0%, 2: 5.0%"
    )


def test_an_interval_without_sparse_rows_has_no_line() -> None:
    same = {1: sums(5, 5, 5, 5, 0)}
    assert line(same, same) is None
    assert line({}, {1: sums(0, 0, 0, 0, 0)}) is None
