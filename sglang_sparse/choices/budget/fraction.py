# SPDX-License-Identifier: Apache-2.0
"""Budget `fraction`: a share of the context, never less than a floor."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.budget._listed import ListBudget
from sglang_sparse.choices.choice import MAX_COUNT, MILLION


class FractionBudget(ListBudget):
    """A share of the context, never less than a floor."""

    key: ClassVar[str] = "fraction"
    list_key: ClassVar[str] = "floor"

    kind: Literal["fraction"] = "fraction"
    fraction: float = Field(
        ge=1 / MILLION, le=1.0, description="Share of the context to select, to one millionth."
    )
    floor: int = Field(ge=1, le=MAX_COUNT, description="Fewest tokens to select.")
    max_fraction: float | None = Field(
        default=None,
        ge=1 / MILLION,
        le=1.0,
        description="Most that one request may ask for; null allows no more than `fraction`.",
    )

    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the least and the largest share that a request may ask for."""
        return 1 / MILLION, self.largest.amount

    def asked(self, value: float) -> FractionBudget:
        """Return the budget of a request that asks for the share `value`; the floor stays."""
        return FractionBudget(fraction=float(value), floor=self.floor)

    @property
    def list_size(self) -> tuple[int, float]:
        return self.floor, self.fraction
