# SPDX-License-Identifier: Apache-2.0
"""Shared by scores of logical pages: the largest q·k over a cuboid of each page's keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.choice import PageSize
from sglang_sparse.choices.interfaces import ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build
    from sglang_sparse_kernels.step import Stage
    from sglang_sparse_radix.planes import CuboidPlane, Plane


class PageScoreChoice(ScoreChoice):
    """A score of whole logical pages."""

    has_cuboids: ClassVar[bool] = True
    logical_page: PageSize
    reduce: Literal["max", "sum"] = Field(
        default="max", description="How the query heads of one KV head pool their scores."
    )

    @property
    def unit(self) -> int:
        return self.logical_page

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
        return PageScore(pages, self._choice.reduce, self._build.scores)
