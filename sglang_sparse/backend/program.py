# SPDX-License-Identifier: Apache-2.0
"""The layers axis at run time: one small program a layer, compiled once at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_sparse.backend.probe import FidelityProbe
from sglang_sparse.backend.progressive import (
    Progression,
    ProgressiveBuffers,
    compile_progression,
)
from sglang_sparse.backend.scorers import KeySketchScorer, PageScorer, Scorer
from sglang_sparse.backend.selection import SelectionBuffers, passes
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.attend import gathered_decode_attention
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.select import select_topk
from sglang_sparse_radix.pool import SparseMHATokenToKVPool


@dataclass(frozen=True)
class SelectAndAttend:
    """Score the units, select the best, attend to those and to the tail.

    Attributes:
        role: what layers with this program are called in metrics.
        scorer: bound to this layer's planes.
        indices, counts: the lists this layer writes and reads.
        layer: its global id.
        probe: compares with dense attention, or None.
        progression: selects and attends until a share of the mass is reached; None for a budget of
            tokens.
        k_buffer, v_buffer: [slots, kv_heads, head_dim] of this layer.
    """

    role: ClassVar[str] = "select"

    scorer: Scorer
    indices: torch.Tensor
    counts: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    buffers: SelectionBuffers
    unit: int
    sink: int
    recent: int
    page_size: int
    impl: Impl
    layer: int
    probe: FidelityProbe | None
    progression: Progression | None = None

    def run(
        self, q: torch.Tensor, plan: DecodePlan, *, scaling: float, logit_cap: float
    ) -> torch.Tensor:
        """Attention output of one decode step.

        Args:
            q: [rows, q_heads, head_dim].
            plan: the batch's plan.
            scaling: factor on q.k.
            logit_cap: soft cap on logits, 0 for none.

        Returns:
            [rows, q_heads, head_dim], dtype of ``q``.
        """
        out = torch.empty_like(q)
        for run, rows in passes(plan, self.buffers.limits.rows_a_pass):
            scores = self.buffers.scores[: rows.num_rows]
            topk = self.buffers.topk.rows(rows.num_rows)
            lists = self.buffers.list_plan(rows)
            self.scorer.score(q[run], rows, scores, topk.block_max)
            if self.progression is not None:
                self.progression.run(
                    q[run],
                    rows,
                    lists,
                    self.buffers,
                    out[run],
                    scaling=scaling,
                    logit_cap=logit_cap,
                )
            else:
                select_topk(
                    scores,
                    lists,
                    unit=self.unit,
                    sink=self.sink,
                    recent=self.recent,
                    out_indices=self.indices,
                    out_counts=self.counts,
                    workspace=topk,
                    has_block_max=True,
                    impl=self.impl,
                )
                gathered_decode_attention(
                    q[run],
                    self.k_buffer,
                    self.v_buffer,
                    lists,
                    self.indices,
                    self.counts,
                    unit=self.unit,
                    page_size=self.page_size,
                    sm_scale=scaling,
                    logit_cap=logit_cap,
                    out=out[run],
                    workspace=self.buffers.attention,
                    impl=self.impl,
                )
            if self.probe is not None:
                self.probe.observe(
                    self.layer,
                    q[run],
                    lists,
                    self.indices,
                    self.counts,
                    self.k_buffer,
                    self.v_buffer,
                    out[run],
                    unit=self.unit,
                    page_size=self.page_size,
                    scaling=scaling,
                    logit_cap=logit_cap,
                )
        return out


def selecting_layers(config: SparseConfig, first: int, last: int) -> list[int]:
    """Global ids of the layers in [first, last) that select; the others run dense."""
    return [layer for layer in range(first, last) if config.layers.is_sparse(layer)]


def compile_programs(
    config: SparseConfig,
    pool: SparseMHATokenToKVPool,
    buffers: SelectionBuffers,
    layers: list[int],
    request_slots: int,
    impl: Impl,
    probe: FidelityProbe | None,
    progressive: ProgressiveBuffers | None = None,
) -> dict[int, SelectAndAttend]:
    """One program for each selecting layer, by global layer id.

    Args:
        config: the resolved configuration.
        pool: the KV pool with the planes that the config reads.
        buffers: lists, scores and workspace.
        layers: global ids of the selecting layers (:func:`selecting_layers`).
        request_slots: rows of per-request state.
        impl: kernels or their references.
        probe: see :mod:`sglang_sparse.backend.probe`.
        progressive: what layers share under a budget of mass, else None.
    """
    programs = {}
    for position, layer in enumerate(layers):
        indices, counts = buffers.lists_of(position)
        programs[layer] = SelectAndAttend(
            scorer=_scorer(config, pool, layer - pool.start_layer, request_slots, impl),
            indices=indices,
            counts=counts,
            k_buffer=pool.k_buffer[layer - pool.start_layer],
            v_buffer=pool.v_buffer[layer - pool.start_layer],
            buffers=buffers,
            unit=config.unit,
            sink=config.sink_tokens,
            recent=config.recent_tokens,
            page_size=pool.page_size,
            impl=impl,
            layer=layer,
            probe=probe,
            progression=None
            if progressive is None
            else compile_progression(config, pool, buffers, progressive, layers, layer, impl),
        )
    return programs


def _scorer(
    config: SparseConfig, pool: SparseMHATokenToKVPool, local: int, request_slots: int, impl: Impl
) -> Scorer:
    score, planes = config.score, pool.planes
    if score.kind == "key_sketch":
        assert planes.key_sketch is not None
        shape = (request_slots, pool.head_num, score.channels)
        scale = planes.key_sketch_scale
        return KeySketchScorer(
            key_sketch=planes.key_sketch[local],
            scale=None if scale is None else scale[local],
            channels=torch.zeros(shape, dtype=torch.int32, device=pool.device),
            reduce=score.reduce,
            impl=impl,
        )
    low, high = planes.page_min, planes.page_max
    if score.kind == "page_mean":
        low, high = planes.page_mean_low, planes.page_mean_high
    assert low is not None
    assert high is not None
    return PageScorer(
        low=low[local],
        high=high[local],
        unit=score.logical_page,
        page_size=pool.page_size,
        reduce=score.reduce,
        impl=impl,
    )
