# SPDX-License-Identifier: Apache-2.0
"""The same load for a long time: does anything grow?"""

from _options import TimedShape


class Soak(TimedShape):
    """`--users` for `--run-time` seconds (defaults: 8 users, an hour), all there at the start."""

    users, seconds = 8, 3600

    def users_at(self, now: float, users: int, seconds: float) -> int:
        return users
