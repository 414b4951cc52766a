# SPDX-License-Identifier: Apache-2.0
"""The attention backend where keys and values lie in host memory (PSA, arXiv 2503.00392, 3.4).

All layers select, so decoding attends to lists and tails alone, whose pages are found in frames.
That holds for short requests too: their tail is everything, and frames hold the longest such tail.
So a decode batch never runs on the inner backend. Prompts run on it, over a copy of one layer.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch

from sglang_sparse import compat
from sglang_sparse.backend.attention import SparseAttentionBackend
from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.host_frame_sizes import (
    default_bytes,
    frame_needs,
    frames_in,
    pages_to_copy,
)
from sglang_sparse.backend.host_frames import HostFrames
from sglang_sparse.backend.host_prompts import HostPrompts
from sglang_sparse.checks import refuse
from sglang_sparse.facts import Facts
from sglang_sparse_kernels.step import FetchAhead

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_sparse.choices.build import Build, LayerProgram
    from sglang_sparse.graph_variants import Variant
    from sglang_sparse_kernels.records import Softmax


class HostedDecode(DecodeSteps):
    """`DecodeSteps` over frames."""

    @property
    def hosted(self) -> HostFrames:
        """The frames."""
        return cast(HostFrames, self._build.fetched)

    def choose(self, forward_batch: ForwardBatch) -> Variant:
        """Always sparse: the inner backend finds no keys in a decode batch."""
        return "sparse"

    def plan_batch(self, forward_batch: ForwardBatch, *, graph: bool) -> None:
        """See `DecodeSteps`; also begins a step of the frames."""
        super().plan_batch(forward_batch, graph=graph)
        self.hosted.begin(self.plan)

    def update_planes(self) -> None:
        """Bring planes up to date, and send full pages to the host."""
        self.hosted.end(self.plan)

    def rehearse(self, rows: int, q: torch.Tensor, softmax: Softmax) -> None:
        """See `DecodeSteps`; also what writes a step's tokens."""
        super().rehearse(rows, q, softmax)
        self.hosted.rehearse(rows)

    def _to_rehearse(self) -> list[LayerProgram]:
        # Triton compiles for the alignment of a layer's first block: those of the first two.
        programs = list(self._programs.values())
        ahead = (one for one in programs if any(isinstance(s, FetchAhead) for s in one.stages))
        return [*super()._to_rehearse(), *programs[:2], *islice(ahead, 1)]


class HostedExtend(ExtendSteps):
    """`ExtendSteps` over copies of one layer."""

    @property
    def hosted(self) -> HostFrames:
        """The frames."""
        return cast(HostFrames, self._build.fetched)

    def plan_batch(self, forward_batch: ForwardBatch) -> None:
        """See `ExtendSteps`; also begins to load the prefixes."""
        super().plan_batch(forward_batch)
        prompts = self.hosted.prompts
        prompts.plan(forward_batch, self.page_table)
        self.hosted.forget(prompts.spans)
        self._slots = forward_batch.req_pool_indices

    def begin_layer(self, layer: int) -> None:
        """Before a layer (global id) attends: its prefix is there."""
        self.hosted.prompts.begin_layer(layer)

    def end_layer(self, layer: int) -> None:
        """After a layer ran: its keys, values and planes are written."""
        self.hosted.prompts.end_layer(layer)
        super().end_layer(layer)

    def _rehearse_pool(self, table: torch.Tensor, tokens: int) -> None:
        self.hosted.prompts.rehearse(tokens)
        self.hosted.rehearse_fill()

    def update_planes(self) -> None:
        """After the last layer, whose planes are up to date as all are: decoding may go on."""
        self.hosted.hand_over(self.hosted.prompts.spans, self._slots)


class HostedAttentionBackend(SparseAttentionBackend):
    """SGLang's attention backend for keys and values in host memory."""

    _decode_class = HostedDecode
    _extend_class = HostedExtend
    decode: HostedDecode
    extend: HostedExtend

    def _fitted(self, runner: ModelRunner, build: Build) -> tuple[Any, Build]:
        if compat.writes_kv_in_rope(runner.model):
            raise refuse(
                "--model-path",
                runner.server_args.model_path,
                "models that write keys and values through the pool, with placement.kind=host",
                "this one may write them within RoPE: drop placement",
            )
        config, pool = self._launch.config, cast(Any, build.pool)
        slots, columns = runner.req_to_token_pool.req_to_token.shape
        prompts = compat.resolved(runner.server_args).prefill_max_requests
        pages = pages_to_copy(
            config, pool, request_slots=slots, max_context=columns, prompts=prompts
        )
        needs = frame_needs(
            config, pool, build.limits, request_slots=slots, max_context=columns, copy_pages=pages
        )
        if not config.placement.room[0]:
            self._launch = self._launch.sized(default_bytes(needs, self._launch.free))
        cached = frames_in(needs, self._launch.config.placement.room[0])
        # SGLang also captures batches of several requests; the buffer may hold only one.
        longest = min(runner.model_config.context_len, pages * pool.page_size)
        compat.limit_prefill_graphs(runner.server_args, longest)
        copies = HostPrompts(pool, request_slots=slots, max_context=columns, pages=pages)
        hosted = HostFrames(pool, build, needs, cached, copies)
        return copies.runner(runner), replace(build, fetched=hosted)

    # Planning, once a batch. Decode batches do not reach the inner backend.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See `SparseAttentionBackend`."""
        self.decode.allocate_for_graphs(max_bs)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """See `SparseAttentionBackend`."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            super().init_forward_metadata(forward_batch)
            return
        self._inner.variant = self.decode.begin(self.decode.choose(forward_batch))
        self.decode.plan_batch(forward_batch, graph=False)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """See `SparseAttentionBackend`."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise RuntimeError("prefill is captured whole; check_resolved should have refused it")
        variant = self.decode.choose(forward_batch)
        self._inner.variant = variant if in_capture else self.decode.begin(variant)
        self.decode.plan_batch(forward_batch, graph=True)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """See `SparseAttentionBackend`; there is nothing to do."""

    # Running, once a layer.

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
        self.extend.begin_layer(layer.layer_id)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _write(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        save_kv_cache: bool,
    ) -> None:
        # SGLang's models write by themselves only within RoPE, and those were refused.
        assert save_kv_cache
        assert k is not None
        assert v is not None
        self.decode.hosted.store(layer.layer_id, k, v, forward_batch.out_cache_loc)

    # Reports.

    def facts(self) -> Facts:
        """The facts of this server: its state has the frames and copies."""
        facts = super().facts()
        return replace(facts, state_bytes=facts.state_bytes + self.decode.hosted.nbytes())

    def describe(self) -> dict[str, Any]:
        """See `SparseAttentionBackend`; with sizes and counts of the frames."""
        return super().describe() | {"frames": self.decode.hosted.describe()}
