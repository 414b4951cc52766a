# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of PSA's threshold reads off its times."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import psa_crossover as bench


@pytest.mark.parametrize(
    ("lost", "tokens"),
    [
        ({8192: 10.0, 16384: -10.0}, 12288.0),
        ({8192: 3.0, 16384: 1.0, 32768: -1.0}, 24576.0),
        ({8192: -1.0, 16384: -5.0}, 8192.0),
        ({8192: -1.0, 16384: 4.0, 24576: 4.0, 32768: -4.0}, 28672.0),
        ({8192: 9.0, 16384: 0.5}, None),
        ({8192: 9.0, 16384: 0.0}, 16384.0),
    ],
)
def test_the_crossover_is_where_the_difference_ends(
    lost: dict[int, float], tokens: float | None
) -> None:
    assert bench.crossover(lost) == tokens


def test_the_threshold_is_the_longest_crossover_of_the_deciding_turns() -> None:
    calm, moved, wild = bench.TURNS

    def row(context: int, batch: int, steps: tuple[float, float, float]) -> dict:
        turns = [{"turn": t, "step_us": us} for t, us in zip(bench.TURNS, steps, strict=True)]
        return {"context": context, "batch": batch, "part": 0.02, "dense_us": 20.0, "turns": turns}

    rows = [
        row(8192, 1, (30.0, 40.0, 60.0)),
        row(24576, 1, (10.0, 10.0, 30.0)),
        row(8192, 16, (15.0, 15.0, 15.0)),
        row(24576, 16, (5.0, 5.0, 5.0)),
    ]
    found = bench.summary(rows)
    tokens = {(c["batch"], c["turn"]): c["tokens"] for c in found["crossovers"]}
    assert tokens[1, calm] == 16384
    assert tokens[1, moved] == pytest.approx(8192 + 16384 * 2 / 3)
    assert tokens[1, wild] is None
    assert tokens[16, wild] == 8192
    assert found["min_sparse_tokens"] == 19456  # 19,114.7 rounded up to whole 1,024s
    assert found["at_the_largest_turn"] is None
