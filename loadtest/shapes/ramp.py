# SPDX-License-Identifier: Apache-2.0
"""From one user to many, evenly: where does the server begin to queue?"""

from _options import TimedShape


class Ramp(TimedShape):
    """`--users` over `--run-time` seconds (defaults: 16 users over 120 seconds)."""

    def users_at(self, now: float, users: int, seconds: float) -> int:
        return max(1, round(users * now / seconds))
