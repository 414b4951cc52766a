# SPDX-License-Identifier: Apache-2.0
"""The same load for a long time: does anything grow?"""

from __future__ import annotations

from locust import LoadTestShape


class Soak(LoadTestShape):
    """`--users` for `--run-time` seconds (defaults: 8 users, an hour), all there at the start."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        users, seconds = options.num_users or 8, options.run_time or 3600
        return (users, float(users)) if self.get_run_time() < seconds else None
