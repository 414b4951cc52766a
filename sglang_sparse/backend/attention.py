# SPDX-License-Identifier: Apache-2.0
"""The attention backend: sparse decode for long rows, and an inner dense backend for all else.

Contract: ``layers/attention/base_attn_backend.py: AttentionBackend``. Dense prefill, and batches
whose rows are all too short, run on the inner backend, which is chosen at start. Planes are updated
once a step for all layers, after the last layer. This is early enough, since the token of this step
is always attended to, so that no selection needs its plane entry yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparse import compat, pools
from sglang_sparse.backend.ahead import compile_kernels
from sglang_sparse.backend.allocate import allocate
from sglang_sparse.backend.counters import DecodeCounters
from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.describe import gather_facts
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.inner import InnerBackends
from sglang_sparse.backend.kv_scales import StoredKV
from sglang_sparse.backend.probe import FidelityProbe
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.backend.runner import (
    check_runner,
    heads_of,
    launch_of_runner,
    longest_chunk,
)
from sglang_sparse.backend.verify import as_extend, most_queries
from sglang_sparse.checks import check_keywords
from sglang_sparse.choices.build import Build, Columns, LayerProgram
from sglang_sparse.choices.telemetry import LayerCounters
from sglang_sparse.facts import Facts
from sglang_sparse.graph_variants import Variant
from sglang_sparse_kernels.records import Softmax

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

Write = Callable[[], None]
Dense = Callable[[], torch.Tensor]


class SparseAttentionBackend(AttentionBackend):
    """SGLang's attention backend for a sparse server.

    Attributes:
        requests: the options of each request. It gets a batch's requests before the batch is
            planned.
        decode, extend: plan and run decode and prefill batches.
        counters: sums over decode steps; None where SGLang's metrics are off.
        progress: sums of what layers reached, if the budget counts them; else None.
    """

    needs_cpu_seq_lens = True  # they choose the graph
    _decode_class: ClassVar[type[DecodeSteps]] = DecodeSteps
    _extend_class: ClassVar[type[ExtendSteps]] = ExtendSteps

    def __init__(self, runner: ModelRunner) -> None:
        """Build the inner backend and compile the layers' programs.

        Raises:
            ConfigError: a hook lost its target, or the model or pool is not supported.
        """
        super().__init__()
        compat.verify_hooks()
        self._launch = launch_of_runner(runner)
        check_runner(runner)
        config, impl = (
            self._launch.config,
            pools.implementation(compat.resolved(runner.server_args).device),
        )
        self.token_to_kv_pool = pool = runner.token_to_kv_pool
        layers = compat.attention_layers(runner.model)
        self.req_to_token_pool = runner.req_to_token_pool
        self.device = torch.device(runner.device)
        self.max_context_len = runner.model_config.context_len
        self._captures_graphs = compat.captures_decode(runner.server_args)
        self._probe = FidelityProbe.from_environment(graphs=self._captures_graphs)

        # Row 0 of the request table is SGLang's padding row.
        table = runner.req_to_token_pool.req_to_token
        heads, columns = heads_of(runner), Columns(table.shape[0], self.device)
        self._heads = heads
        self.requests = RequestTable(config, columns)
        seen, build = self._fitted(
            runner,
            allocate(
                config,
                pool,
                heads,
                columns,
                max_context=table.shape[1],
                impl=impl,
                queries=most_queries(runner.server_args, heads),
            ),
        )
        self._build = build
        self._inner = InnerBackends(seen, config.inner, impl)
        self._stored = StoredKV(pool.dtype, self._inner.name, layers)
        score, budget = config.score.build(build), config.budget.build(build, config.score)
        self._programs = compile_programs(
            config, build, score, budget, first_head=heads.first_kv, probe=self._probe
        )
        ran = (self._programs.get(layer.layer_id) for layer in layers)
        self._all_attend = all(program is not None and program.attends for program in ran)
        counts = compat.resolved(runner.server_args).enable_metrics
        self.counters = DecodeCounters.of(build, sum(config.heads.window)) if counts else None
        self.progress: LayerCounters | None = budget.counters
        self.decode = self._decode_class(
            config, build, budget, self._programs, self.requests, table, self.counters
        )
        prefill = config.prefill.build(build, config.score, self._programs)
        self.extend = self._extend_class(build, prefill, self.requests, table, runner.dtype)
        softmax = Softmax(layers[0].scaling, layers[0].logit_cap)
        compile_kernels(
            self.decode,
            self.extend,
            build,
            softmax,
            dtype=runner.dtype,
            chunk=longest_chunk(runner),
            rank=heads.rank,
            ranks=heads.ranks,
        )
        self.extend.warm_up(softmax)
        self._selected: Variant | None = None  # by an SGLang that asks

    def _fitted(self, runner: ModelRunner, build: Build) -> tuple[Any, Build]:
        """The runner as the inner backend sees it, and the buffers with what is beside them."""
        return runner, build

    # Properties that SGLang reads from any backend.

    @property
    def variant(self) -> Variant:
        """Which decode graph the batch being prepared uses."""
        return self._inner.variant

    @property
    def forward_metadata(self) -> Any:
        return getattr(self._inner.current, "forward_metadata", None)

    @forward_metadata.setter
    def forward_metadata(self, value: Any) -> None:
        self._inner.current.forward_metadata = value

    def support_triton(self) -> bool:
        return bool(self._inner.current.support_triton())

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return int(self._inner.current.get_cuda_graph_seq_len_fill_value())

    def on_after_cuda_graph_warmup(self) -> None:
        self._inner.current.on_after_cuda_graph_warmup()

    # Planning, once a batch.

    def take_batch(self, reqs: Sequence[Any], forward_batch: ForwardBatch) -> None:
        """Note what the requests of the batch that is planned next asked for."""
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle() or mode.is_target_verify():
            self.requests.expect(reqs)
        else:
            self.requests.admit(reqs, forward_batch.req_pool_indices)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._inner.init_cuda_graph_state(max_bs, max_num_tokens)
        self.decode.allocate_for_graphs(max_bs)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Eager entry: plan a decode batch, or record the positions that a prefill batch writes."""
        if _decodes(forward_batch):
            self._inner.variant = self.decode.begin(self.decode.choose(forward_batch))
            self.decode.plan_batch(forward_batch, graph=False)
        else:
            self._inner.variant = "dense"
            self.extend.plan_batch(forward_batch)
            if self._all_attend and self.extend.batch is not None:
                return  # no layer asks the inner backend
        self._inner.plan(forward_batch, graph=False)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Graph entry: choose the graph and fill the plan that it reads."""
        if not _decodes(forward_batch):
            raise RuntimeError("prefill is captured whole; check_resolved should have refused it")
        self._inner.variant = (
            compat.current().variant_being_captured()
            if in_capture
            else self.decode.begin(self._selected or self.decode.choose(forward_batch))
        )
        self.decode.plan_batch(forward_batch, graph=True)
        self._inner.plan(forward_batch, graph=True, in_capture=in_capture)

    def select_variant(self, forward_batch: ForwardBatch) -> Variant:
        """Choose the graph of a decode batch, for an SGLang that asks before it plans each.

        It may ask again before it replays the batch.
        """
        self._selected = self.decode.choose(forward_batch)
        return self._selected

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self._inner.current.init_forward_metadata_in_graph(forward_batch)

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
        if self._outdoes_inner or self._decoding(layer) is not None:
            check_keywords(layer, kwargs)

        def dense() -> torch.Tensor:
            return self._inner.current.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )

        write = partial(self._write, layer, forward_batch, k, v, save_kv_cache)
        return self._decode(q, layer, write, dense)

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
        check_keywords(layer, kwargs)

        def dense(batch: ForwardBatch) -> torch.Tensor:
            return self._inner.current.forward_extend(
                q, k, v, layer, batch, save_kv_cache=save_kv_cache, **kwargs
            )

        write = partial(self._write, layer, forward_batch, k, v, save_kv_cache)
        if forward_batch.forward_mode.is_target_verify():
            # Chains of draft tokens, each behind the last token of its request.
            return self._decode(q, layer, write, lambda: dense(self._chains(forward_batch)))
        program = None if self.extend.batch is None else self._programs.get(layer.layer_id)
        if program is not None:
            self.token_to_kv_pool.loads.wait(layer.layer_id)
        return self._layer(self.extend, program, q, layer, write, lambda: dense(forward_batch))

    def _decode(
        self, q: torch.Tensor, layer: RadixAttention, write: Write, dense: Dense
    ) -> torch.Tensor:
        """Run a layer of a batch that decodes, or that verifies drafts."""

        def attend_to_all() -> torch.Tensor:
            if not self._outdoes_inner:
                return dense()
            write()
            return self._run(self.decode.attend_to_all, layer.layer_id, q, layer)

        return self._layer(self.decode, self._decoding(layer), q, layer, write, attend_to_all)

    def _layer(
        self,
        steps: DecodeSteps | ExtendSteps,
        program: LayerProgram | None,
        q: torch.Tensor,
        layer: RadixAttention,
        write: Write,
        dense: Dense,
    ) -> torch.Tensor:
        """Run a layer: its stages, if it has any, and ``dense`` unless these attend.

        ``write`` stores the layer's keys and values, which ``dense`` does by itself.
        """
        if program is not None and program.attends:
            write()
            out = self._run(steps.run, program, q, layer)
        else:
            out = dense()
            if program is not None:
                self._run(steps.run, program, q, layer)
        steps.end_layer(layer.layer_id)
        return out

    def _decoding(self, layer: RadixAttention) -> LayerProgram | None:
        """What a layer runs in the batch that was planned last, if that selects; else None."""
        return self._programs.get(layer.layer_id) if self.variant == "sparse" else None

    def _chains(self, forward_batch: ForwardBatch) -> ForwardBatch:
        """A batch to verify as the inner backend takes it."""
        if self._inner.name == "torch_native":
            return as_extend(forward_batch, self.decode.queries)
        return forward_batch

    @property
    def _outdoes_inner(self) -> bool:
        """Whether layers of this batch attend to everything through the operators."""
        return self.variant == "sparse" and not self._inner.sparse_steps

    def _write(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        save_kv_cache: bool,
    ) -> None:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer,
                KVWriteLoc(forward_batch.out_cache_loc, None),
                k,
                v,
                *self._stored.write(layer),
            )

    def _run(
        self,
        run: Callable[..., torch.Tensor],
        what: LayerProgram | int,
        q: torch.Tensor,
        layer: RadixAttention,
    ) -> torch.Tensor:
        out = run(
            what,
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            Softmax(layer.scaling, layer.logit_cap),
            self._stored.read(layer),
        )
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    # Reports.

    def facts(self) -> Facts:
        """The facts of this server; does not wait for the device."""
        return gather_facts(
            self._launch,
            self._build,
            self._heads,
            self.decode,
            self.extend,
            max_context=self.max_context_len,
            inner=self._inner.name,
            captures_graphs=self._captures_graphs,
        )

    def reached(self) -> dict[int, dict[str, int]] | None:
        """Sums of what this rank's layers reached, or None; waits for the device."""
        return None if self.progress is None else self.progress.read()

    def frame_counts(self, *, wait: bool) -> dict[str, int] | None:
        """What was found in frames and loaded to them; None where KV lies on the device."""
        fetched = self._build.fetched
        return None if fetched is None else fetched.counts(wait=wait)

    def describe(self) -> dict[str, Any]:
        """The ``sparse`` block of ``/server_info``; plain JSON types. Waits for the device."""
        reached = self.reached()
        return asdict(self.facts()) | {
            "progress": None if reached is None else {str(id): reached[id] for id in reached},
            "fidelity": None if self._probe is None else self._probe.report(),
        }


def _decodes(forward_batch: ForwardBatch) -> bool:
    """Whether a batch decodes, or verifies what was drafted for it."""
    mode = forward_batch.forward_mode
    return bool(mode.is_decode_or_idle() or mode.is_target_verify())
