# SPDX-License-Identifier: Apache-2.0
"""Shared by sparse prefills: prompt tokens in tiles that select what they attend to.

Prefill is not captured in graphs, so buffers are sized by the batch. Layers have the same role as
in decoding: layers that select do so for each tile, and the others take the last anchor's
selection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import Field

from sglang_sparse.choices.choice import MAX_COUNT, MILLION, InvalidConfig
from sglang_sparse.choices.interfaces import PrefillChoice

if TYPE_CHECKING:
    import torch

    from sglang_sparse.choices.build import Build, LayerProgram
    from sglang_sparse.choices.interfaces import Point
    from sglang_sparse_kernels.common import Impl
    from sglang_sparse_kernels.records import (
        HeadWindows,
        KVScales,
        KVView,
        Lists,
        Scores,
        Softmax,
    )
    from sglang_sparse_kernels.select import TopkWorkspace
    from sglang_sparse_kernels.tiles import TilePlan

TILE_QUERIES = 128  # of all heads of a group together
# Limit of the scores of one pass. More tiles take several passes.
_SCORE_BYTES = 256 << 20
_ALIGNMENT = 16
_LEAST_WIDTH = 16384
# Some kernels are launched differently for batches of few rows.
_FEW_TILES, _MANY_TILES = 1, 64


class TiledPrefill(PrefillChoice):
    """The keys of a prefill in tiles."""

    # A chunk's selections are kept to its last layer.
    most_chunk: ClassVar[int | None] = 16384

    fraction: float = Field(
        ge=1 / MILLION, le=1.0, description="Share of the tokens before a tile, to one millionth."
    )
    floor: int = Field(default=128, ge=1, le=MAX_COUNT, description="Fewest tokens a tile selects.")
    min_tokens: int = Field(
        default=4096, ge=1, le=MAX_COUNT, description="Tiles that start before this are dense."
    )
    min_new_tokens: int = Field(
        default=1,
        ge=1,
        le=MAX_COUNT,
        description="Chunks of fewer new tokens are dense: they take less time than to select.",
    )

    @property
    def sparse_from(self) -> int:
        return self.min_tokens

    def check(self, point: Point) -> None:
        if self.floor < point.least_tokens:
            raise InvalidConfig(
                f"prefill.floor {self.floor} cannot hold sink_tokens {point.sink_tokens} and "
                f"recent_tokens {point.recent_tokens} in units of {point.unit}, and one unit more",
                allowed=f"prefill.floor of at least {point.least_tokens}",
                remedy="raise prefill.floor, or lower sink_tokens or recent_tokens",
            )


@dataclass(frozen=True)
class Spans:
    """The requests of a prefill batch, R of them.

    Attributes:
        page_table: int32 [R, max_pages].
        prefix: int32 [R], tokens that are cached.
        end: int32 [R], tokens with those of this batch.
        longest: host upper bound of ``end``.
        newest: host upper bound of ``end - prefix``.
    """

    page_table: torch.Tensor
    prefix: torch.Tensor
    end: torch.Tensor
    longest: int
    newest: int


@dataclass(frozen=True)
class TileBatch:
    """One prefill batch.

    Attributes:
        plan: its tiles, T of them.
        indices: int32 [T, lists, capacity], what the last selecting layer chose.
        counts: int32 [T, lists].
        scores, topk: of the tiles of one pass.
        spans: the requests that the tiles are of.
    """

    plan: TilePlan
    indices: torch.Tensor
    counts: torch.Tensor
    scores: Scores
    topk: TopkWorkspace
    spans: Spans


@dataclass(frozen=True)
class TileStep:
    """One layer of a prefill batch.

    Attributes:
        batch: its tiles and their buffers.
        q: [tokens, q_heads, head_dim]; the keys of these tokens are in the pool.
        kv: this layer's KV rows, a row of the page table a tile.
        lists: what the layer writes, if it selects, and reads.
        softmax: scale and cap of the logits.
        out: [tokens, q_heads, head_dim].
    """

    batch: TileBatch
    q: torch.Tensor
    kv: KVView
    lists: Lists
    softmax: Softmax
    out: torch.Tensor


class TileStage(Protocol):
    """A part of a layer's prefill."""

    def run(self, step: TileStep) -> None:
        """Do this part for the tiles of ``step``."""


@dataclass(frozen=True)
class AttendTiles:
    """Attention of each tile to its list and to itself."""

    impl: Impl

    def run(self, step: TileStep) -> None:
        """Write the output of every tile."""
        from sglang_sparse_kernels.tiles import tile_attention

        tile_attention(
            step.q, step.kv, step.batch.plan, step.lists, softmax=step.softmax, out=step.out,
            impl=self.impl,
        )  # fmt: skip


class TileRun:
    """Plans prefill batches as tiles, and runs the layers that select or reuse."""

    def __init__(
        self,
        choice: TiledPrefill,
        build: Build,
        programs: dict[int, LayerProgram],
        select: Callable[[int], TileStage],
    ) -> None:
        """Compile the stages of each layer.

        Args:
            choice: its keys.
            build: pool, limits and what is always selected.
            programs: the layers' decode programs: their roles, maps and keys are used.
            select: makes the stage of a layer that selects, named by its global id.
        """
        from sglang_sparse_kernels.tiles import tile_tokens_of

        self.choice, self.impl, self.unit = choice, build.impl, build.unit
        self.kinds = build.kinds
        self.page_size, self.query_heads = build.pool.page_size, build.query_heads
        self.lists = build.limits.lists
        self.programs = programs
        group = self.query_heads // build.pool.head_num
        self.tile_tokens = tile_tokens_of(TILE_QUERIES, group, self.page_size)
        attend = AttendTiles(build.impl)
        self.stages: dict[int, list[TileStage]] = {}
        for layer, program in programs.items():
            selects = [select(layer)] if program.role.selects else []
            self.stages[layer] = [*selects, attend] if program.attends else selects

    def plan(
        self,
        page_table: torch.Tensor,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        dense: Sequence[bool],
    ) -> TileBatch | None:
        """The tiles of a batch, or None if no tile selects, so that the batch runs densely.

        Args:
            page_table: int32 [requests, max_pages].
            prefix_lens, extend_lens: cached and new tokens of each request, on the host.
            dense: whether each request asked to be dense; may be empty if none did.
        """
        import torch

        from sglang_sparse_kernels.common import sent
        from sglang_sparse_kernels.records import make_scores
        from sglang_sparse_kernels.select import make_topk_workspace
        from sglang_sparse_kernels.tiles import plan_tiles

        ends = [p + n for p, n in zip(prefix_lens, extend_lens, strict=True)]
        longest = max(ends, default=0)
        if longest <= self.choice.min_tokens:
            return None
        if max(extend_lens) < self.choice.min_new_tokens:
            return None
        asked = dense or [False] * len(ends)
        few = [n < self.choice.min_new_tokens for n in extend_lens]
        plan = plan_tiles(
            page_table,
            prefix_lens,
            extend_lens,
            tile_tokens=self.tile_tokens,
            min_tokens=self.choice.min_tokens,
            floor=self.choice.floor,
            fraction=self.choice.fraction,
            dense=[a or b for a, b in zip(asked, few, strict=True)],
            unit=self.unit,
        )
        if plan.max_units == 0:
            return None
        tiles, device = plan.rows.num_rows, page_table.device
        width, capacity = self._shape(plan, page_table.shape[1])
        rows = min(tiles, _aligned(_SCORE_BYTES // (4 * self.lists * width)))
        return TileBatch(
            plan=plan,
            indices=torch.empty((tiles, self.lists, capacity), dtype=torch.int32, device=device),
            counts=torch.zeros((tiles, self.lists), dtype=torch.int32, device=device),
            scores=make_scores(rows, self.lists, width, device),
            topk=make_topk_workspace(rows, self.lists, width, capacity, device),
            spans=Spans(
                page_table,
                prefix=sent(torch.tensor(prefix_lens, dtype=torch.int32), device),
                end=sent(torch.tensor(ends, dtype=torch.int32), device),
                longest=longest,
                newest=max(extend_lens),
            ),
        )

    def _shape(self, plan: TilePlan, max_pages: int) -> tuple[int, int]:
        """Widths in units of a row of scores, and of a list.

        Kernels are compiled for each width, so few widths are used: powers of two up to the longest
        context.
        """
        from sglang_sparse_kernels.common import next_power_of_2
        from sglang_sparse_kernels.tiles import tile_budget

        if self.impl != "triton":
            return _aligned(-(-plan.max_tail // self.unit)), plan.max_units
        width = max(_LEAST_WIDTH, next_power_of_2(plan.max_tail))
        width = min(width, _aligned(max_pages * self.page_size))
        most = tile_budget(width, floor=self.choice.floor, fraction=self.choice.fraction)
        return _aligned(-(-width // self.unit)), _aligned(-(-most // self.unit))

    def warm_up(self, max_pages: int, dtype: torch.dtype, softmax: Softmax) -> None:
        """Run every kernel once in every shape, so that no prompt waits for the compiler.

        Args:
            max_pages: columns of the page tables that batches will have.
            dtype: dtype of the queries that batches will have.
            softmax: as layers have it; kernels of logits with a cap are others.
        """
        import torch

        from sglang_sparse_kernels.records import KVScales

        if self.impl != "triton":
            return
        programs = self.programs.values()
        kinds = {program.kind: program.layer for program in programs}
        keys = next(iter(programs)).k
        table = torch.zeros((1, max_pages), dtype=torch.int32, device=keys.device)
        # The last tiles of a context of each width. Every entry of its page table is page 0.
        longest, width = max_pages * self.page_size, _LEAST_WIDTH
        least = -(-self.choice.min_new_tokens // self.tile_tokens)
        while width < 2 * longest:
            for tiles in _FEW_TILES, _MANY_TILES:
                new = min(max(tiles, least) * self.tile_tokens, longest)
                shape = (new, self.query_heads, keys.shape[2])
                q = torch.zeros(shape, dtype=dtype, device=keys.device)
                batch = self.plan(table, [min(width, longest) - new], [new], [])
                if batch is not None:
                    for layer in kinds.values():
                        self.run(batch, layer, q, softmax, KVScales())
            width *= 2

    def run(
        self, batch: TileBatch, layer: int, q: torch.Tensor, softmax: Softmax, kv_scales: KVScales
    ) -> torch.Tensor:
        """Select, if the layer does, and attend, unless it attends to everything.

        Args:
            batch: from :meth:`plan`.
            layer: global id of a layer that selects or reuses.
            q: [tokens, q_heads, head_dim]; the keys of these tokens are in the pool.
            softmax: how products become the layer's logits.
            kv_scales: of the layer's rows.

        Returns:
            [tokens, q_heads, head_dim]; zeros if the layer attends to everything.
        """
        import torch

        from sglang_sparse_kernels.records import Lists

        program, plan = self.programs[layer], batch.plan
        step = TileStep(
            batch=batch,
            q=q,
            kv=program.kv(plan.rows.page_table, self.page_size, kv_scales),
            lists=Lists(
                batch.indices,
                batch.counts,
                plan.rows.request_slots,
                self.unit,
                program.head_map,
                self._windows(program),
            ),
            softmax=softmax,
            out=torch.zeros(q.shape, dtype=q.dtype, device=q.device),
        )
        for stage in self.stages[layer]:
            stage.run(step)
        return step.out

    def _windows(self, program: LayerProgram) -> HeadWindows | None:
        """The heads of a layer that see windows in prompts."""
        if not self.choice.has_windows or not program.attends:
            return None
        return self.kinds.prompt_windows.get(program.layer)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
