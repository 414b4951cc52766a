# SPDX-License-Identifier: Apache-2.0
"""Score `none`: nothing is scored, since no layer selects."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

from sglang_sparse.choices.interfaces import ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build


class NoScore(ScoreChoice):
    """Nothing is scored; for a retention that bounds what is held."""

    selects: ClassVar[bool] = False

    kind: Literal["none"] = "none"

    @property
    def unit(self) -> int:
        return 1

    def build(self, build: Build) -> NoReturn:
        raise RuntimeError("no layer selects")
