# SPDX-License-Identifier: Apache-2.0
"""Budget `held`: everything that is held is attended to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from sglang_sparse.choices.choice import MAX_COUNT
from sglang_sparse.choices.interfaces import BudgetChoice, ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build


class HeldBudget(BudgetChoice):
    """Everything that is held is attended to; for a retention that bounds it."""

    selects: ClassVar[bool] = False
    key: ClassVar[str] = "kind"
    list_key: ClassVar[str] = "kind"

    kind: Literal["held"] = "held"

    @property
    def amount(self) -> int:
        return MAX_COUNT

    @property
    def largest(self) -> HeldBudget:
        return self

    def request_range(self, least_tokens: int) -> tuple[int, int]:
        """Return what a request may ask for: nothing but everything."""
        return MAX_COUNT, MAX_COUNT

    def asked(self, value: float) -> HeldBudget:
        """Return this budget; `RetentionChoice.check_request` refuses any other."""
        return self

    @property
    def list_size(self) -> tuple[int, float]:
        return MAX_COUNT, 0.0

    def build(self, build: Build, score: ScoreChoice) -> NoReturn:
        raise RuntimeError("no layer selects")
