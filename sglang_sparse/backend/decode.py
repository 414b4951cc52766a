# SPDX-License-Identifier: Apache-2.0
"""Decode batches: their plan, made once a step, and the stages that each layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_sparse.backend.counters import DecodeCounters
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.backend.verify import first_lengths, queries_of
from sglang_sparse.choices.build import Build, LayerProgram
from sglang_sparse.choices.interfaces import BudgetRun
from sglang_sparse.config import SparseConfig
from sglang_sparse.graph_variants import Variant
from sglang_sparse_kernels.attend import gathered_decode_attention
from sglang_sparse_kernels.plan import (
    DecodePlan,
    PlanRules,
    RequestState,
    TokenTable,
    plan_decode,
    snapshot_page_table,
)
from sglang_sparse_kernels.records import KVScales, KVView, Lists, Softmax
from sglang_sparse_kernels.step import StepContext, decode_step

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DecodeSteps:
    """Plans decode batches and runs the layers' programs.

    Attributes:
        plan: facts of the batch that is being run; of a verification, those of its first queries.
        queries: tokens that it runs for each request: 1, or the drafts of a verification and the
            token before them.
        planned: batches so far, by variant.
    """

    def __init__(
        self,
        config: SparseConfig,
        build: Build,
        budget: BudgetRun,
        programs: dict[int, LayerProgram],
        requests: RequestTable,
        req_to_token: torch.Tensor,
        counters: DecodeCounters | None,
    ) -> None:
        """``req_to_token`` is SGLang's table, int32 [request slots, max context]."""
        self._config, self._build, self._budget = config, build, budget
        self._programs, self._requests, self._counters = programs, requests, counters
        self._req_to_token = req_to_token
        self._state = RequestState(requests.decode_start, requests.budgets)
        self._rules = PlanRules(
            page_size=build.pool.page_size,
            unit=config.unit,
            capacity_units=build.limits.capacity_units,
            min_sparse_tokens=config.min_sparse_tokens,
            # A verification goes on by as many tokens as are accepted: no step is the C-th one.
            reselect_every=config.cadence.every if build.limits.queries == 1 else 1,
            refresh_every=config.score.refresh_steps if build.limits.queries == 1 else 1,
        )
        self._max_pages = -(-req_to_token.shape[1] // build.pool.page_size)
        self._eager = self._allocate(1)
        self._captured: DecodePlan | None = None
        self.plan = self._eager
        self.queries = 1
        self.planned: dict[Variant, int] = {"dense": 0, "sparse": 0}

    def _allocate(self, rows: int) -> DecodePlan:
        return DecodePlan.allocate(rows, self._max_pages, self._build.device)

    def allocate_for_graphs(self, max_rows: int) -> None:
        """Make the plan that captured graphs read."""
        self._captured = self._allocate(max_rows)

    def choose(self, forward_batch: ForwardBatch) -> Variant:
        """Whether any row of the batch is long enough to select."""
        lens = forward_batch.seq_lens_cpu
        if lens is not None and forward_batch.forward_mode.is_target_verify():
            lens = lens + 1
        # Without a host copy the sparse variant is right for any length, and never syncs.
        min_tokens = self._config.min_sparse_tokens
        short = lens is not None and self._requests.longest_sparse(lens) < min_tokens
        return "dense" if short or not self._programs else "sparse"

    def begin(self, variant: Variant) -> Variant:
        """Count a batch that is planned for ``variant``, and return that."""
        self.planned[variant] += 1
        return variant

    def plan_batch(self, forward_batch: ForwardBatch, *, graph: bool) -> None:
        """Fill the plan of a decode batch: one that captured graphs read, or an eager one."""
        rows, slots = forward_batch.batch_size, forward_batch.req_pool_indices
        if not graph and rows > self._eager.num_rows:
            self._eager = self._allocate(rows)
        buffers = self._captured if graph else self._eager
        assert buffers is not None
        self.plan = buffers.rows(rows)
        tokens = TokenTable(self._req_to_token, slots, first_lengths(forward_batch))
        self._plan(tokens, queries_of(forward_batch))

    def _plan(self, tokens: TokenTable, queries: int) -> None:
        """Fill the plan; ``tokens`` are those of each request's first query."""
        plan_decode(tokens, self._state, self._rules, plan=self.plan, impl=self._build.impl)
        self.queries = queries
        if self.queries > 1:
            # The plan is the first query's; the drafts behind it may lie in further pages.
            snapshot_page_table(
                replace(tokens, seq_lens=tokens.seq_lens + (self.queries - 1)),
                page_size=self._rules.page_size,
                out=self.plan.page_table,
                impl=self._build.impl,
            )
        self._budget.plan(tokens.request_slots)
        if self._counters is not None:
            self._counters.count(self.plan, self._requests.budgets)

    def end_layer(self, layer: int) -> None:
        """After a layer (global id) ran: behind the last one, bring all planes up to date."""
        if layer == self._build.pool.end_layer - 1:
            self.update_planes()

    def update_planes(self) -> None:
        """Bring the planes of all layers up to date with what the batch wrote."""
        plan, more = self.plan, self.queries - 1
        end = plan.seq_lens + more if more else plan.seq_lens
        self._build.pool.update_planes(
            plan.page_table, plan.update_start, end, max_new_tokens=self.queries
        )

    def run(
        self, program: LayerProgram, q: torch.Tensor, softmax: Softmax, kv_scales: KVScales
    ) -> torch.Tensor:
        """Run one layer's stages for the batch that was planned last.

        Args:
            program: the layer's.
            q: [rows * queries, q_heads, head_dim], after RoPE.
            softmax: how products become the layer's logits.
            kv_scales: of the layer's rows.

        Returns:
            As ``q``; empty if the layer attends to everything.
        """
        build = self._build
        out = torch.empty_like(q) if program.attends else q[:0]
        for rows, plan in passes(self.plan, build.limits.rows_a_pass):
            tokens = slice(rows.start * self.queries, rows.stop * self.queries)
            step = StepContext(
                q=q[tokens],
                kv=program.kv(plan.page_table, build.pool.page_size, kv_scales),
                plan=plan,
                lists=program.read(build.lists.rows_of(plan), build.unit),
                softmax=softmax,
                out=out[tokens],
                impl=build.impl,
                queries=self.queries,
                rows=rows,
            )
            decode_step(program.stages, step)
        return out

    def attend_to_all(
        self, layer: int, q: torch.Tensor, softmax: Softmax, kv_scales: KVScales
    ) -> torch.Tensor:
        """Attention of the batch that was planned last to all of its tokens, on a CPU.

        Args:
            layer: global id of one that attends to everything.
            q, softmax, kv_scales: as for :meth:`run`.

        Returns:
            As ``q``.
        """
        pool, out, plan = self._build.pool, torch.empty_like(q), self.plan.dense()
        k, v = pool.get_kv_buffer(layer)
        kv = KVView(k, v, plan.page_table, pool.page_size, kv_scales)
        none = torch.zeros((1, pool.head_num, 1), dtype=torch.int32, device=q.device)
        gathered_decode_attention(
            q, kv, plan, Lists(none, none[..., 0], plan.k_units),
            softmax=softmax, out=out, queries=self.queries, impl=self._build.impl,
        )  # fmt: skip
        return out

    def rehearse(self, rows: int, q: torch.Tensor, softmax: Softmax) -> None:
        """Launch, in a rehearsal, what a batch needs, for each kind of layer once.

        Args:
            rows: requests of the batch.
            q: [rows * queries, q_heads, head_dim], of any values.
            softmax: as layers have it.
        """
        kept = self.plan, self.queries
        slots = torch.zeros(rows, dtype=torch.int64, device=q.device)
        self.plan = self._allocate(rows)
        self._plan(TokenTable(self._req_to_token, slots, slots), len(q) // rows)
        if self._counters is not None:
            self._counters.count(self.plan, self._requests.budgets)
        for program in self._to_rehearse():
            self.run(program, q, softmax, KVScales())
        self.update_planes()
        self.plan, self.queries = kept

    def _to_rehearse(self) -> list[LayerProgram]:
        """A layer of each kind."""
        return list({program.kind: program for program in self._programs.values()}.values())

    def nbytes(self) -> int:
        """Device bytes of the plans' page tables."""
        plans = (self._eager, self._captured)
        return sum(plan.page_table.nbytes for plan in plans if plan is not None)


def passes(plan: DecodePlan, rows_a_pass: int) -> Iterator[tuple[slice, DecodePlan]]:
    """Cut a plan into runs of at most ``rows_a_pass`` rows; host arithmetic only."""
    if plan.num_rows <= rows_a_pass:
        yield slice(0, plan.num_rows), plan
        return
    for start in range(0, plan.num_rows, rows_a_pass):
        rows = slice(start, min(start + rows_a_pass, plan.num_rows))
        yield rows, plan.part(rows)
