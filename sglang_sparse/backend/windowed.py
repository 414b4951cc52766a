# SPDX-License-Identifier: Apache-2.0
"""The attention backend where streaming heads hold sinks and windows only.

LServe (arXiv 2502.14866, section 3.3), DuoAttention (arXiv 2410.10819, section 2.3). Retrieval
heads run on :class:`.attention.SparseAttentionBackend`, which sees a model and a pool of them
alone. Streaming heads attend here, over their own pool: in prompts as in decoding, in short
requests as in long ones. So a token's KV does not depend on what was cached, nor on how a prompt
was cut.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparse import compat
from sglang_sparse.backend.attention import SparseAttentionBackend
from sglang_sparse.backend.runner import launch_of_runner
from sglang_sparse.backend.window_steps import WindowSteps
from sglang_sparse.backend.window_view import retrieval_view
from sglang_sparse.config.axes import AXES
from sglang_sparse.facts import Facts
from sglang_sparse_kernels.records import Softmax

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class SplitLayer:
    """Heads of one layer, by what they hold.

    Attributes:
        retrieval, streaming: int64 ids of KV heads, ascending.
        layer: the layer as SGLang's backends see it that serve the retrieval heads.
    """

    retrieval: torch.Tensor
    streaming: torch.Tensor
    layer: RadixAttention


class WindowedAttentionBackend(SparseAttentionBackend):
    """SGLang's attention backend for two groups of KV heads, each with a pool of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        """See `SparseAttentionBackend`; the runner's pool is a `SplitHeadKVPool`."""
        super().__init__(retrieval_view(runner))
        self._launch = launch_of_runner(runner)
        self._pool, config = runner.token_to_kv_pool, self._launch.config
        self._kv_heads = self._pool.head_num
        self._streams = {
            layer: config.heads.streams_in(layer)
            for layer in range(self._pool.start_layer, self._pool.end_layer)
        }
        self._split = {
            layer.layer_id: self._split_of(layer) for layer in compat.attention_layers(runner.model)
        }
        group = runner.model_config.num_attention_heads // self._kv_heads
        self._windows = WindowSteps(
            self._pool,
            self._build.impl,
            config.heads.window,
            group=group,
            rows=runner.req_to_token_pool.req_to_token.shape[0],
            columns=self.decode.plan.page_table.shape[1],
        )

    def _split_of(self, layer: RadixAttention) -> SplitLayer:
        streams = self._streams[layer.layer_id]
        reads = [head for head in range(self._kv_heads) if head not in streams]
        seen = copy.copy(layer)
        group = layer.tp_q_head_num // self._kv_heads
        seen.tp_q_head_num = len(reads) * group
        seen.tp_k_head_num = seen.tp_v_head_num = len(reads)
        return SplitLayer(
            torch.tensor(reads, device=self.device),
            torch.tensor(sorted(streams), device=self.device),
            seen,
        )

    # Planning, once a batch.

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """See `SparseAttentionBackend`."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode_or_idle():
            self._windows.plan_decode(self.decode.plan)
        else:
            self._windows.plan_extend(self.extend.page_table, forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """See `SparseAttentionBackend`."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._windows.plan_decode(self.decode.plan)

    # Running, once a layer.

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._both(
            super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache, kwargs
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._both(
            super().forward_extend, q, k, v, layer, forward_batch, save_kv_cache, kwargs
        )

    def _both(
        self,
        retrieve: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Run a layer: its retrieval heads by ``retrieve``, its streaming heads over windows."""
        # SGLang lets no model write KV by itself into a pool with windows.
        assert save_kv_cache
        split, dim = self._split[layer.layer_id], layer.head_dim
        grouped = q.view(len(q), self._kv_heads, -1, dim)
        keys, values = (rows.view(-1, self._kv_heads, dim) for rows in (k, v))
        out = torch.empty_like(grouped, memory_format=torch.contiguous_format)

        def part(rows: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
            return rows.index_select(1, heads)

        own = split.streaming
        self._pool.swa_kv_pool.set_kv_buffer(
            layer,
            KVWriteLoc(self._windows.slots(forward_batch, layer.layer_id), None),
            part(keys, own),
            part(values, own),
        )
        streamed = self._windows.run(
            layer.layer_id,
            part(grouped, own).flatten(1, 2),
            Softmax(layer.scaling, layer.logit_cap),
        )
        out.index_copy_(1, own, streamed.view(len(q), len(own), -1, dim))
        own = split.retrieval
        found = retrieve(
            part(grouped, own).flatten(1),
            part(keys, own),
            part(values, own),
            split.layer,
            forward_batch,
            save_kv_cache,
            **kwargs,
        )
        out.index_copy_(1, own, found.view(len(q), len(own), -1, dim))
        return out.flatten(1)

    # Reports.

    def facts(self) -> Facts:
        """The facts of this server: those of the retrieval heads, with what the others add."""
        facts, config = super().facts(), self._launch.config
        axes = config.model_dump(mode="json", include=set(AXES))
        return replace(
            facts,
            axes={axis: axes[axis] for axis in AXES},
            kv_heads=self._pool.head_num,
            total_kv_heads=self._pool.head_num,
            streaming_heads={"select": sum(len(heads) for heads in self._streams.values())},
            kv_bytes=facts.kv_bytes + int(sum(self._pool.swa_kv_pool.get_kv_size_bytes())),
            state_bytes=facts.state_bytes + self._windows.nbytes(),
        )
