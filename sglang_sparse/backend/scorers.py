# SPDX-License-Identifier: Apache-2.0
"""The score axis at run time: one object a layer, its planes and state bound at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_sparse_kernels.common import Impl, Reduce
from sglang_sparse_kernels.exact import ExactWorkspace, Pool, exact_score
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.planes import KeySketch, PageCuboids
from sglang_sparse_kernels.records import KVView, Scores, Softmax
from sglang_sparse_kernels.score import page_minmax_score, sketch_score


class Scorer(Protocol):
    """Scores the selection units of one layer."""

    def state_bytes(self) -> int:
        """Device bytes of what it keeps per request, planes aside."""

    def score(
        self,
        q: torch.Tensor,
        kv: KVView,
        plan: DecodePlan,
        out: Scores,
        *,
        softmax: Softmax,
    ) -> None:
        """Write fp32 scores of the rows that reselect at this step.

        Args:
            q: [rows, q_heads, head_dim], after RoPE.
            kv: this layer's KV rows, as the batch finds them.
            plan: the batch's plan, same rows.
            out: of the same rows.
            softmax: scale and cap of the logits.
        """


@dataclass(frozen=True)
class PageScorer:
    """Largest q.k over a cuboid of each logical page: its bounds, or its cuboid-mean digest.

    Attributes:
        pages: the cuboids of this layer's logical pages.
        reduce: how the query heads of a group are joined.
    """

    pages: PageCuboids
    reduce: Reduce
    impl: Impl

    def state_bytes(self) -> int:
        return 0

    def score(
        self,
        q: torch.Tensor,
        kv: KVView,
        plan: DecodePlan,
        out: Scores,
        *,
        softmax: Softmax,
    ) -> None:
        page_minmax_score(q, self.pages, plan, reduce=self.reduce, out=out, impl=self.impl)


@dataclass(frozen=True)
class KeySketchScorer:
    """Partial q.k over the channels where the group's queries are largest (SparCas, section 3.4).

    Attributes:
        sketch: this layer's.
        channels: int32 [request slots, kv_heads, D_b], the channels each request reads until its
            next refresh.
    """

    sketch: KeySketch
    channels: torch.Tensor
    reduce: Reduce
    impl: Impl

    def state_bytes(self) -> int:
        return self.channels.nbytes

    def score(
        self,
        q: torch.Tensor,
        kv: KVView,
        plan: DecodePlan,
        out: Scores,
        *,
        softmax: Softmax,
    ) -> None:
        sketch_score(
            q,
            self.channels,
            self.sketch,
            plan,
            choose_channels=True,
            reduce=self.reduce,
            out=out,
            impl=self.impl,
        )


@dataclass(frozen=True)
class ExactScorer:
    """Attention probability, pooled after the softmax (Kascade, section 3.4).

    Attributes:
        pool: the query heads that share a list.
        workspace: scratch that all layers share; None for the PyTorch implementation.
    """

    pool: Pool
    workspace: ExactWorkspace | None
    impl: Impl

    def state_bytes(self) -> int:
        return 0

    def score(
        self,
        q: torch.Tensor,
        kv: KVView,
        plan: DecodePlan,
        out: Scores,
        *,
        softmax: Softmax,
    ) -> None:
        exact_score(
            q,
            kv,
            plan,
            softmax=softmax,
            pool=self.pool,
            out=out,
            workspace=self.workspace,
            impl=self.impl,
        )
