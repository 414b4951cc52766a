# SPDX-License-Identifier: Apache-2.0
"""From one user to many, evenly: where does the server begin to queue?"""

from __future__ import annotations

from locust import LoadTestShape


class Ramp(LoadTestShape):
    """`--users` over `--run-time` seconds (defaults: 16 users over 120 seconds)."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        users, seconds = options.num_users or 16, options.run_time or 120
        now = self.get_run_time()
        if now >= seconds:
            return None
        return max(1, round(users * now / seconds)), float(users)
