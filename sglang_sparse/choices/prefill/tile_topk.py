# SPDX-License-Identifier: Apache-2.0
"""Prefill `tile_topk`: tiles of prompt tokens select by their own attention (Kascade, 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.choice import MAX_COUNT, MILLION, InvalidConfig
from sglang_sparse.choices.interfaces import PrefillChoice, ScoreChoice
from sglang_sparse.choices.prefill._tiles import TileRun, TileStep

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build, LayerProgram
    from sglang_sparse.choices.interfaces import Point
    from sglang_sparse_kernels.common import Impl
    from sglang_sparse_kernels.exact import Pool
    from sglang_sparse_kernels.records import Always


class TilePrefill(PrefillChoice):
    """Tiles of prompt tokens attend to their best tokens and to themselves (Kascade, 3.4)."""

    # A chunk's selections are kept to its last layer.
    most_chunk: ClassVar[int | None] = 16384

    kind: Literal["tile_topk"] = "tile_topk"
    fraction: float = Field(
        ge=1 / MILLION, le=1.0, description="Share of the tokens before a tile, to one millionth."
    )
    floor: int = Field(default=128, ge=1, le=MAX_COUNT, description="Fewest tokens a tile selects.")
    min_tokens: int = Field(
        default=4096, ge=1, le=MAX_COUNT, description="Tiles that start before this are dense."
    )

    @property
    def sparse_from(self) -> int:
        return self.min_tokens

    def check(self, point: Point) -> None:
        if point.score.tile_pool is None:
            raise InvalidConfig(
                f"prefill.kind {self.kind} lists single tokens, score {point.score.kind} selects "
                f"units of {point.unit}",
                allowed=f"prefill.kind {self.kind} with score exact or key_sketch",
                remedy="set prefill.kind to dense, or choose another score",
            )
        smallest = point.sink_tokens + point.recent_tokens + 1
        if self.floor < smallest:
            raise InvalidConfig(
                f"prefill.floor {self.floor} cannot hold sink_tokens {point.sink_tokens}, "
                f"recent_tokens {point.recent_tokens} and one token more",
                allowed=f"prefill.floor of at least {smallest}",
                remedy="raise prefill.floor, or lower sink_tokens or recent_tokens",
            )

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
