# SPDX-License-Identifier: Apache-2.0
"""The limits that a server has to meet, and the verdict of a trial's samples about them.

As in the PSA paper (arXiv:2503.00392): the 99th percentile of the time between tokens stays within
5 times (strict) or 25 times (relaxed) the decode step of a single request, and the median time in
the queue within 2 seconds. The step is that of one server, the dense one, for every server of a
comparison; limits in milliseconds may be given instead.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FACTORS = {"strict": 5.0, "relaxed": 25.0}
MOST_QUEUED_SECONDS = 2.0
# A pause of the server delays every stream at once, so all gaps of one moment count as one sample.
BLOCK_SECONDS = 3.0
LEAST_BLOCKS = 10
LEAST_SECONDS = LEAST_BLOCKS * BLOCK_SECONDS
LEAST_GAPS = 1000  # ten of them above the 99th percentile
RESAMPLES = 400
MET, MISSED, UNDECIDED = "met", "missed", "undecided"
# Share of requests that may still run when the drain ends, without failing the rate.
_MOST_UNFINISHED = 0.01


def percentile(values: Any, share: float) -> float:
    """The value that `share` of `values` do not exceed; the nearest rank."""
    ordered = np.sort(np.asarray(values, dtype=float))
    rank = -(-int(share * 1e6) * len(ordered) // 10**6)
    return float(ordered[min(len(ordered), max(1, rank)) - 1])


def percentile_interval(
    ends: Any, values: Any, share: float = 0.99, block: float = BLOCK_SECONDS
) -> tuple[float, float] | None:
    """95 % interval of a percentile, by resampling whole blocks of time.

    Args:
        ends: time of each value, in seconds from the start of the trial.
        values: the values.
        share: the percentile as a share of 1.
        block: length of a block in seconds.

    Returns:
        Its ends, or None where there are fewer than `LEAST_GAPS` values or `LEAST_BLOCKS` blocks.
    """
    blocks, of = np.unique(np.floor(np.asarray(ends) / block), return_inverse=True)
    if len(values) < LEAST_GAPS or len(blocks) < LEAST_BLOCKS:
        return None
    order = np.argsort(values)
    ordered, of = np.asarray(values, dtype=float)[order], of[order]
    source = np.random.default_rng(1)
    found = []
    for _ in range(RESAMPLES):
        times = np.bincount(source.integers(len(blocks), size=len(blocks)), minlength=len(blocks))
        below = np.cumsum(times[of])
        found.append(ordered[np.searchsorted(below, share * below[-1])])
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def broken(outcome: dict[str, Any]) -> bool:
    """Whether a trial missed the limits of every objective: answers, and a short queue."""
    if outcome["sent"] == 0:
        return False
    return (
        outcome["failed"] > 0
        or outcome["unfinished"] > _MOST_UNFINISHED * outcome["sent"]
        or outcome["gap_p99_s"] is None
        or outcome["queued_p50_s"] is None
        or outcome["queued_p50_s"] > MOST_QUEUED_SECONDS
    )


def passes(outcome: dict[str, Any], limit_s: float) -> bool:
    """Whether the samples of a trial stayed within a limit; this steers the search."""
    return not broken(outcome) and (outcome["sent"] == 0 or outcome["gap_p99_s"] <= limit_s)


def verdict(outcome: dict[str, Any], limit_s: float) -> str:
    """Whether the rate is `met`, `missed` or `undecided`.

    It is undecided if the limit lies within the percentile's interval, or if the trial was too
    short to have an interval.
    """
    if outcome["arrival_seconds"] < LEAST_SECONDS:
        return UNDECIDED
    if broken(outcome):
        return MISSED
    interval = outcome["gap_p99_interval_s"]
    if interval is None or interval[0] <= limit_s < interval[1]:
        return UNDECIDED
    return MET if interval[1] <= limit_s else MISSED


def lowest_missed(trials: list[dict[str, Any]], name: str) -> float | None:
    """The lowest rate that missed an objective, or None."""
    return min((t["rate"] for t in trials if t["verdicts"][name] == MISSED), default=None)


def highest_met(trials: list[dict[str, Any]], name: str) -> float | None:
    """The highest rate that met an objective, below all rates that missed it; or None."""
    missed = lowest_missed(trials, name)
    met = [t["rate"] for t in trials if t["verdicts"][name] == MET]
    return max((rate for rate in met if missed is None or rate < missed), default=None)


@dataclass(frozen=True)
class Objective:
    """Where the limits come from.

    Attributes:
        report: report of the dense server, whose unloaded step limits all servers; None to take the
            server's own step.
        milliseconds: limits to use instead.
    """

    report: Path | None = None
    milliseconds: tuple[float, ...] = ()

    @property
    def source(self) -> str | None:
        """The source of the limits, for a report; None for the server's own step."""
        if self.milliseconds:
            return "--limit-ms"
        return None if self.report is None else self.report.name

    def check(self, sparse: bool) -> None:
        """Raise ValueError for a sparse server whose limits would follow from its own step."""
        if sparse and self == OWN:
            raise ValueError(
                "--limit-from is missing: a sparse server is held to the dense server's limits; "
                "give the report of a dense one, or --limit-ms"
            )
        if self.report is not None:
            self.limits(0.0)

    def wait(self, seconds: float) -> None:
        """Return when the report can be read; raise ValueError if it cannot in `seconds`."""
        deadline = time.monotonic() + seconds
        while self.report is not None:
            try:
                self.limits(0.0)
                return
            except ValueError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.5)

    def limits(self, own_step_s: float) -> dict[str, float]:
        """Seconds between tokens of each objective.

        Raises:
            ValueError: the report was not written by `capacity.py`.
        """
        if self.milliseconds:
            return {f"{limit:g} ms": limit / 1000 for limit in sorted(self.milliseconds)}
        step_s = own_step_s if self.report is None else _step_of(self.report)
        return {name: factor * step_s for name, factor in FACTORS.items()}


OWN = Objective()


def _step_of(path: Path) -> float:
    try:
        return float(json.loads(path.read_text())["unloaded"]["step_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--limit-from: {path} is no report of capacity.py ({error})") from error
