# SPDX-License-Identifier: Apache-2.0
"""Prompts of LServe's preset, run by what a server compiles of it, and their checks."""

from dataclasses import replace
from typing import Any

import torch
from cases import Shape
from lserve_cases import (
    DEVICE,
    PRESET,
    check_scores,
    config_of,
    halves,
    head_error,
    heads_of,
    programs_of,
    random_pool,
    random_queries,
)

from sglang_sparse.backend.allocate import allocate
from sglang_sparse.choices.build import Columns
from sglang_sparse_kernels import (
    KVScales,
    Lists,
    TilePlan,
    page_minmax_score,
    select_topk,
    tile_attention,
    tile_mean,
)

PROMPT: dict[str, Any] = {"kind": PRESET.prefill.kind, "floor": PRESET.prefill.floor}
CHECKED_TOKENS = 4001
CHECKED_PROMPT = {"min_tokens": 1500, "fraction": 0.1, "floor": 1024}


class PromptCase:
    """The tokens of one prompt behind its first ``prefix`` ones, in one batch of tiles."""

    def __init__(self, shape: Shape, prefix: int = 0) -> None:
        self.shape, self.prefix = shape, prefix
        s, self.new = shape, shape.context - prefix
        self.config = config = config_of(halves(1), prefill=PROMPT | CHECKED_PROMPT)
        device, pages = torch.device(DEVICE), -(-s.context // s.page_size)
        self.pool = random_pool(config, s, pages, 1)
        self.q = random_queries(s, self.new)
        self.out = torch.empty_like(self.q)
        self.table = (torch.randperm(pages, device=device) + 1).int()[None]
        self.build = allocate(
            config, self.pool, heads_of(s), Columns(2, device), max_context=pages * s.page_size,
            impl="triton",
        )  # fmt: skip
        (self.program,) = programs_of(self.build, config, s)

    def prompt(self, **changes: Any) -> None:
        """Plan the prompt under a prefill with some keys changed."""
        config = config_of(halves(1), prefill=PROMPT | changes)
        programs = {0: self.program}
        run = config.prefill.build(self.build, config.score, programs)
        assert run is not None
        self.prefill: Any = run
        self.batch = run.plan(self.table, [self.prefix], [self.new], [])
        if self.batch is None:
            least = config.prefill.min_tokens
            raise ValueError(
                f"a prompt of {self.shape.context} tokens: tiles select behind {least}"
            )
        plan = self.plan
        assert len(self.batch.scores.values) >= plan.rows.num_rows, "scores take one pass"
        tiles = plan.rows.num_rows
        self.means = torch.empty((tiles, *self.q.shape[1:]), dtype=self.q.dtype, device=DEVICE)
        self.lists = Lists(
            self.batch.indices, self.batch.counts, plan.rows.request_slots, config.unit,
            windows=self.program.windows,
        )  # fmt: skip
        unread = self.build.kinds.unread.get(0)
        self.scores = replace(self.batch.scores.rows(tiles), unread=unread)

    @property
    def plan(self) -> TilePlan:
        """The prompt's tiles."""
        return self.batch.plan

    def served(self) -> torch.Tensor:
        """The whole layer, as a server runs it."""
        return self.prefill.run(self.batch, 0, self.q, self.shape.softmax, KVScales())

    def update(self) -> None:
        """Bounds of all pages of the prompt; a batch alone would leave out those of the prefix."""
        spans = self.batch.spans
        self.pool.update_planes(
            spans.page_table,
            torch.zeros_like(spans.prefix),
            spans.end,
            max_new_tokens=spans.longest,
        )

    def mean(self, impl: Any = "triton") -> None:
        """Mean query of every tile."""
        tile_mean(self.q, self.plan, out=self.means, impl=impl)

    def score(self, impl: Any = "triton") -> None:
        """Scores of the units before every tile."""
        choice: Any = self.config.score
        page_minmax_score(
            self.means, self.build.cuboids(0, choice.cuboids(bound=False)), self.plan.rows,
            unit=self.config.unit, reduce=choice.reduce, out=self.scores, impl=impl,
        )  # fmt: skip

    def select(self, impl: Any = "triton") -> None:
        """Lists of every tile."""
        select_topk(
            self.scores, self.plan.rows, replace(self.lists, windows=None),
            always=replace(self.build.always, recent=max(1, self.build.always.recent)),
            workspace=self.batch.topk.rows(self.plan.rows.num_rows), impl=impl,
        )  # fmt: skip

    def attend(self, impl: Any = "triton") -> None:
        """Attention to lists, windows and the tiles themselves."""
        kv = self.program.kv(self.plan.rows.page_table, self.shape.page_size, KVScales())
        tile_attention(
            self.q, kv, self.plan, self.lists, softmax=self.shape.softmax, out=self.out, impl=impl
        )

    def check(self) -> dict[str, float]:
        """Errors of every operator, and that a server's prompt gives the same bits as they do.

        Raises:
            AssertionError: one is wrong.
        """
        self.prompt(**CHECKED_PROMPT)
        for filled in (self.scores.values, self.means, self.out):
            filled.fill_(torch.nan)
        self.lists.indices.fill_(-1)
        for operator in (self.update, self.mean, self.score, self.select, self.attend):
            operator()
        means, scores, out = self.means.clone(), self.scores.values.clone(), self.out.clone()
        lists, counts = self.lists.indices.clone(), self.lists.counts.clone()
        self.mean("torch")
        torch.testing.assert_close(means, self.means, rtol=2**-7, atol=1e-5)
        self.means.copy_(means)
        self.scores.values.fill_(torch.nan)
        self.score("torch")
        rows, read = self.plan.rows, len(self.scores.read)
        units = int((-(-rows.tail_start // self.config.unit) * (rows.k_units > 0)).sum())
        errors = {"score": check_scores(scores, self.scores.values, units * read)}
        self.scores.values.copy_(scores)
        self.select("torch")
        assert torch.equal(self.lists.counts, counts), "select_topk: counts"
        listed = torch.arange(lists.shape[2], device=DEVICE) < counts[..., None]
        assert torch.equal(self.lists.indices[listed], lists[listed]), "select_topk: units"
        self.attend("torch")
        errors["attend"] = head_error(out, self.out)
        assert torch.equal(self.served(), out), "a served prompt differs from its operators"
        return errors

    def flops(self) -> dict[str, float]:
        """Operations of products over the pages that are scored and the keys attended to."""
        s, rows = self.shape, self.plan.rows
        first, end, tail = (x.double() for x in (rows.update_start, rows.seq_lens, rows.tail_start))
        queries, within = end - first, (end - first + 1) / 2
        listed = (rows.k_units * self.config.unit).double().clamp(max=tail)
        streams = len(self.config.heads.streams_in(0))
        window = end.clamp(max=sum(self.config.heads.window))
        sparse = (s.heads - streams) * (listed + within) + streams * window
        keys = torch.where(tail > 0, sparse, s.heads * (first + within))
        pages = float(tail.sum()) / self.config.score.logical_page
        product = 4 * s.group * s.dim
        return {
            "score": pages * (s.heads - streams) * product,
            "attend": float((queries * keys).sum()) * product,
        }
