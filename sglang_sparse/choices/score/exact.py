# SPDX-License-Identifier: Apache-2.0
"""Score `exact`: attention probability, pooled after the softmax.

Kascade (arXiv 2512.16391), section 3.4. It reads every key, so it pays off where a few layers
select for many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sglang_sparse.choices.interfaces import ScoreChoice

if TYPE_CHECKING:
    from sglang_sparse.choices.build import Build
    from sglang_sparse_kernels.step import Stage


class Exact(ScoreChoice):
    """Attention probability itself, added up after the softmax (Kascade, section 3.4)."""

    kind: Literal["exact"] = "exact"
    pool: Literal["group", "heads"] = Field(
        default="group",
        description="Query heads that share a list: those of one KV head, or all of a layer.",
    )

    @property
    def tile_pool(self) -> Literal["group", "heads"]:
        return self.pool

    @property
    def unit(self) -> int:
        return 1

    def lists(self, kv_heads: int) -> int:
        return 1 if self.pool == "heads" else kv_heads

    def scratch(self, group: int) -> int:
        return group

    def build(self, build: Build) -> ExactRun:
        return ExactRun(self, build)


class ExactRun:
    """Scores with the keys themselves; the logits of one pass are scratch that layers share."""

    def __init__(self, choice: Exact, build: Build) -> None:
        from sglang_sparse_kernels.exact import make_exact_workspace
        from sglang_sparse_kernels.step import selecting_queries

        self._choice, self._build = choice, build
        limits = build.limits
        selecting = selecting_queries(limits.queries, build.query_heads // build.pool.head_num)
        self._workspace = None
        if build.impl == "triton":
            self._workspace = build.scratch(
                make_exact_workspace(
                    limits.rows_a_pass,
                    len(selecting) * build.query_heads,
                    build.pool.head_num,
                    limits.max_units,
                    build.device,
                )
            )

    def stage(self, layer: int) -> Stage:
        from sglang_sparse_kernels.step import ExactScore

        return ExactScore(self._choice.pool, self._build.scores_of(layer), self._workspace)
