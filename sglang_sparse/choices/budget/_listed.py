# SPDX-License-Identifier: Apache-2.0
"""Shared by budgets that are a number of units: select the best units, attend to all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_sparse.choices.budget._asked import AskedBudget
from sglang_sparse.choices.interfaces import ScoreChoice

if TYPE_CHECKING:
    import torch

    from sglang_sparse.choices.build import Build
    from sglang_sparse_kernels.step import Stage


class ListBudget(AskedBudget):
    """A budget that fixes the length of a list before anything is scored."""

    def build(self, build: Build, score: ScoreChoice) -> ListRun:
        return ListRun(build)


class ListRun:
    """Selects the units with the best scores, and attends to them."""

    counters = None

    def __init__(self, build: Build) -> None:
        self._build = build

    def stages(self, layer: int, *, attends: bool) -> list[Stage]:
        from sglang_sparse_kernels.step import Select

        build = self._build
        select = Select(build.scores_of(layer), build.always, build.topk)
        return [select, build.attend(layer)] if attends else [select]

    def plan(self, request_slots: torch.Tensor) -> None:
        """Nothing to gather: the plan holds the length of each list."""
