# SPDX-License-Identifier: Apache-2.0
"""The axes of a config: on each, any of the choices in its folder of `sglang_sparse.choices`.

A method is a point on these axes; nothing at run time asks which method it was.
"""

from typing import TYPE_CHECKING

from sglang_sparse.choices.choice import MILLION
from sglang_sparse.choices.discover import union_of
from sglang_sparse.choices.interfaces import (
    BudgetChoice,
    HeadsChoice,
    LayersChoice,
    PrefillChoice,
    RetentionChoice,
    ScoreChoice,
)
from sglang_sparse.choices.placement._placement import PlacementChoice

if TYPE_CHECKING:
    Layers = LayersChoice
    Heads = HeadsChoice
    Score = ScoreChoice
    Budget = BudgetChoice
    Prefill = PrefillChoice
    Retention = RetentionChoice
    Placement = PlacementChoice
else:
    Layers = union_of("layers", LayersChoice)
    Heads = union_of("heads", HeadsChoice)
    Score = union_of("score", ScoreChoice)
    Budget = union_of("budget", BudgetChoice)
    Prefill = union_of("prefill", PrefillChoice)
    Retention = union_of("retention", RetentionChoice)
    Placement = union_of("placement", PlacementChoice)

# The names of the axes, in the order in which people are told of them.
AXES = ("layers", "heads", "score", "budget", "cadence", "prefill", "retention", "placement")


def budget_tokens(budget: BudgetChoice, context_len: int) -> int:
    """Return how many tokens a list of `budget` holds in a context of `context_len` tokens."""
    tokens, fraction = budget.list_size
    # In integers, as on the device: a product of floats could differ by one token from the plan.
    share = context_len * round(fraction * MILLION)
    return max(tokens, -(-share // MILLION))
