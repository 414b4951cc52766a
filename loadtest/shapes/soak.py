# SPDX-License-Identifier: Apache-2.0
"""The same load for a long time: does anything grow?"""

from __future__ import annotations

from _options import running
from locust import LoadTestShape


class Soak(LoadTestShape):
    """`--users` for `--run-time` seconds (defaults: 8 users, an hour), all there at the start."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        now_running = running(self, users=8, seconds=3600)
        return None if now_running is None else (now_running[0], float(now_running[0]))
