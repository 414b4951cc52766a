# SPDX-License-Identifier: Apache-2.0
"""Attention of streaming heads over the pool of their windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_sparse_kernels.attend import gathered_decode_attention, make_workspace
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.records import HeadWindows, KVView, Lists, Softmax
from sglang_sparse_kernels.tiles import TilePlan, plan_tiles, tile_attention, tile_tokens_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_sparse_kernels.common import Impl
    from sglang_sparse_radix.split_pool import SplitHeadKVPool

_TILE_QUERIES = 128  # of all heads of a group together


class WindowSteps:
    """Plans batches for streaming heads, and runs them.

    A plan's page table leads to pages of the other heads. It is translated once a batch. Buffers
    that decode graphs read are allocated once.
    """

    def __init__(
        self,
        pool: SplitHeadKVPool,
        impl: Impl,
        window: tuple[int, int],
        *,
        group: int,
        rows: int,
        columns: int,
    ) -> None:
        """Make the buffers.

        Args:
            pool: both pools.
            impl: kernels or their references.
            window: sinks and last tokens that a streaming head sees.
            group: query heads a KV head.
            rows: most requests of a decode batch.
            columns: pages of the longest request.
        """
        self._pool, self._impl = pool, impl
        own = pool.swa_kv_pool
        heads, device = own.head_num, torch.device(pool.device)
        self._windows = HeadWindows(torch.ones(heads, dtype=torch.int32, device=device), *window)
        self._tile_tokens = tile_tokens_of(_TILE_QUERIES, group, pool.page_size)
        self._table = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        # Lists that nobody reads.
        self._none = torch.zeros((1, heads, 1), dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        self._workspace = None
        if impl == "triton":
            self._workspace = make_workspace(rows, heads * group, heads, own.head_dim, device)
        self._decode: DecodePlan | None = None
        self._extend: TilePlan | None = None
        self._slots = self._zeros

    def plan_decode(self, plan: DecodePlan) -> None:
        """Translate the page table of a decode batch, into the buffer that graphs read."""
        rows = plan.num_rows
        self._table[:rows].copy_(self._pool.window_pages(plan.page_table))
        self._decode, self._extend = replace(plan, k_units=self._zeros[:rows]), None

    def plan_extend(self, page_table: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Cut a prefill batch into tiles; ``page_table`` is that of the other heads."""
        self._extend = plan_tiles(
            self._pool.window_pages(page_table),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            tile_tokens=self._tile_tokens,
            min_tokens=1,  # the first tile lies within every window
            floor=1,
            fraction=0.0,
        )
        self._decode = None

    def slots(self, forward_batch: ForwardBatch, layer: int) -> torch.Tensor:
        """Slots of the window pool that a batch writes; found in its first layer."""
        if layer == self._pool.start_layer:
            self._slots = self._pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        return self._slots

    def run(self, layer: int, q: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        """Attention of a layer's streaming heads in the batch that was planned last.

        Args:
            layer: its global id.
            q: [tokens, query heads of streaming heads, head_dim], after RoPE.
            softmax: how products become logits.

        Returns:
            As ``q``, contiguous.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k, v = self._pool.swa_kv_pool.get_kv_buffer(layer)
        none, counts = self._none, self._none[..., 0]
        if self._extend is not None:
            rows = self._extend.rows
            zeros = torch.zeros_like(rows.request_slots)
            tile_attention(
                q,
                KVView(k, v, rows.page_table, self._pool.page_size),
                self._extend,
                Lists(none, counts, zeros, windows=self._windows),
                softmax=softmax,
                out=out,
                impl=self._impl,
            )
            return out
        plan = self._decode
        assert plan is not None, "a batch is planned before it runs"
        gathered_decode_attention(
            q,
            KVView(k, v, self._table[: plan.num_rows], self._pool.page_size),
            plan,
            Lists(none, counts, plan.k_units, windows=self._windows),
            softmax=softmax,
            out=out,
            workspace=self._workspace,
            impl=self._impl,
        )
        return out

    def nbytes(self) -> int:
        """Device bytes of the buffers."""
        held = (self._table, self._zeros, self._none, self._workspace)
        return sum(buffer.nbytes for buffer in held if buffer is not None)
