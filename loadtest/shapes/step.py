# SPDX-License-Identifier: Apache-2.0
"""Four steps of equal length and height: what does each level cost once it has settled?"""

from __future__ import annotations

from locust import LoadTestShape

STEPS = 4


class Step(LoadTestShape):
    """`--users` in four steps over `--run-time` seconds (defaults: 16 users, 120 seconds)."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        users, seconds = options.num_users or 16, options.run_time or 120
        now = self.get_run_time()
        if now >= seconds:
            return None
        step = int(STEPS * now / seconds) + 1
        return max(1, users * step // STEPS), float(users)
