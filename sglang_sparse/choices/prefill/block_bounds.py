# SPDX-License-Identifier: Apache-2.0
"""Prefill `block_bounds`: tiles of prompt tokens select blocks by bounds of their mean query.

MInference (arXiv 2407.02490, section 3.2) pools queries and keys to their means; here the mean
query of a tile is scored against the cuboid of each logical page, as LServe's decoding does
(arXiv 2502.14866, section 3.5). Heads that stream see their windows alone (section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.choice import MAX_COUNT, InvalidConfig
from sglang_sparse.choices.interfaces import ScoreChoice
from sglang_sparse.choices.prefill._tiles import TiledPrefill, TileRun, TileStep
from sglang_sparse.choices.score._pages import PageScoreChoice

if TYPE_CHECKING:
    import torch

    from sglang_sparse.choices.build import Build, LayerProgram
    from sglang_sparse.choices.interfaces import Point


class BlockPrefill(TiledPrefill):
    """Tiles of prompt tokens attend to their best blocks and to themselves, by bounds of pages."""

    has_windows: ClassVar[bool] = True

    kind: Literal["block_bounds"] = "block_bounds"
    floor: int = Field(
        default=1024, ge=1, le=MAX_COUNT, description="Fewest tokens a tile selects."
    )
    min_tokens: int = Field(
        default=8192, ge=1, le=MAX_COUNT, description="Tiles that start before this are dense."
    )

    def check(self, point: Point) -> None:
        if not isinstance(point.score, PageScoreChoice):
            raise InvalidConfig(
                f"prefill.kind {self.kind} scores bounds of pages, score {point.score.kind} has "
                "none",
                allowed=f"prefill.kind {self.kind} with score page_minmax or page_mean",
                remedy="set prefill.kind to dense or tile_topk, or choose another score",
            )
        super().check(point)

    def build(
        self, build: Build, score: ScoreChoice, programs: dict[int, LayerProgram]
    ) -> TileRun | None:
        assert isinstance(score, PageScoreChoice)  # check refused it

        def select(layer: int) -> SelectBlocks:
            return SelectBlocks(build, score, layer, programs[layer])

        return TileRun(self, build, programs, select) if programs else None


@dataclass(frozen=True)
class SelectBlocks:
    """Scores the blocks before each tile by its mean query, and selects the best, pass by pass."""

    build: Build
    score: PageScoreChoice
    layer: int
    program: LayerProgram

    @cached_property
    def _key_pointer(self) -> torch.Tensor:
        """Where the layer's keys lie, on the device. Made once: making it waits for the device."""
        import torch

        keys = self.program.k
        return torch.tensor([keys.data_ptr()], dtype=torch.uint64).to(keys.device)

    def run(self, step: TileStep) -> None:
        """Write the lists of every tile."""
        import torch

        from sglang_sparse_kernels.score import page_minmax_score
        from sglang_sparse_kernels.select import select_topk
        from sglang_sparse_kernels.tiles import tile_mean

        self._update_planes(step)
        batch, impl, unit = step.batch, self.build.impl, self.build.unit
        rows, tiles = len(batch.scores.values), batch.plan.rows.num_rows
        mean = torch.empty((tiles, *step.q.shape[1:]), dtype=step.q.dtype, device=step.q.device)
        tile_mean(step.q, batch.plan, out=mean, impl=impl)
        pages = self.build.cuboids(self.layer, self.score.cuboids(bound=False))
        unread = self.build.kinds.unread.get(self.layer)
        # The page that a tile ends the domain with may hold tokens of the tile itself: its bounds
        # follow from where the chunk ends. So it is not left to its score.
        always = replace(self.build.always, recent=max(1, self.build.always.recent))
        for start in range(0, tiles, rows):
            part = batch.plan.part(start, min(start + rows, tiles)).rows
            count = part.num_rows
            scores = replace(batch.scores.rows(count), unread=unread)
            page_minmax_score(
                mean[start : start + count], pages, part, unit=unit, reduce=self.score.reduce,
                out=scores, impl=impl,
            )  # fmt: skip
            select_topk(
                scores, part, replace(step.lists, rows=part.request_slots, head_map=None),
                always=always, workspace=batch.topk.rows(count), impl=impl,
            )  # fmt: skip

    def _update_planes(self, step: TileStep) -> None:
        """Bring this layer's cuboids up to date: the pool does so only after the last layer."""
        import torch

        from sglang_sparse_kernels.planes import PlaneBuffers, update_planes

        pool, spans = self.build.pool, step.batch.spans
        index, plane = pool.plane_of(self.layer), self.score.cuboids(bound=False)
        kept = pool.planes.tensors()
        own = {name: kept[name][index : index + 1] for name in plane.names}
        # A prefix that is being loaded from the host has no planes before the batch's end.
        loaded = pool.layer_transfer_counter is not None
        start = torch.zeros_like(spans.prefix) if loaded else spans.prefix
        update_planes(
            [self.program.k],
            self._key_pointer,
            PlaneBuffers(**own, logical_page=plane.logical_page),
            spans.page_table,
            start,
            spans.end,
            page_size=pool.page_size,
            max_new_tokens=spans.longest if loaded else spans.newest,
            impl=self.build.impl,
        )
