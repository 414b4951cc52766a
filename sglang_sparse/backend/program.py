# SPDX-License-Identifier: Apache-2.0
"""The layers axis at run time: one small program a layer, compiled once at start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparse.backend.probe import FidelityProbe
from sglang_sparse.backend.progressive import (
    Progression,
    ProgressiveBuffers,
    compile_progression,
)
from sglang_sparse.backend.scorers import ExactScorer, KeySketchScorer, PageScorer, Scorer
from sglang_sparse.backend.selection import SelectionBuffers, passes
from sglang_sparse.checks import refuse
from sglang_sparse.config import Role, SparseConfig
from sglang_sparse_kernels.attend import gathered_decode_attention
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.planes import KeySketch, PageCuboids
from sglang_sparse_kernels.records import Always, KVView, Lists, Softmax
from sglang_sparse_kernels.select import select_topk
from sglang_sparse_radix.pool import SparseMHATokenToKVPool


@dataclass(frozen=True)
class SelectAndAttend:
    """Score the units, select the best, attend to those and to the tail.

    Attributes:
        scorer: bound to this layer's planes; None if another layer writes the lists.
        dense: it selects for later layers alone; :meth:`run` computes no attention.
        indices, counts: the lists this layer writes and reads.
        head_map: int32 [kv_heads], the list that each KV head reads; its own if None.
        layer: its global id.
        probe: compares with dense attention, or None.
        progression: selects and attends until a share of the mass is reached; None for a budget of
            tokens.
        k_buffer, v_buffer: [slots, kv_heads, head_dim] of this layer.
    """

    scorer: Scorer | None
    dense: bool
    indices: torch.Tensor
    counts: torch.Tensor
    head_map: torch.Tensor | None
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    buffers: SelectionBuffers
    unit: int
    always: Always
    page_size: int
    impl: Impl
    layer: int
    probe: FidelityProbe | None
    progression: Progression | None = None

    @property
    def role(self) -> str:
        """What layers with this program are called in metrics."""
        if self.scorer is None:
            return "reuse"
        return "dense_select" if self.dense else "select"

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
            [rows, q_heads, head_dim], dtype of ``q``; undefined if :attr:`dense`.
        """
        out = torch.empty_like(q)
        softmax, impl = Softmax(scaling, logit_cap), self.impl
        for run, rows in passes(plan, self.buffers.limits.rows_a_pass):
            kv = KVView(self.k_buffer, self.v_buffer, rows.page_table, self.page_size)
            lists = Lists(
                self.indices, self.counts, self.buffers.list_rows(rows), self.unit, self.head_map
            )
            if self.scorer is not None:
                scores = self.buffers.scores.rows(rows.num_rows)
                self.scorer.score(q[run], kv, rows, scores, softmax=softmax)
                if self.progression is None:
                    workspace = self.buffers.topk
                    select_topk(
                        scores, rows, lists, always=self.always, workspace=workspace, impl=impl
                    )
                else:
                    written = None if self.dense else out[run]
                    epsilons = self.progression.shared.epsilons[run]
                    self.progression.run(
                        q[run], kv, rows, lists, self.buffers, written, epsilons, softmax=softmax
                    )
            if self.dense:
                continue
            if self.progression is None:
                gathered_decode_attention(
                    q[run],
                    kv,
                    rows,
                    lists,
                    softmax=softmax,
                    out=out[run],
                    workspace=self.buffers.attention,
                    impl=impl,
                )
            if self.probe is not None:
                self.probe.observe(self.layer, q[run], kv, rows, lists, out[run], softmax=softmax)
        return out


def selecting_layers(config: SparseConfig, first: int, last: int) -> list[int]:
    """Global ids of the layers in [first, last) that select."""
    return [layer for layer in range(first, last) if config.layers.role(layer).selects]


def compile_programs(
    config: SparseConfig,
    pool: SparseMHATokenToKVPool,
    buffers: SelectionBuffers,
    layers: list[int],
    request_slots: int,
    first_head: int,
    impl: Impl,
    probe: FidelityProbe | None,
    progressive: ProgressiveBuffers | None = None,
) -> dict[int, SelectAndAttend]:
    """One program for each layer that selects or attends to a selection, by global layer id.

    Args:
        config: the resolved configuration.
        pool: the KV pool with the planes that the config reads.
        buffers: lists, scores and workspace.
        layers: global ids of the selecting layers (:func:`selecting_layers`).
        request_slots: rows of per-request state.
        first_head: global id of this rank's first KV head.
        impl: kernels or their references.
        probe: see :mod:`sglang_sparse.backend.probe`.
        progressive: what layers share under a budget of mass, else None.

    Raises:
        ConfigError: a layer attends to the selection of one that another process runs.
    """
    programs = {}
    for layer in range(pool.start_layer, pool.end_layer):
        role = config.layers.role(layer)
        if not role.selects and role.source is None:
            continue
        writer = layer if role.selects else role.source
        if writer not in layers:
            raise refuse(
                "--pipeline-parallel-size",
                f"a stage from layer {pool.start_layer}",
                f"stages that start with an anchor, as layer {layer} reuses layer {writer}",
                "drop it, or cut the stages (SGLANG_PP_LAYER_PARTITION) before anchors",
            )
        indices, counts = buffers.lists_of(layers.index(writer))
        local = layer - pool.start_layer
        programs[layer] = SelectAndAttend(
            scorer=_scorer(config, pool, buffers, layer, request_slots, impl)
            if role.selects
            else None,
            dense=role.source is None,
            indices=indices,
            counts=counts,
            head_map=_head_map(role, buffers, first_head, pool),
            k_buffer=pool.k_buffer[local],
            v_buffer=pool.v_buffer[local],
            buffers=buffers,
            unit=config.unit,
            always=Always(config.sink_tokens, config.recent_tokens),
            page_size=pool.page_size,
            impl=impl,
            layer=layer,
            probe=probe,
            progression=None
            if progressive is None or not role.selects
            else compile_progression(config, pool, buffers, progressive, layers, layer, impl),
        )
    return programs


def _head_map(
    role: Role, buffers: SelectionBuffers, first_head: int, pool: SparseMHATokenToKVPool
) -> torch.Tensor | None:
    """int32 [kv_heads] of this rank, or None if each head reads its own list."""
    heads = range(pool.head_num)
    if buffers.limits.lists == 1:
        taken = [0 for _ in heads]
    elif role.heads is None:
        return None
    else:
        # No map crosses ranks: check_head_maps refused that before any weight was loaded.
        taken = [role.heads[first_head + head] - first_head for head in heads]
    return torch.tensor(taken, dtype=torch.int32, device=pool.device)


def _scorer(
    config: SparseConfig,
    pool: SparseMHATokenToKVPool,
    buffers: SelectionBuffers,
    layer: int,
    request_slots: int,
    impl: Impl,
) -> Scorer:
    score, planes = config.score, pool.planes
    if score.kind == "exact":
        return ExactScorer(
            pool=score.pool,
            workspace=buffers.exact,
            impl=impl,
        )
    plane = pool.plane_of(layer)
    if score.kind == "key_sketch":
        assert planes.key_sketch is not None
        shape = (request_slots, pool.head_num, score.channels)
        scale = planes.key_sketch_scale
        return KeySketchScorer(
            sketch=KeySketch(
                planes.key_sketch[plane], None if scale is None else scale[plane], pool.page_size
            ),
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
        pages=PageCuboids(low[plane], high[plane], score.logical_page, pool.page_size),
        reduce=score.reduce,
        impl=impl,
    )
