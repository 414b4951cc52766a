# SPDX-License-Identifier: Apache-2.0
"""From one user to many, evenly: where does the server begin to queue?"""

from __future__ import annotations

from _options import running
from locust import LoadTestShape


class Ramp(LoadTestShape):
    """`--users` over `--run-time` seconds (defaults: 16 users over 120 seconds)."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        now_running = running(self)
        if now_running is None:
            return None
        users, seconds, now = now_running
        return max(1, round(users * now / seconds)), float(users)
