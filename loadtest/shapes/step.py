# SPDX-License-Identifier: Apache-2.0
"""Four steps of equal length and height: what does each level cost once it has settled?"""

from __future__ import annotations

from _options import running
from locust import LoadTestShape

STEPS = 4


class Step(LoadTestShape):
    """`--users` in four steps over `--run-time` seconds (defaults: 16 users, 120 seconds)."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        now_running = running(self)
        if now_running is None:
            return None
        users, seconds, now = now_running
        step = int(STEPS * now / seconds) + 1
        return max(1, users * step // STEPS), float(users)
