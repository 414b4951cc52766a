# SPDX-License-Identifier: Apache-2.0
"""The arms of an evaluation: dense, and one for each budget, by the options of a request.

All arms run on one server and share its prefix cache. The cache keeps them apart by their options:
tokens that one arm decoded are never the prefix of another arm's prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_sparse.config import ConfigError
from sglang_sparse.request_options import KEY

DENSE = "dense"


@dataclass(frozen=True)
class Arm:
    """One column of the table.

    Attributes:
        name: `dense`, or the budget as text.
        options: the value of `custom_params.sparse` in its requests.
    """

    name: str
    options: dict[str, Any]

    @property
    def custom_params(self) -> dict[str, Any]:
        """What SGLang takes as `custom_params`."""
        return {KEY: self.options}


def make_arms(budgets: Sequence[str], state: dict[str, Any]) -> list[Arm]:
    """Dense, then an arm for each budget, in rising order.

    Args:
        budgets: numbers as text, in the unit of the server's own budget; none means the
            server's budget alone.
        state: the `sparse` block of `/server_info`.

    Raises:
        ConfigError: a budget is no number, or outside of what the server allows.
    """
    limits, dense = state["request_budget"], Arm(DENSE, {"mode": "dense"})
    own = state["axes"]["budget"][limits["unit"]]
    low, high = limits["least"], limits["most"]
    values = []
    for text in budgets or [str(own)]:
        try:
            value = int(text) if isinstance(high, int) else float(text)
        except ValueError:
            value = -1
        if not low <= value <= high:
            raise ConfigError(
                flag="--budgets",
                value=text,
                problem="the server does not allow it",
                allowed=f"{low} to {high} ({limits['unit']})",
                remedy=f"correct it, or serve with a larger budget.max_{limits['unit']}",
            )
        values.append(value)
    sparse = [Arm(str(value), {"budget": value}) for value in sorted(set(values))]
    return [dense, *sparse]
