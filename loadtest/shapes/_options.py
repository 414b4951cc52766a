# SPDX-License-Identifier: Apache-2.0
"""What the shapes share: they read locust's own options."""

from abc import abstractmethod

from locust import LoadTestShape


class TimedShape(LoadTestShape):
    """A number of users that changes with the time, until the time is up.

    Attributes:
        users: unless `--users` says otherwise.
        seconds: unless `--run-time` says otherwise.
    """

    abstract = True
    use_common_options = True
    users: int = 16
    seconds: float = 120

    @abstractmethod
    def users_at(self, now: float, users: int, seconds: float) -> int:
        """Users `now` seconds after the start of a test with so many users and seconds."""

    def tick(self) -> tuple[int, float] | None:
        """(users, users that start a second), or None when the time is up."""
        options = self.runner.environment.parsed_options
        users, seconds = options.num_users or self.users, options.run_time or self.seconds
        now = self.get_run_time()
        return (self.users_at(now, users, seconds), float(users)) if now < seconds else None
