# SPDX-License-Identifier: Apache-2.0
"""Arrival times of requests that do not wait for one another."""

import random
from collections.abc import Iterator


def poisson(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Arrival times, in seconds from the start, of a Poisson process of `rate` a second."""
    source = random.Random(seed)
    now = source.expovariate(rate)
    while now < seconds:
        yield now
        now += source.expovariate(rate)
