# SPDX-License-Identifier: Apache-2.0
"""What the shapes read off locust's own options."""

from __future__ import annotations

from locust import LoadTestShape


def running(
    shape: LoadTestShape, *, users: int = 16, seconds: float = 120
) -> tuple[int, float, float] | None:
    """(users, seconds, seconds gone) of a test, or None when its time is up.

    Args:
        shape: of the test.
        users: unless `--users` says otherwise.
        seconds: unless `--run-time` says otherwise.
    """
    options = shape.runner.environment.parsed_options
    users, seconds = options.num_users or users, options.run_time or seconds
    now = shape.get_run_time()
    return (users, seconds, now) if now < seconds else None
