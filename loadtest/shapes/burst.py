# SPDX-License-Identifier: Apache-2.0
"""Few users, and all of them at once every half minute: does the queue drain in between?"""

from __future__ import annotations

from _options import running
from locust import LoadTestShape

PERIOD_SECONDS, BURST_SECONDS = 30, 10


class Burst(LoadTestShape):
    """An eighth of `--users`, and all of them for a third of the time (default: 16)."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        now_running = running(self)
        if now_running is None:
            return None
        users, _, now = now_running
        calm = now % PERIOD_SECONDS >= BURST_SECONDS
        return max(1, users // 8) if calm else users, float(users)
