# SPDX-License-Identifier: Apache-2.0
"""The budget `mass` at run time: rank what was scored, attend until the share is reached."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparse.backend.selection import SelectionBuffers
from sglang_sparse.backend.telemetry import LayerCounters
from sglang_sparse.config import MassBudget, SparseConfig
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.planes import PageCuboids
from sglang_sparse_kernels.progressive import (
    COUNTERS,
    MassStop,
    StopState,
    make_progressive_workspace,
    num_chunks,
    num_stop_checks,
    progressive_decode_attention,
    progressive_row_bytes,
    rank_units,
    residual_bounds,
)
from sglang_sparse_kernels.records import Always, KVView, Lists, Softmax
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
    chunks = num_chunks(capacity_units, config.unit, budget.microbatch)
    row = progressive_row_bytes(query_heads, kv_heads, head_dim, chunks)
    return max(1, _WORKSPACE_BYTES // row)


class ProgressiveBuffers:
    """What all layers share: scratch lists, the workspace, bounds, and the counters.

    Attributes:
        picked: int32 [rows_a_pass, kv_heads, capacity_units], selected units before ranking.
        picked_counts: int32 [rows_a_pass, kv_heads].
        ranked: int32, as ``SelectionBuffers.counts``: how many units each list ranks.
        bounds: fp32 [rows_a_pass, kv_heads, group, max_units], or None.
        rest: fp32 [rows_a_pass, kv_heads, group, stop checks], or None.
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
        sizes = (limits.capacity_units, unit, budget.microbatch)
        self.workspace = make_progressive_workspace(
            rows, query_heads, kv_heads, head_dim, num_chunks(*sizes), device
        )
        self.bounds: torch.Tensor | None = None
        self.rest: torch.Tensor | None = None
        if budget.estimator != "observed_min":
            heads = (rows, kv_heads, query_heads // kv_heads)
            self.bounds = torch.empty((*heads, limits.max_units), device=device)
            self.rest = torch.empty((*heads, num_stop_checks(*sizes)), device=device)
        self.counters = LayerCounters(COUNTERS, layers, device)
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
        pages: cuboids of this layer's pages that the estimator bounds what is left by; None for
            `observed_min`.
        counters: int64, this layer's row.
        expected: int32 [request_slots, kv_heads], this layer's.
    """

    budget: MassBudget
    shared: ProgressiveBuffers
    indices: torch.Tensor
    reached: torch.Tensor
    ranked: torch.Tensor
    pages: PageCuboids | None
    counters: torch.Tensor
    expected: torch.Tensor
    unit: int
    always: Always
    impl: Impl

    def run(
        self,
        q: torch.Tensor,
        kv: KVView,
        plan: DecodePlan,
        lists: Lists,
        buffers: SelectionBuffers,
        out: torch.Tensor | None,
        epsilons: torch.Tensor,
        *,
        softmax: Softmax,
    ) -> None:
        """Attend to what ``buffers.scores`` rank first, until the share is reached.

        Args:
            q: [rows, q_heads, head_dim].
            kv: this layer's KV rows, as the batch finds them.
            plan: the batch's plan.
            lists: those of this layer, as the batch finds them.
            buffers: scores of this layer.
            out: [rows, q_heads, head_dim], written; None if this layer attends to everything.
            epsilons: fp32 [rows], the share that each row is to reach.
            softmax: scale and cap of the logits.
        """
        count, shared, always, impl = plan.num_rows, self.shared, self.always, self.impl
        scores, picked = buffers.scores.rows(count), shared.picked[:count]
        own = Lists(picked, shared.picked_counts[:count], buffers.own_rows[:count], self.unit)
        select_topk(scores, plan, own, always=always, workspace=buffers.topk, impl=impl)
        ranking = Lists(self.indices, self.ranked, lists.rows, self.unit)
        rank_units(scores, plan, picked, ranking, always=always, impl=impl)
        residual = None
        if self.pages is not None:
            assert shared.bounds is not None
            assert shared.rest is not None
            bounds, residual = shared.bounds[:count], shared.rest[:count]
            page_bounds(q, self.pages, plan, out=bounds, impl=impl)
            residual_bounds(
                bounds,
                scores,
                plan,
                ranking,
                always=always,
                microbatch=self.budget.microbatch,
                softmax=softmax,
                margin=self.budget.margin,
                out=residual,
                impl=impl,
            )
        stop = MassStop(always, self.budget.microbatch, self.budget.share, epsilons, residual)
        progressive_decode_attention(
            q,
            kv,
            plan,
            ranking,
            stop,
            StopState(self.reached, self.expected, self.counters),
            softmax=softmax,
            out=out,
            workspace=shared.workspace,
            impl=impl,
        )


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
    position = layers.index(layer)
    indices, reached = buffers.lists_of(position)
    low, high = _estimator_planes(config, pool)
    pages, plane = None, pool.plane_of(layer) if low is not None else 0
    if low is not None and high is not None:
        pages = PageCuboids(low[plane], high[plane], config.unit, pool.page_size)
    return Progression(
        budget=config.budget,
        shared=shared,
        indices=indices,
        reached=reached,
        ranked=shared.ranked[position % len(shared.ranked)],
        pages=pages,
        counters=shared.counters.row(layer),
        expected=shared.expected[position],
        unit=config.unit,
        always=Always(config.sink_tokens, config.recent_tokens),
        impl=impl,
    )
