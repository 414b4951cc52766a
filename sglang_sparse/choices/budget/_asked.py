# SPDX-License-Identifier: Apache-2.0
"""Shared by budgets of one number, which a request may replace."""

from typing import Self

from pydantic import model_validator

from sglang_sparse.choices.choice import check_at_least
from sglang_sparse.choices.interfaces import BudgetChoice


class AskedBudget(BudgetChoice):
    """A budget whose `key` a request may replace, by no more than the key `max_<key>`."""

    @model_validator(mode="after")
    def _check_most(self) -> Self:
        check_at_least(f"budget.max_{self.key}", self._most, f"budget.{self.key}", self.amount)
        return self

    @property
    def amount(self) -> float:
        number: float = getattr(self, self.key)
        return number

    @property
    def largest(self) -> BudgetChoice:
        return self.asked(self._most or self.amount)

    @property
    def _most(self) -> float | None:
        most: float | None = getattr(self, f"max_{self.key}")
        return most
