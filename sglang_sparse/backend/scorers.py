# SPDX-License-Identifier: Apache-2.0
"""The score axis at run time: one object a layer, its planes and state bound at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_sparse_kernels.common import Impl, Reduce
from sglang_sparse_kernels.exact import ExactWorkspace, Pool, exact_score
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.score import page_minmax_score, sketch_score


class Scorer(Protocol):
    """Scores the selection units of one layer."""

    def state_bytes(self) -> int:
        """Device bytes of what it keeps per request, planes aside."""

    def score(
        self,
        q: torch.Tensor,
        plan: DecodePlan,
        out: torch.Tensor,
        block_max: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
    ) -> None:
        """Write fp32 scores of the rows that reselect at this step.

        Args:
            q: [rows, q_heads, head_dim], after RoPE.
            plan: the batch's plan, same rows; its ``list_rows`` are request slots.
            out: fp32 [rows, lists, units].
            block_max: fp32 [rows, lists, blocks], for the top-k that follows.
            scaling: factor on q.k.
            logit_cap: soft cap on logits, 0 for none.
        """


@dataclass(frozen=True)
class PageScorer:
    """Largest q.k over a cuboid of each logical page: its bounds, or its cuboid-mean digest.

    Attributes:
        low, high: [logical pages, kv_heads, head_dim] of this layer, ends of the cuboids.
        unit: tokens a logical page.
        reduce: how the query heads of a group are joined.
    """

    low: torch.Tensor
    high: torch.Tensor
    unit: int
    page_size: int
    reduce: Reduce
    impl: Impl

    def state_bytes(self) -> int:
        return 0

    def score(
        self,
        q: torch.Tensor,
        plan: DecodePlan,
        out: torch.Tensor,
        block_max: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
    ) -> None:
        page_minmax_score(
            q,
            self.low,
            self.high,
            plan,
            unit=self.unit,
            page_size=self.page_size,
            reduce=self.reduce,
            out=out,
            block_max=block_max,
            impl=self.impl,
        )


@dataclass(frozen=True)
class KeySketchScorer:
    """Partial q.k over the channels where the group's queries are largest (SparCas, section 3.4).

    Attributes:
        key_sketch: [runs, kv_heads, head_dim, tokens a run] of this layer.
        scale: fp32 [pages, kv_heads, page_size] for sketches of integers, else None.
        channels: int32 [request slots, kv_heads, D_b], the channels each request reads until its
            next refresh.
    """

    key_sketch: torch.Tensor
    scale: torch.Tensor | None
    channels: torch.Tensor
    page_size: int
    reduce: Reduce
    impl: Impl

    def state_bytes(self) -> int:
        return self.channels.nbytes

    def score(
        self,
        q: torch.Tensor,
        plan: DecodePlan,
        out: torch.Tensor,
        block_max: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
    ) -> None:
        sketch_score(
            q,
            self.channels,
            self.key_sketch,
            self.scale,
            plan,
            choose_channels=True,
            page_size=self.page_size,
            reduce=self.reduce,
            out=out,
            block_max=block_max,
            impl=self.impl,
        )


@dataclass(frozen=True)
class ExactScorer:
    """Attention probability, pooled after the softmax (Kascade, section 3.4).

    Attributes:
        k_buffer: [slots, kv_heads, head_dim] of this layer.
        pool: the query heads that share a list.
        workspace: scratch that all layers share; None for the PyTorch implementation.
    """

    k_buffer: torch.Tensor
    page_size: int
    pool: Pool
    workspace: ExactWorkspace | None
    impl: Impl

    def state_bytes(self) -> int:
        return 0

    def score(
        self,
        q: torch.Tensor,
        plan: DecodePlan,
        out: torch.Tensor,
        block_max: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
    ) -> None:
        exact_score(
            q,
            self.k_buffer,
            plan,
            page_size=self.page_size,
            sm_scale=scaling,
            logit_cap=logit_cap,
            pool=self.pool,
            out=out,
            block_max=block_max,
            workspace=self.workspace,
            impl=self.impl,
        )
