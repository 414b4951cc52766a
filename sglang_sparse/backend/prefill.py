# SPDX-License-Identifier: Apache-2.0
"""The prefill axis at run time: prompt tokens in tiles that select what they attend to.

Prefill is not captured in graphs, so buffers follow the batch. Layers play the part that they play
in decoding: those that select do so for each tile, the others take what the last anchor selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_sparse.backend.program import SelectAndAttend
from sglang_sparse.config import SparseConfig, TilePrefill
from sglang_sparse_kernels.common import Impl, next_power_of_2
from sglang_sparse_kernels.exact import Pool
from sglang_sparse_kernels.records import (
    Always,
    KVView,
    Lists,
    Scores,
    Softmax,
    make_scores,
)
from sglang_sparse_kernels.select import TopkWorkspace, make_topk_workspace, select_topk
from sglang_sparse_kernels.tiles import (
    TilePlan,
    plan_tiles,
    tile_attention,
    tile_budget,
    tile_score,
    tile_tokens_of,
)
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

# Scores of the tiles that are scored together; more tiles take several passes.
_SCORE_BYTES = 256 << 20
_ALIGNMENT = 16
_LEAST_WIDTH = 16384
# Some kernels are launched in another way where a batch has few rows.
_FEW_TILES, _MANY_TILES = 1, 64


@dataclass(frozen=True)
class TileBatch:
    """One prefill batch.

    Attributes:
        plan: its tiles, T of them.
        indices: int32 [T, lists, capacity], what the last selecting layer chose.
        counts: int32 [T, lists].
        scores: of the tiles that are scored together.
        topk: scratch of as many tiles.
    """

    plan: TilePlan
    indices: torch.Tensor
    counts: torch.Tensor
    scores: Scores
    topk: TopkWorkspace


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class SparsePrefill:
    """Plans prefill batches as tiles, and runs the layers that select or reuse."""

    def __init__(
        self,
        config: SparseConfig,
        choice: TilePrefill,
        pool: SparseMHATokenToKVPool,
        programs: dict[int, SelectAndAttend],
        impl: Impl,
    ) -> None:
        """``programs`` are those of decoding; of them only buffers and head maps are used."""
        self.choice, self.impl = choice, impl
        self.always = Always(config.sink_tokens, config.recent_tokens)
        self.page_size = pool.page_size
        self.programs = programs
        self.lists = config.score.lists(pool.head_num)
        self.pool: Pool = "group" if self.lists == pool.head_num else "heads"
        self.query_heads = next(iter(programs.values())).buffers.query_heads
        group = self.query_heads // pool.head_num
        self.tile_tokens = tile_tokens_of(choice.tile, group, pool.page_size)

    def plan(
        self,
        page_table: torch.Tensor,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        dense: Sequence[bool],
    ) -> TileBatch | None:
        """The tiles of a batch, or None if none of them selects: then it is dense.

        Args:
            page_table: int32 [requests, max_pages].
            prefix_lens, extend_lens: tokens that are cached, and new ones, on the host.
            dense: requests that asked to be dense; empty if the batch is of none.
        """
        longest = max((p + n for p, n in zip(prefix_lens, extend_lens, strict=True)), default=0)
        if longest <= self.choice.min_tokens:
            return None
        plan = plan_tiles(
            page_table,
            prefix_lens,
            extend_lens,
            tile_tokens=self.tile_tokens,
            min_tokens=self.choice.min_tokens,
            floor=self.choice.floor,
            fraction=self.choice.fraction,
            dense=dense,
        )
        if plan.max_units == 0:
            return None
        tiles, device = plan.rows.num_rows, page_table.device
        width, capacity = self._shape(plan, page_table.shape[1])
        rows = _aligned(_SCORE_BYTES // (4 * self.lists * width))
        rows = min(tiles, rows)
        return TileBatch(
            plan=plan,
            indices=torch.empty((tiles, self.lists, capacity), dtype=torch.int32, device=device),
            counts=torch.zeros((tiles, self.lists), dtype=torch.int32, device=device),
            scores=make_scores(rows, self.lists, width, device),
            topk=make_topk_workspace(rows, self.lists, width, capacity, device),
        )

    def _shape(self, plan: TilePlan, max_pages: int) -> tuple[int, int]:
        """Tokens of a row of scores, and of a list.

        Kernels are compiled for shapes, so there are few: powers of two up to the longest context.
        """
        if self.impl == "torch":
            return _aligned(plan.max_tail), plan.max_units
        width = max(_LEAST_WIDTH, next_power_of_2(plan.max_tail))
        width = min(width, _aligned(max_pages * self.page_size))
        most = tile_budget(width, floor=self.choice.floor, fraction=self.choice.fraction)
        return width, _aligned(most)

    def warm_up(self, max_pages: int) -> None:
        """Run every kernel once in every shape, so that no prompt waits while one is compiled.

        Args:
            max_pages: columns of the page tables to come.
        """
        programs = self.programs.values()
        kinds = {(p.scorer is None, p.dense, p.head_map is None): p for p in programs}
        keys = next(iter(programs)).k_buffer
        table = torch.zeros((1, max_pages), dtype=torch.int32, device=keys.device)
        # The last tiles of a context of each width; all of its pages are the first one.
        longest, width = max_pages * self.page_size, _LEAST_WIDTH
        while width < 2 * longest:
            for tiles in _FEW_TILES, _MANY_TILES:
                new = min(tiles * self.tile_tokens, longest)
                q = keys.new_zeros((new, self.query_heads, keys.shape[2]))
                batch = self.plan(table, [min(width, longest) - new], [new], [])
                if batch is not None:
                    for program in kinds.values():
                        self.run(batch, program, q, scaling=1.0, logit_cap=0.0)
            width *= 2

    def run(
        self,
        batch: TileBatch,
        program: SelectAndAttend,
        q: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
    ) -> torch.Tensor:
        """Select, if the layer does, and attend, unless it attends to everything.

        Args:
            batch: from :meth:`plan`.
            program: the layer's part in decoding.
            q: [tokens, q_heads, head_dim]; the keys of these tokens are in the pool.
            scaling: factor on q.k.
            logit_cap: soft cap on logits, 0 for none.

        Returns:
            [tokens, q_heads, head_dim]; undefined if the layer is dense.
        """
        if program.scorer is not None:
            self._select(batch, program, q, scaling, logit_cap)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        if not program.dense:
            rows = batch.plan.rows
            lists = Lists(
                batch.indices, batch.counts, rows.request_slots, head_map=program.head_map
            )
            tile_attention(
                q,
                self._kv(program, rows.page_table),
                batch.plan,
                lists,
                softmax=Softmax(scaling, logit_cap),
                out=out,
                impl=self.impl,
            )
        return out

    def _select(
        self,
        batch: TileBatch,
        program: SelectAndAttend,
        q: torch.Tensor,
        scaling: float,
        logit_cap: float,
    ) -> None:
        rows, tiles = len(batch.scores.values), batch.plan.rows.num_rows
        for start in range(0, tiles, rows):
            part = batch.plan.part(start, min(start + rows, tiles))
            scores = batch.scores.rows(part.rows.num_rows)
            tile_score(
                q,
                self._kv(program, part.rows.page_table),
                part,
                softmax=Softmax(scaling, logit_cap),
                pool=self.pool,
                out=scores,
                impl=self.impl,
            )
            select_topk(
                scores,
                part.rows,
                Lists(batch.indices, batch.counts, part.rows.request_slots),
                always=self.always,
                workspace=batch.topk,
                impl=self.impl,
            )

    def _kv(self, program: SelectAndAttend, page_table: torch.Tensor) -> KVView:
        return KVView(program.k_buffer, program.v_buffer, page_table, self.page_size)
