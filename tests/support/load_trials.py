# SPDX-License-Identifier: Apache-2.0
"""Trials of a capacity search against a server that is a formula."""

from typing import Any

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
import objectives  # isort: skip
import rates  # isort: skip

LIMITS = {"strict": 0.05, "relaxed": 0.25}
RATES = rates.grid(0.25, 256)


def outcome(rate: float, gap: float, **changes: Any) -> dict[str, Any]:
    """Of a trial of a minute, with an interval of a hundredth on both sides."""
    return {
        "rate": rate, "arrival_seconds": 60, "seconds": 62.5, "sent": 100, "done": 100,
        "unfinished": 0, "failed": 0, "gaps": 9000, "gap_p50_s": gap / 2, "gap_p99_s": gap,
        "gap_p99_interval_s": [0.99 * gap, 1.01 * gap], "first_token_p50_s": gap,
        "queued_p50_s": 0.1, "tokens_per_second": 16 * rate,
    } | changes  # fmt: skip


def queueing_server(capacity_a_second: float) -> Any:
    """A server whose tokens slow down as its load nears what it can do."""

    def run(rate: float) -> dict[str, Any]:
        load = rate / capacity_a_second
        if load >= 1:
            return outcome(rate, 10.0, queued_p50_s=5.0)
        return outcome(rate, 0.01 / (1 - load))

    return run


def searched(speed: float, **changes: Any) -> list[dict[str, Any]]:
    options = {"seconds": 1000, "longest": 0} | changes
    trials = rates.search(queueing_server(speed), LIMITS, RATES, **options)
    for trial in trials:
        trial["verdicts"] = {n: objectives.verdict(trial, limit) for n, limit in LIMITS.items()}
    return trials
