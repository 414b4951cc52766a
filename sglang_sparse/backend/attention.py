# SPDX-License-Identifier: Apache-2.0
"""The attention backend: an inner dense backend, and a selection in front of long rows' decode.

Contract: ``layers/attention/base_attn_backend.py: AttentionBackend``. Prefill and rows that are
too short to gain run on the inner backend, chosen once. Planes are brought up to date once a
step for all layers, after the last layer: the token written at this step is always attended to,
so no selection of this step needs its plane entry.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparse import __version__, banner, compat, pools
from sglang_sparse.backend.counters import DecodeCounters
from sglang_sparse.backend.prefill import SparsePrefill, TileBatch
from sglang_sparse.backend.probe import FidelityProbe
from sglang_sparse.backend.program import SelectAndAttend, compile_programs, selecting_layers
from sglang_sparse.backend.progressive import ProgressiveBuffers, most_rows
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.backend.runner import (
    check_runner,
    first_kv_head_of,
    launch_of_runner,
    query_heads_of,
)
from sglang_sparse.backend.selection import (
    MOST_KEPT_BYTES,
    Limits,
    SelectionBuffers,
    kept_bytes,
    kept_sets,
)
from sglang_sparse.checks import check_keywords, refuse
from sglang_sparse.facts import Facts
from sglang_sparse.graph_variants import VARIANTS, Variant
from sglang_sparse_kernels.plan import (
    DecodePlan,
    PlanRules,
    RequestState,
    TokenTable,
    plan_decode,
    snapshot_page_table,
)
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_AXES = ("layers", "score", "budget", "heads", "cadence", "retention", "prefill")
_INNER_ON = {"triton": "flashinfer", "torch": "torch_native"}


class SparseAttentionBackend(AttentionBackend):
    """Selects what long rows attend to; everything else is the inner backend's.

    Attributes:
        variant: which decode graph the batch being prepared uses.
        captures_graphs: whether decode is captured in CUDA graphs.
        variant_to_capture: set by the capture loop (:mod:`sglang_sparse.graph_variants`).
    """

    needs_cpu_seq_lens = True  # they choose the graph

    def __init__(self, runner: ModelRunner) -> None:
        """Build the inner backend and compile the layers' programs.

        Raises:
            ConfigError: a hook lost its target, or the model or pool is not supported.
        """
        super().__init__()
        compat.verify_hooks()
        launch = launch_of_runner(runner)
        check_runner(runner)
        self.launch = launch
        self.config = launch.config
        self.impl = pools.implementation(runner.server_args.device)
        self.token_to_kv_pool: SparseMHATokenToKVPool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.device = torch.device(runner.device)
        self.max_context_len = runner.model_config.context_len

        inner = self.config.inner
        self.inner_name = _INNER_ON[self.impl] if inner == "auto" else inner
        self._build_inner = partial(ATTENTION_BACKENDS[self.inner_name], runner)
        dense: AttentionBackend = self._build_inner()
        self._inners: dict[Variant, AttentionBackend] = {"dense": dense, "sparse": dense}

        # Row 0 of the request table is SGLang's padding row.
        self._request_slots = self.req_to_token_pool.req_to_token.shape[0]
        pool = self.token_to_kv_pool
        layers = selecting_layers(self.config, pool.start_layer, pool.end_layer)
        self.buffers = self._allocate_buffers(runner)
        self.progressive = self._allocate_progressive(runner, layers)
        graphs = self.captures_graphs = compat.captures_decode(runner.server_args)
        self.probe = FidelityProbe.from_environment(graphs=graphs)
        self.programs = compile_programs(
            self.config,
            pool,
            self.buffers,
            layers,
            self._request_slots,
            first_kv_head_of(runner),
            self.impl,
            self.probe,
            self.progressive,
        )
        choice = self.config.prefill
        self.prefill = (
            SparsePrefill(self.config, choice, pool, self.programs, self.impl)
            if choice.kind == "tile_topk" and self.programs
            else None
        )
        self._tiles: TileBatch | None = None
        score = self.config.score
        self._refresh_every = score.refresh_every if score.kind == "key_sketch" else 1
        self._last_layer = pool.end_layer - 1
        self._max_pages = -(-self.req_to_token_pool.req_to_token.shape[1] // pool.page_size)
        if self.prefill is not None and self.impl == "triton":
            self.prefill.warm_up(self._max_pages)
        self.counters = self._make_counters(runner)
        self.requests = RequestTable(self.config, self._request_slots, self.device)
        self._graph_plan: DecodePlan | None = None
        self._eager_plan = DecodePlan.allocate(1, self._max_pages, self.device)
        self._plan: DecodePlan = self._eager_plan
        self._extend: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None = None
        self.variant: Variant = "dense"
        self.variant_to_capture: Variant = "dense"
        self.steps = {"dense": 0, "sparse": 0}
        self.prefills = {"dense": 0, "sparse": 0}
        logger.info(banner.text(self.facts()))

    def _allocate_buffers(self, runner: ModelRunner) -> SelectionBuffers:
        pool = self.token_to_kv_pool
        query_heads = query_heads_of(runner)
        limits = Limits.of(
            self.config,
            max_context=self.req_to_token_pool.req_to_token.shape[1],
            kv_heads=pool.head_num,
            query_heads=query_heads,
            max_rows=self._request_slots,
        )
        rows = most_rows(
            self.config,
            limits.capacity_units,
            query_heads=query_heads,
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
        )
        if rows is not None:
            limits = replace(limits, rows_a_pass=min(rows, limits.rows_a_pass))
        sets = kept_sets(self.config, range(pool.start_layer, pool.end_layer))
        kept = kept_bytes(limits, sets=sets, request_slots=self._request_slots)
        if kept > MOST_KEPT_BYTES:
            every = self.config.cadence.every
            raise refuse(
                "--sparse-config",
                f"cadence.every={every}" if every > 1 else f"layers.kind={self.config.layers.kind}",
                f"kept selections of {MOST_KEPT_BYTES >> 30} GiB or less",
                f"these would take {kept / 2**30:.1f} GiB: lower --max-running-requests "
                f"(now {self._request_slots - 1}), --context-length or the budget"
                + (", or set cadence.every to 1" if every > 1 else ""),
            )
        return SelectionBuffers(
            limits,
            sets=sets,
            request_slots=self._request_slots,
            kv_heads=pool.head_num,
            query_heads=query_heads,
            head_dim=pool.head_dim,
            exact=self.impl == "triton" and self.config.score.scratch(1) > 0,
            device=self.device,
        )

    def _make_counters(self, runner: ModelRunner) -> DecodeCounters | None:
        """Counters of decode steps; none where SGLang's metrics are off."""
        if not runner.server_args.enable_metrics:
            return None
        return DecodeCounters(
            unit=self.config.unit,
            capacity_units=self.buffers.limits.capacity_units,
            impl=self.impl,
            device=self.device,
        )

    def _allocate_progressive(
        self, runner: ModelRunner, layers: list[int]
    ) -> ProgressiveBuffers | None:
        if self.config.budget.kind != "mass":
            return None
        return ProgressiveBuffers(
            self.config.budget,
            self.buffers,
            unit=self.config.unit,
            layers=layers,
            query_heads=query_heads_of(runner),
            head_dim=self.token_to_kv_pool.head_dim,
            request_slots=self._request_slots,
        )

    @property
    def inner(self) -> AttentionBackend:
        """The dense backend that the batch being run was planned on."""
        return self._inners[self.variant]

    # What SGLang reads off whatever backend it holds.

    @property
    def forward_metadata(self) -> Any:
        return getattr(self.inner, "forward_metadata", None)

    @forward_metadata.setter
    def forward_metadata(self, value: Any) -> None:
        self.inner.forward_metadata = value

    def support_triton(self) -> bool:
        return bool(self.inner.support_triton())

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return int(self.inner.get_cuda_graph_seq_len_fill_value())

    def on_after_cuda_graph_warmup(self) -> None:
        self.inner.on_after_cuda_graph_warmup()

    # Planning, once a batch.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        # An inner backend keeps one set of graph buffers a batch size, and both variants of a
        # batch size are captured, so each variant plans on a backend of its own.
        self._inners["sparse"] = self._build_inner()
        for inner in self._inners.values():
            inner.init_cuda_graph_state(max_bs, max_num_tokens)
        self._graph_plan = DecodePlan.allocate(max_bs, self._max_pages, self.device)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Eager entry: plan a decode batch, or note what a prefill batch will write."""
        if forward_batch.forward_mode.is_decode_or_idle():
            if forward_batch.batch_size > self._eager_plan.num_rows:
                self._eager_plan = DecodePlan.allocate(
                    forward_batch.batch_size, self._max_pages, self.device
                )
            self.variant = self._choose_variant(forward_batch)
            self._plan_decode(forward_batch, self._eager_plan)
        else:
            self._plan_extend(forward_batch)
        self.inner.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Graph entry: choose the graph and fill the plan that it reads."""
        if forward_batch.forward_mode.is_decode_or_idle():
            assert self._graph_plan is not None
            self.variant = (
                self.variant_to_capture if in_capture else self._choose_variant(forward_batch)
            )
            self._plan_decode(forward_batch, self._graph_plan)
        else:
            raise RuntimeError("prefill is captured whole; check_resolved should have refused it")
        self.inner.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.inner.init_forward_metadata_in_graph(forward_batch)

    def _choose_variant(self, forward_batch: ForwardBatch) -> Variant:
        lens = forward_batch.seq_lens_cpu
        # Without a host copy the sparse variant is right for any length, and never syncs.
        short = (
            lens is not None and self.requests.longest_sparse(lens) < self.config.min_sparse_tokens
        )
        variant: Variant = "dense" if short or not self.programs else "sparse"
        self.steps[variant] += 1
        return variant

    def _plan_decode(self, forward_batch: ForwardBatch, buffers: DecodePlan) -> None:
        self._plan = buffers.rows(forward_batch.batch_size)
        plan_decode(
            self._tokens(forward_batch),
            RequestState(self.requests.decode_start, self.requests.budgets),
            PlanRules(
                page_size=self.token_to_kv_pool.page_size,
                unit=self.config.unit,
                capacity_units=self.buffers.limits.capacity_units,
                min_sparse_tokens=self.config.min_sparse_tokens,
                reselect_every=self.config.cadence.every,
                refresh_every=self._refresh_every,
            ),
            plan=self._plan,
            impl=self.impl,
        )
        if self.progressive is not None:
            self.progressive.plan(self.requests.epsilons, forward_batch.req_pool_indices)
        if self.counters is not None:
            self.counters.count(self._plan, self.requests.budgets)

    def _tokens(self, forward_batch: ForwardBatch) -> TokenTable:
        table = self.req_to_token_pool.req_to_token
        return TokenTable(table, forward_batch.req_pool_indices, forward_batch.seq_lens)

    def _plan_extend(self, forward_batch: ForwardBatch) -> None:
        self.variant = "dense"
        slots, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        page_table = torch.zeros(
            (slots.shape[0], self._max_pages), dtype=torch.int32, device=self.device
        )
        snapshot_page_table(
            self._tokens(forward_batch),
            page_size=self.token_to_kv_pool.page_size,
            out=page_table,
            impl=self.impl,
        )
        end = seq_lens.to(torch.int32)
        start = forward_batch.extend_prefix_lens.to(torch.int32)
        longest = max(forward_batch.extend_seq_lens_cpu, default=1)
        self._extend = (page_table, start, end, longest)
        self.requests.start_decoding(slots, end)
        self._tiles = None
        if self.prefill is not None:
            self._tiles = self.prefill.plan(
                page_table,
                forward_batch.extend_prefix_lens_cpu,
                forward_batch.extend_seq_lens_cpu,
                self.requests.prefill_dense,
            )
        self.prefills["dense" if self._tiles is None else "sparse"] += 1

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
        program = self.programs.get(layer.layer_id) if self.variant == "sparse" else None
        if program is None or program.dense:
            out = self.inner.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
            if program is not None:
                check_keywords(layer, kwargs)
                self._run(program, q, layer)
        else:
            out = self._forward_sparse(
                program, q, k, v, layer, forward_batch, save_kv_cache, kwargs
            )
        if layer.layer_id == self._last_layer:
            plan = self._plan
            self.token_to_kv_pool.update_planes(
                plan.page_table, plan.update_start, plan.seq_lens, max_new_tokens=1
            )
        return out

    def _forward_sparse(
        self,
        program: SelectAndAttend,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        check_keywords(layer, kwargs)
        self._write(layer, forward_batch, k, v, save_kv_cache)
        out = self._run(program, q, layer)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

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
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )

    def _run_tiles(
        self, tiles: TileBatch, program: SelectAndAttend, q: torch.Tensor, layer: RadixAttention
    ) -> torch.Tensor:
        assert self.prefill is not None
        out = self.prefill.run(
            tiles,
            program,
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            scaling=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    def _run(
        self, program: SelectAndAttend, q: torch.Tensor, layer: RadixAttention
    ) -> torch.Tensor:
        return program.run(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            self._plan,
            scaling=layer.scaling,
            logit_cap=layer.logit_cap,
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
        check_keywords(layer, kwargs)
        tiles, program = self._tiles, self.programs.get(layer.layer_id)
        out: torch.Tensor
        if tiles is None or program is None or program.dense:
            out = self.inner.forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
            if tiles is not None and program is not None:
                self._run_tiles(tiles, program, q, layer)
        else:
            self._write(layer, forward_batch, k, v, save_kv_cache)
            out = self._run_tiles(tiles, program, q, layer)
        if layer.layer_id == self._last_layer:
            assert self._extend is not None
            page_table, start, end, longest = self._extend
            self.token_to_kv_pool.update_planes(page_table, start, end, max_new_tokens=longest)
        return out

    def facts(self) -> Facts:
        """What this server runs, for the banner, metrics and ``/server_info``."""
        config, pool, resolved = self.config, self.token_to_kv_pool, self.launch.resolved
        roles: dict[str, list[int]] = {}
        for layer in range(pool.start_layer, pool.end_layer):
            role = self.programs[layer].role if layer in self.programs else "dense"
            roles.setdefault(role, []).append(layer)
        low, high = config.request_range
        axes = config.model_dump(mode="json", include=set(_AXES))
        return Facts(
            version=__version__,
            method=resolved.method,
            source=resolved.source,
            preset_hash=resolved.hash,
            axes={axis: axes[axis] for axis in _AXES},
            inner_backend=self.inner_name,
            implementation=self.impl,
            min_sparse_tokens=config.min_sparse_tokens,
            longest_row=compat.longest_row(self.max_context_len, pool.size, pool.page_size),
            page_size=pool.page_size,
            unit=config.unit,
            kv_heads=pool.head_num,
            layers=roles,
            request_budget={"unit": config.budget.key, "least": low, "most": high},
            graphs={
                "decode": "captured" if self.captures_graphs else "off",
                "variants": list(VARIANTS) if self.captures_graphs else [],
            },
            plane_bytes={name: plane.nbytes for name, plane in pool.planes.tensors().items()},
            kv_bytes=sum(pool.get_kv_size_bytes()) - pool.plane_bytes(),
            state_bytes=self.state_bytes(),
            decode_steps=dict(self.steps),
            prefill_batches=dict(self.prefills),
            sglang=compat.sglang_version(),
            sglang_tested=compat.tested_range(),
        )

    def state_bytes(self) -> int:
        """Device bytes beside pool and planes: scores, lists, channels, plans."""
        programs = self.programs.values()
        scorers = sum(p.scorer.state_bytes() for p in programs if p.scorer is not None)
        plans = {id(plan): plan for plan in (self._eager_plan, self._graph_plan) if plan}
        tables = sum(plan.page_table.nbytes for plan in plans.values())
        progressive = 0 if self.progressive is None else self.progressive.nbytes()
        return self.buffers.nbytes() + progressive + scorers + tables + self.requests.nbytes()

    def describe(self) -> dict[str, Any]:
        """The ``sparse`` block of ``/server_info``; plain JSON types. Waits for the device."""
        return asdict(self.facts()) | {
            "progress": None if self.progressive is None else self.progressive.report(),
            "fidelity": None if self.probe is None else self.probe.report(),
        }
