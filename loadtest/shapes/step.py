# SPDX-License-Identifier: Apache-2.0
"""Four steps of equal length and height: what does each level cost once it has settled?"""

from _options import TimedShape

STEPS = 4


class Step(TimedShape):
    """`--users` in four steps over `--run-time` seconds (defaults: 16 users, 120 seconds)."""

    def users_at(self, now: float, users: int, seconds: float) -> int:
        return max(1, users * (int(STEPS * now / seconds) + 1) // STEPS)
