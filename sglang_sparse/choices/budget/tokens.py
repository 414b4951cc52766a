# SPDX-License-Identifier: Apache-2.0
"""Budget `tokens`: a fixed number of selected tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.budget._listed import ListBudget
from sglang_sparse.choices.choice import MAX_COUNT


class TokenBudget(ListBudget):
    """A fixed number of selected tokens for every request, layer and KV head."""

    key: ClassVar[str] = "tokens"
    list_key: ClassVar[str] = "tokens"

    kind: Literal["tokens"] = "tokens"
    tokens: int = Field(
        ge=1, le=MAX_COUNT, description="Selected tokens, sinks and recent ones among them."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Most that one request may ask for; null allows no more than `tokens`.",
    )

    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the least and the most tokens that a request may ask for."""
        return least_tokens, self.largest.amount

    def asked(self, value: float) -> TokenBudget:
        """Return the budget of a request that asks for `value` tokens, a whole number."""
        return TokenBudget.model_validate({"tokens": value})

    @property
    def list_size(self) -> tuple[int, float]:
        return self.tokens, 0.0
