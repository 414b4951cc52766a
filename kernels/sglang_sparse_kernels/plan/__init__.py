# SPDX-License-Identifier: Apache-2.0
"""Planning of a decode batch, once a step, for all layers."""

from .api import plan_decode, snapshot_page_table
from .types import (
    DENSE_REQUEST,
    DecodePlan,
    PlanRules,
    RequestState,
    TokenTable,
    budget_row,
)

__all__ = [
    "DENSE_REQUEST",
    "DecodePlan",
    "PlanRules",
    "RequestState",
    "TokenTable",
    "budget_row",
    "plan_decode",
    "snapshot_page_table",
]
