# SPDX-License-Identifier: Apache-2.0
"""The grid of request rates, which is the same for every server, and the search in it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from objectives import passes

Trials = list[dict[str, Any]]
STEPS = (1.0, 1.25, 1.5, 1.75)  # of a power of two


def grid(low: float, high: float) -> list[float]:
    """The rates from `low` to `high`: powers of two, and three steps between any two of them.

    Searches with other ends use the same rates where their ranges overlap.
    """
    rates = [2.0**power * step for power in range(-10, 14) for step in STEPS]
    return [rate for rate in rates if low <= rate <= high]


def bracket(trials: Trials, limit_s: float, rates: list[float]) -> tuple[int, int]:
    """Indices in `rates` of the lowest rate that failed, and of the highest below it that passed.

    The passed one comes first. They are -1 and `len(rates)` if there is no such rate.
    """
    outcomes = {trial["rate"]: passes(trial, limit_s) for trial in trials}
    high = min((i for i, rate in enumerate(rates) if outcomes.get(rate) is False),
               default=len(rates))  # fmt: skip
    low = max((i for i, rate in enumerate(rates[:high]) if outcomes.get(rate)), default=-1)
    return low, high


def search(
    run: Callable[[float], dict[str, Any]],
    limits: dict[str, float],
    rates: list[float],
    *,
    seconds: float,
    longest: float,
    trials: Trials | None = None,
) -> Trials:
    """Bisect `rates` for every objective, in turn; a trial counts for all of them.

    Args:
        run: function from a rate to the outcome of a trial.
        limits: seconds between tokens, for each objective.
        rates: from :func:`grid`.
        seconds: time for all trials.
        longest: most seconds of a trial; no trial begins that might not fit in the time.
        trials: trials of an earlier search, which is continued.

    Returns:
        All trials, in the order in which they were run.
    """
    trials = list(trials or [])
    begin, left = time.perf_counter(), len(limits)
    while left:
        left = len(limits)
        for limit in limits.values():
            low, high = bracket(trials, limit, rates)
            if high - low < 2:
                left -= 1
                continue
            if time.perf_counter() - begin + longest > seconds:
                return trials
            trials.append(run(rates[(low + high) // 2]))
    return trials


def try_rates(
    run: Callable[[float], dict[str, Any]],
    rates: Sequence[float],
    *,
    seconds: float,
    longest: float,
    trials: Trials,
) -> None:
    """Trials at given rates, in their order, but for those that an earlier search has.

    Args:
        run: function from a rate to the outcome of a trial.
        rates: requests a second.
        seconds: time for all trials.
        longest: most seconds of a trial; no trial begins that might not fit in the time.
        trials: trials of an earlier search.
    """
    begin, known = time.perf_counter(), {trial["rate"] for trial in trials}
    for rate in rates:
        if rate not in known and time.perf_counter() - begin + longest <= seconds:
            run(rate)
