# SPDX-License-Identifier: Apache-2.0
"""The budget `mass` at run time: rank what was scored, attend until the share is reached."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang_sparse.backend.selection import SelectionBuffers
from sglang_sparse.backend.telemetry import LayerCounters
from sglang_sparse.config import MassBudget, SparseConfig
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.progressive import (
    COUNTERS,
    make_progressive_workspace,
    num_items,
    progressive_decode_attention,
    progressive_row_bytes,
    rank_units,
    remaining_bounds,
)
from sglang_sparse_kernels.score import page_bounds
from sglang_sparse_kernels.select import select_topk
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

# Partial results of one pass over the rows; longer batches take several passes.
_WORKSPACE_BYTES = 256 << 20
# Microbatches expected of request slots that no request has used yet.
_EXPECTED_AT_FIRST = 8


def most_rows(
    config: SparseConfig,
    capacity_units: int,
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
) -> int | None:
    """Rows that one pass can attend to progressively; None for a budget that is not `mass`."""
    budget = config.budget
    if not isinstance(budget, MassBudget):
        return None
    items = num_items(capacity_units, config.unit, budget.microbatch)
    row = progressive_row_bytes(query_heads, kv_heads, head_dim, items)
    return max(1, _WORKSPACE_BYTES // row)


class ProgressiveBuffers:
    """What all layers share: scratch lists, the workspace, bounds, and the counters.

    Attributes:
        picked: int32 [rows_a_pass, kv_heads, capacity_units], selected units before ranking.
        picked_counts: int32 [rows_a_pass, kv_heads].
        ranked: int32, as ``SelectionBuffers.counts``: how many units each list ranks.
        bounds: fp32 [rows_a_pass, kv_heads, group, max_units], or None.
        rest: fp32 [rows_a_pass, kv_heads, group, looks], or None.
        counters: what each layer reached.
        epsilons: fp32 [request_slots], the share that each row of the batch is to reach.
        expected: int32 [layers, request_slots, kv_heads], microbatches that each KV head took in
            its last step, and so what the next one attends to at first. It decides time alone, so a
            request may find there what the slot's former owner took.
    """

    def __init__(
        self,
        budget: MassBudget,
        buffers: SelectionBuffers,
        *,
        unit: int,
        layers: list[int],
        query_heads: int,
        head_dim: int,
        request_slots: int,
    ) -> None:
        """Allocate for the limits of ``buffers``; ``layers`` are global ids of selecting layers."""
        limits, device = buffers.limits, buffers.indices.device
        rows, kv_heads = limits.rows_a_pass, buffers.indices.shape[2]
        shape = (rows, kv_heads, limits.capacity_units)
        self.picked = torch.zeros(shape, dtype=torch.int32, device=device)
        self.picked_counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.ranked = torch.zeros_like(buffers.counts)
        items = num_items(limits.capacity_units, unit, budget.microbatch)
        self.workspace = make_progressive_workspace(
            rows, query_heads, kv_heads, head_dim, items, device
        )
        self.bounds: torch.Tensor | None = None
        self.rest: torch.Tensor | None = None
        if budget.estimator != "observed_min":
            heads = (rows, kv_heads, query_heads // kv_heads)
            looks = -(-limits.capacity_units * unit // budget.microbatch) + 1
            self.bounds = torch.empty((*heads, limits.max_units), device=device)
            self.rest = torch.empty((*heads, looks), device=device)
        self.counters = LayerCounters(COUNTERS, layers, device)
        self.own_rows = torch.arange(rows, dtype=torch.int32, device=device)
        self.epsilons = torch.full((request_slots,), budget.epsilon, device=device)
        expected = (len(layers), request_slots, kv_heads)
        self.expected = torch.full(expected, _EXPECTED_AT_FIRST, dtype=torch.int32, device=device)

    def plan(self, epsilons: torch.Tensor, slots: torch.Tensor) -> None:
        """Take the batch's shares from those of all requests.

        Args:
            epsilons: fp32 [request_slots], by request slot.
            slots: int64 [rows], the batch's request slots.
        """
        torch.index_select(epsilons, 0, slots, out=self.epsilons[: len(slots)])

    def report(self) -> dict[str, dict[str, int]]:
        """Sums since the start, by layer and by the names of ``COUNTERS``; waits for the device."""
        return {str(layer): sums for layer, sums in self.counters.read().items()}

    def nbytes(self) -> int:
        """Device bytes of all buffers."""
        tensors = (
            self.picked,
            self.picked_counts,
            self.ranked,
            self.epsilons,
            self.expected,
            self.bounds,
            self.rest,
        )
        return self.workspace.nbytes() + sum(t.nbytes for t in tensors if t is not None)


@dataclass(frozen=True)
class Progression:
    """Ranks and attends for one layer.

    Attributes:
        indices, reached: the lists this layer writes: units in the order of their rank, and how
            many were attended to. Layers that reuse the selection read them as any other list.
        ranked: how many units each list ranks; kept across steps with ``indices``.
        low, high: ends of this layer's pages that the estimator bounds what is left by; None for
            `observed_min`.
        counters: int64, this layer's row.
        expected: int32 [request_slots, kv_heads], this layer's.
    """

    budget: MassBudget
    shared: ProgressiveBuffers
    indices: torch.Tensor
    reached: torch.Tensor
    ranked: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    low: torch.Tensor | None
    high: torch.Tensor | None
    counters: torch.Tensor
    expected: torch.Tensor
    unit: int
    sink: int
    recent: int
    page_size: int
    impl: Impl

    def run(
        self,
        q: torch.Tensor,
        rows: DecodePlan,
        lists: DecodePlan,
        buffers: SelectionBuffers,
        out: torch.Tensor,
        epsilons: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
    ) -> None:
        """Attend to what ``buffers.scores`` rank first, until the share is reached.

        Args:
            q: [rows, q_heads, head_dim].
            rows: the batch's plan, its ``list_rows`` naming request slots.
            lists: the same, its ``list_rows`` naming rows of ``indices``.
            buffers: scores of this layer, block maxima in the top-k workspace.
            out: [rows, q_heads, head_dim], written.
            epsilons: fp32 [rows], the share that each row is to reach.
            scaling: factor on q.k.
            logit_cap: soft cap on logits, 0 for none.
        """
        count, shared = rows.num_rows, self.shared
        scores = buffers.scores[:count]
        picked = shared.picked[:count]
        always = {"unit": self.unit, "sink": self.sink, "recent": self.recent}
        select_topk(
            scores,
            replace(rows, list_rows=shared.own_rows[:count]),
            out_indices=picked,
            out_counts=shared.picked_counts[:count],
            workspace=buffers.topk.rows(count),
            has_block_max=True,
            impl=self.impl,
            **always,
        )
        rank_units(
            scores,
            lists,
            picked,
            out_indices=self.indices,
            out_counts=self.ranked,
            impl=self.impl,
            **always,
        )
        progressive_decode_attention(
            q,
            self.k_buffer,
            self.v_buffer,
            lists,
            self.indices,
            self.ranked,
            self.reached,
            page_size=self.page_size,
            microbatch=self.budget.microbatch,
            epsilons=epsilons,
            share=self.budget.share,
            rest_bounds=self._rest_bounds(q, scores, lists, scaling, logit_cap),
            sm_scale=scaling,
            logit_cap=logit_cap,
            out=out,
            counters=self.counters,
            expected=self.expected,
            expected_rows=rows.list_rows,
            workspace=shared.workspace,
            impl=self.impl,
            **always,
        )

    def _rest_bounds(
        self,
        q: torch.Tensor,
        scores: torch.Tensor,
        lists: DecodePlan,
        scaling: float,
        logit_cap: float,
    ) -> torch.Tensor | None:
        if self.low is None or self.high is None:
            return None
        assert self.shared.bounds is not None
        assert self.shared.rest is not None
        bounds, rest = self.shared.bounds[: len(q)], self.shared.rest[: len(q)]
        page_bounds(
            q,
            self.low,
            self.high,
            lists,
            unit=self.unit,
            page_size=self.page_size,
            out=bounds,
            impl=self.impl,
        )
        remaining_bounds(
            bounds,
            scores,
            lists,
            self.indices,
            self.ranked,
            unit=self.unit,
            sink=self.sink,
            recent=self.recent,
            microbatch=self.budget.microbatch,
            sm_scale=scaling,
            logit_cap=logit_cap,
            lowered=self.budget.margin,
            out=rest,
            impl=self.impl,
        )
        return rest


def _estimator_planes(
    config: SparseConfig, pool: SparseMHATokenToKVPool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both ends of every layer's pages that the estimator reads; None where it reads none."""
    assert isinstance(config.budget, MassBudget)
    planes, estimator = pool.planes, config.budget.estimator
    if estimator == "observed_min":
        return None, None
    if estimator == "scored" and config.score.kind == "page_mean":
        return planes.page_mean_low, planes.page_mean_high
    return planes.page_min, planes.page_max


def compile_progression(
    config: SparseConfig,
    pool: SparseMHATokenToKVPool,
    buffers: SelectionBuffers,
    shared: ProgressiveBuffers,
    layers: list[int],
    layer: int,
    impl: Impl,
) -> Progression:
    """What ``layer`` runs instead of a fixed selection.

    Args:
        config: the resolved configuration, its budget `mass`.
        pool: the KV pool with the planes that the config reads.
        buffers: lists and scores.
        shared: what all layers share.
        layers: global ids of the selecting layers.
        layer: the layer's global id, one of them.
        impl: kernels or their references.
    """
    assert isinstance(config.budget, MassBudget)
    position, local = layers.index(layer), layer - pool.start_layer
    indices, reached = buffers.lists_of(position)
    low, high = _estimator_planes(config, pool)
    return Progression(
        budget=config.budget,
        shared=shared,
        indices=indices,
        reached=reached,
        ranked=shared.ranked[position % len(shared.ranked)],
        k_buffer=pool.k_buffer[local],
        v_buffer=pool.v_buffer[local],
        low=None if low is None else low[pool.plane_of(layer)],
        high=None if high is None else high[pool.plane_of(layer)],
        counters=shared.counters.row(layer),
        expected=shared.expected[position],
        unit=config.unit,
        sink=config.sink_tokens,
        recent=config.recent_tokens,
        page_size=pool.page_size,
        impl=impl,
    )
