# SPDX-License-Identifier: Apache-2.0
"""How often selection is redone."""

from typing import Literal

from pydantic import Field

from sglang_sparse.choices.choice import MAX_COUNT, Choice


class StepCadence(Choice):
    """Selection is redone every `every` decode steps; tokens decoded since are always kept."""

    kind: Literal["steps"] = "steps"
    every: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Decode steps that share one selection."
    )
