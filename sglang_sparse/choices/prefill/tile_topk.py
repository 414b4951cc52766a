# SPDX-License-Identifier: Apache-2.0
"""Prefill `tile_topk`: tiles of prompt tokens select by their own attention (Kascade, 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sglang_sparse.choices.choice import InvalidConfig
from sglang_sparse.choices.interfaces import ScoreChoice
from sglang_sparse.choices.prefill._tiles import TiledPrefill, TileRun, TileStep

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build, LayerProgram
    from sglang_sparse.choices.interfaces import Point
    from sglang_sparse_kernels.common import Impl
    from sglang_sparse_kernels.exact import Pool
    from sglang_sparse_kernels.records import Always


class TilePrefill(TiledPrefill):
    """Tiles of prompt tokens attend to their best tokens and to themselves (Kascade, 3.4)."""

    kind: Literal["tile_topk"] = "tile_topk"

    def check(self, point: Point) -> None:
        if point.score.tile_pool is None:
            raise InvalidConfig(
                f"prefill.kind {self.kind} lists single tokens, score {point.score.kind} selects "
                f"units of {point.unit}",
                allowed=f"prefill.kind {self.kind} with score exact or key_sketch",
                remedy="set prefill.kind to dense, or choose another score",
            )
        super().check(point)

    def build(
        self, build: Build, score: ScoreChoice, programs: dict[int, LayerProgram]
    ) -> TileRun | None:
        pool = score.tile_pool
        assert pool is not None  # check refused it
        select = SelectTiles(build.impl, build.always, pool)
        return TileRun(self, build, programs, lambda _: select) if programs else None


@dataclass(frozen=True)
class SelectTiles:
    """Scores the tokens before each tile and selects the best, pass by pass."""

    impl: Impl
    always: Always
    pool: Pool

    def run(self, step: TileStep) -> None:
        """Write the lists of every tile."""
        from dataclasses import replace

        from sglang_sparse_kernels.select import select_topk
        from sglang_sparse_kernels.tiles import tile_score

        batch = step.batch
        rows, tiles = len(batch.scores.values), batch.plan.rows.num_rows
        for start in range(0, tiles, rows):
            part = batch.plan.part(start, min(start + rows, tiles))
            count = part.rows.num_rows
            scores = batch.scores.rows(count)
            kv = replace(step.kv, page_table=part.rows.page_table)
            tile_score(
                step.q, kv, part, softmax=step.softmax, pool=self.pool, out=scores, impl=self.impl
            )
            select_topk(
                scores, part.rows, replace(step.lists, rows=part.rows.request_slots, head_map=None),
                always=self.always, workspace=batch.topk.rows(count), impl=self.impl,
            )  # fmt: skip
