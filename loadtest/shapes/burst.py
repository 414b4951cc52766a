# SPDX-License-Identifier: Apache-2.0
"""Few users, and all of them at once every half minute: does the queue drain in between?"""

from _options import TimedShape

PERIOD_SECONDS, BURST_SECONDS = 30, 10


class Burst(TimedShape):
    """An eighth of `--users`, and all of them for a third of the time (default: 16)."""

    def users_at(self, now: float, users: int, seconds: float) -> int:
        calm = now % PERIOD_SECONDS >= BURST_SECONDS
        return max(1, users // 8) if calm else users
