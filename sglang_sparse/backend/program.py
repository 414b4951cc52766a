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
    sink: int
    recent: int
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
        for run, rows in passes(plan, self.buffers.limits.rows_a_pass):
            lists = self.buffers.list_plan(rows)
            if self.scorer is not None:
                self._score(self.scorer, q[run], rows, scaling, logit_cap)
                if self.progression is None:
                    self._select(lists)
                else:
                    self.progression.run(
                        q[run],
                        rows,
                        lists,
                        self.buffers,
                        out[run],
                        self.progression.shared.epsilons[run],
                        scaling=scaling,
                        logit_cap=logit_cap,
                    )
            if self.dense:
                continue
            if self.progression is None:
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
                    head_map=self.head_map,
                    out=out[run],
                    workspace=self.buffers.attention,
                    impl=self.impl,
                )
            if self.probe is not None:
                mapped = slice(None) if self.head_map is None else self.head_map.long()
                self.probe.observe(
                    self.layer,
                    q[run],
                    lists,
                    self.indices[:, mapped],
                    self.counts[:, mapped],
                    self.k_buffer,
                    self.v_buffer,
                    out[run],
                    unit=self.unit,
                    page_size=self.page_size,
                    scaling=scaling,
                    logit_cap=logit_cap,
                )
        return out

    def _score(
        self,
        scorer: Scorer,
        q: torch.Tensor,
        rows: DecodePlan,
        scaling: float,
        logit_cap: float,
    ) -> None:
        scores = self.buffers.scores[: rows.num_rows]
        block_max = self.buffers.topk.rows(rows.num_rows).block_max
        scorer.score(q, rows, scores, block_max, scaling=scaling, logit_cap=logit_cap)

    def _select(self, lists: DecodePlan) -> None:
        select_topk(
            self.buffers.scores[: lists.num_rows],
            lists,
            unit=self.unit,
            sink=self.sink,
            recent=self.recent,
            out_indices=self.indices,
            out_counts=self.counts,
            workspace=self.buffers.topk.rows(lists.num_rows),
            has_block_max=True,
            impl=self.impl,
        )


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
            sink=config.sink_tokens,
            recent=config.recent_tokens,
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
    if buffers.scores.shape[1] == 1:
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
            k_buffer=pool.k_buffer[layer - pool.start_layer],
            page_size=pool.page_size,
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
            key_sketch=planes.key_sketch[plane],
            scale=None if scale is None else scale[plane],
            channels=torch.zeros(shape, dtype=torch.int32, device=pool.device),
            page_size=pool.page_size,
            reduce=score.reduce,
            impl=impl,
        )
    low, high = planes.page_min, planes.page_max
    if score.kind == "page_mean":
        low, high = planes.page_mean_low, planes.page_mean_high
    assert low is not None
    assert high is not None
    return PageScorer(
        low=low[plane],
        high=high[plane],
        unit=score.logical_page,
        page_size=pool.page_size,
        reduce=score.reduce,
        impl=impl,
    )
