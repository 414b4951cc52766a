# SPDX-License-Identifier: Apache-2.0
"""Shared by scores of logical pages: the largest q·k over a cuboid of each page's keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sglang_sparse.choices.choice import PageSize, check_at_least
from sglang_sparse.choices.interfaces import ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build
    from sglang_sparse_kernels.step import Stage
    from sglang_sparse_radix.planes import CuboidPlane, Plane


class PageScoreChoice(ScoreChoice):
    """A score of whole logical pages."""

    has_cuboids: ClassVar[bool] = True
    logical_page: PageSize
    select: PageSize | None = Field(
        default=None,
        description="Tokens that are selected together, by the largest score of their logical "
        "pages; null for one logical page.",
    )
    reduce: Literal["max", "sum"] = Field(
        default="max", description="How the query heads of one KV head pool their scores."
    )

    @model_validator(mode="after")
    def _check_select(self) -> Self:
        check_at_least("score.select", self.select, "score.logical_page", self.logical_page)
        return self

    @property
    def unit(self) -> int:
        return self.select or self.logical_page

    @property
    def unit_key(self) -> str:
        return "logical_page" if self.select is None else "select"

    @abstractmethod
    def cuboids(self, *, bound: bool) -> CuboidPlane: ...

    def planes(self) -> tuple[Plane, ...]:
        return (self.cuboids(bound=False),)

    def build(self, build: Build) -> PageRun:
        return PageRun(self, build)


class PageRun:
    """Scores with the cuboids of the logical pages."""

    def __init__(self, choice: PageScoreChoice, build: Build) -> None:
        self._choice, self._build = choice, build

    def stage(self, layer: int) -> Stage:
        from sglang_sparse_kernels.step import PageScore

        plane = self._choice.cuboids(bound=False)
        pages = self._build.cuboids(layer, plane)
        return PageScore(pages, self._choice.reduce, self._build.scores_of(layer))
