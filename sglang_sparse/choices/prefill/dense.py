# SPDX-License-Identifier: Apache-2.0
"""Prefill `dense`: the inner backend's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sglang_sparse.choices.interfaces import PrefillChoice, ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build, LayerProgram


class DensePrefill(PrefillChoice):
    """Prompt tokens attend to everything before them."""

    kind: Literal["dense"] = "dense"

    def build(self, build: Build, score: ScoreChoice, programs: dict[int, LayerProgram]) -> None:
        return None
