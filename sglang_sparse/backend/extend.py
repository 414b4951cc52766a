# SPDX-License-Identifier: Apache-2.0
"""Prefill batches: where their tokens lie, which positions they write, whether they are sparse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Build, LayerProgram
from sglang_sparse.choices.interfaces import PrefillRun
from sglang_sparse.graph_variants import Variant
from sglang_sparse_kernels.plan import TokenTable, snapshot_page_table
from sglang_sparse_kernels.records import KVScales, Softmax

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class ExtendSteps:
    """Plans prefill batches, and brings planes up to date with what they wrote.

    Attributes:
        page_table: int32 [requests, max_pages], pages of the batch that was planned last.
        batch: what the prefill choice planned, or None for a batch that attends to everything.
        planned: batches so far, by variant.
    """

    def __init__(
        self,
        build: Build,
        prefill: PrefillRun | None,
        requests: RequestTable,
        req_to_token: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """``req_to_token`` is SGLang's table, int32 [request slots, max context].

        ``dtype`` is that of queries.
        """
        self._build, self._prefill, self._requests = build, prefill, requests
        self._req_to_token = req_to_token
        self._max_pages = -(-req_to_token.shape[1] // build.pool.page_size)
        self._written: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None = None
        self.page_table = torch.empty(0, dtype=torch.int32)
        self.batch: Any = None
        self.planned: dict[Variant, int] = {"dense": 0, "sparse": 0}
        self._dtype = dtype

    def warm_up(self, softmax: Softmax) -> None:
        """Run every kernel of sparse prompts once, so that no prompt waits for the compiler.

        Args:
            softmax: as layers have it.
        """
        if self._prefill is not None:
            self._prefill.warm_up(self._max_pages, self._dtype, softmax)

    def rehearse(self, tokens: int, softmax: Softmax) -> None:
        """Launch, in a rehearsal, what every prefill batch needs, and what sparse ones need.

        Args:
            tokens: of the longest chunk of a prompt.
            softmax: as layers have it.
        """
        device = self._build.device
        table = torch.zeros((1, self._max_pages), dtype=torch.int32, device=device)
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        snapshot_page_table(
            TokenTable(self._req_to_token, slots, slots),
            page_size=self._build.pool.page_size,
            out=table,
            impl=self._build.impl,
        )
        self._rehearse_pool(table, tokens)
        self.warm_up(softmax)

    def _rehearse_pool(self, table: torch.Tensor, tokens: int) -> None:
        ends = torch.zeros(1, dtype=torch.int32, device=table.device)
        self._build.pool.update_planes(table, ends, ends, max_new_tokens=tokens)

    def plan_batch(self, forward_batch: ForwardBatch) -> None:
        """Note which positions the batch writes, start the decode clocks, and plan tiles."""
        build = self._build
        slots, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        page_table = torch.zeros(
            (slots.shape[0], self._max_pages), dtype=torch.int32, device=build.device
        )
        snapshot_page_table(
            TokenTable(self._req_to_token, slots, seq_lens),
            page_size=build.pool.page_size,
            out=page_table,
            impl=build.impl,
        )
        end = seq_lens.to(torch.int32)
        start = forward_batch.extend_prefix_lens.to(torch.int32)
        longest = max(forward_batch.extend_seq_lens_cpu, default=1)
        self.page_table = page_table
        self._written = (page_table, start, end, longest)
        self._requests.start_decoding(slots, end)
        self.batch = None
        if self._prefill is not None:
            self.batch = self._prefill.plan(
                page_table,
                forward_batch.extend_prefix_lens_cpu,
                forward_batch.extend_seq_lens_cpu,
                self._requests.prefill_dense,
            )
        self.planned["dense" if self.batch is None else "sparse"] += 1

    def run(
        self, program: LayerProgram, q: torch.Tensor, softmax: Softmax, kv_scales: KVScales
    ) -> torch.Tensor:
        """Run one layer of a sparse batch: ``q`` and the result are [tokens, q_heads, head_dim]."""
        assert self._prefill is not None
        return self._prefill.run(self.batch, program.layer, q, softmax, kv_scales)

    def end_layer(self, layer: int) -> None:
        """After a layer (global id) ran: behind the last one, bring all planes up to date."""
        if layer == self._build.pool.end_layer - 1:
            self.update_planes()

    def update_planes(self) -> None:
        """Bring the planes of all layers up to date, after the last one wrote its keys."""
        assert self._written is not None
        page_table, start, end, longest = self._written
        pool = self._build.pool
        pool.update_planes(page_table, start, end, max_new_tokens=longest)
        pool.loads.update_planes()
