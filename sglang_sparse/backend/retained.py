# SPDX-License-Identifier: Apache-2.0
"""The attention backend of a server that holds a bounded number of tokens a request.

Contract: ``layers/attention/base_attn_backend.py: AttentionBackend``. Every batch is told position
0 for all its tokens, so queries and keys arrive before rotation. A request's state lies in the slot
of its row in SGLang's request table. What it holds follows from its length, so nothing is kept of
a request on the host, and a slot needs no reset when it changes hands.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_sparse import __version__, compat, pools
from sglang_sparse.backend.rotation import rotation_table
from sglang_sparse.backend.runner import check_layers, heads_of, launch_of_runner
from sglang_sparse.checks import check_keywords, refuse
from sglang_sparse.launch import bounded_of
from sglang_sparse_kernels.cascade import (
    CascadeBatch,
    append_tokens,
    cascade_attention,
    close_strides,
    make_cascade_workspace,
)
from sglang_sparse_kernels.records import Softmax
from sglang_sparse_radix.snapshots import Snapshot, radix_key
from sglang_sparse_radix.state_pool import StateKVPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """New tokens of some requests, each of which adds them to one stride.

    Attributes:
        tokens: which of the batch's tokens they are.
        rows: the requests.
        before: int32 [rows], tokens of each request before them; read where a stride closes.
        closes: whether the stride of any request is closed first.
        kept: before that, states that are kept as snapshots: their slots, and to which slots.
    """

    tokens: slice
    rows: CascadeBatch
    before: torch.Tensor
    closes: bool
    kept: tuple[tuple[int, int], ...] = ()


class RetainedAttentionBackend(AttentionBackend):
    """Attends to what requests hold, and evicts at the ends of strides."""

    needs_cpu_seq_lens = True  # they say when strides close
    progress = None  # nothing is counted beside what SGLang counts

    def __init__(self, runner: ModelRunner) -> None:
        """Read the model's rotation and allocate scratch.

        Raises:
            ConfigError: a hook lost its target, or the model is not supported.
        """
        super().__init__()
        compat.verify_hooks()
        self._launch = launch_of_runner(runner)
        pool = runner.token_to_kv_pool
        assert isinstance(pool, StateKVPool), "the hook on the pool is verified above"
        check_layers(runner)
        retention = bounded_of(runner.server_args)
        assert retention is not None, "the backend's factory asks for it"
        self._impl = pools.implementation(compat.resolved(runner.server_args).device)
        self._pool, self._shape, self._average = pool, retention.shape(), retention.average()
        self._cos_sin = rotation_table(runner, self._shape.rows)
        self._workspace = make_cascade_workspace(
            pool.state, max_rows=pool.slots, num_heads=heads_of(runner).query
        )
        self._captures_graphs = compat.captures_decode(runner.server_args)
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.device = torch.device(runner.device)
        self.max_context_len = int(runner.model_config.context_len)
        self._decode = self._rows(pool.slots)
        self._parts: list[Part] = []
        self._slots: list[int] = []
        self._prompts: list[tuple[Sequence[int], Any]] = []
        self.forward_metadata: Any = None
        # Compiles what runs at the end of a stride: the first one must not wait for it.
        padding = self._rows(1)
        self._close(pool.state, padding.slots, padding.seq_lens)
        logger.info(self._banner())

    def _rows(self, count: int) -> CascadeBatch:
        """A batch of ``count`` rows of one new token each, all of them padding."""
        rows = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        first = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        return CascadeBatch(rows, rows.new_ones(count), first, most_new=1)

    # What SGLang reads off whatever backend it holds.

    def support_triton(self) -> bool:
        return self._impl == "triton"

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the rows that captured graphs read."""
        self._decode = self._rows(max(max_bs, self._pool.slots))
        self._workspace = make_cascade_workspace(
            self._pool.state,
            max_rows=self._decode.num_rows,
            num_heads=self._workspace.logits.shape[1],
        )

    # Planning, once a batch.

    def take_batch(self, reqs: Sequence[Any], forward_batch: ForwardBatch) -> None:
        """Tell the model position 0 for every token; copy snapshots that requests begin with."""
        if forward_batch.positions is not None:
            forward_batch.positions.zero_()
        if forward_batch.forward_mode.is_decode_or_idle():
            return
        row_of = compat.current().request_row
        self._slots = [self._pool.slot_of(row_of(req)) for req in reqs]
        if not self._pool.snapshots.capacity:
            return
        self._prompts = [(req.origin_input_ids + req.output_ids, req.extra_key) for req in reqs]
        prefixes = forward_batch.extend_prefix_lens_cpu
        assert prefixes is not None
        for req, slot, prefix in zip(reqs, self._slots, prefixes, strict=True):
            found = req.last_node
            # Later chunks of the same request have longer prefixes.
            if isinstance(found, Snapshot) and prefix == found.length:
                self._pool.copy_slot(found.slot, slot)
                self._pool.snapshots.restored += 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Eager entry: plan a batch."""
        if forward_batch.forward_mode.is_decode_or_idle():
            self._plan_decode(forward_batch)
        else:
            self._plan_extend(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Graph entry: fill the rows that the graph reads; strides close ahead of it."""
        self._plan_decode(forward_batch, in_capture=in_capture)

    def _plan_decode(self, forward_batch: ForwardBatch, *, in_capture: bool = False) -> None:
        count, rows = forward_batch.batch_size, self._decode
        rows.slots[:count].copy_(self._pool.slot_of(forward_batch.req_pool_indices))
        rows.seq_lens[:count].copy_(forward_batch.seq_lens)
        batch = CascadeBatch(rows.slots[:count], rows.seq_lens[:count], rows.first[: count + 1], 1)
        self._parts = [Part(slice(0, count), batch, batch.seq_lens, closes=False)]
        if in_capture:  # rows are padding
            return
        lengths = forward_batch.seq_lens_cpu
        assert lengths is not None, "needs_cpu_seq_lens asks for them"
        closing = [i for i, n in enumerate(lengths.tolist()) if self._shape.closes(n - 1)]
        if closing:
            at = torch.tensor(closing, device=self.device)
            self._close(self._pool.state, batch.slots[at], batch.seq_lens[at] - 1)

    def _plan_extend(self, forward_batch: ForwardBatch) -> None:
        prefixes, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        assert prefixes is not None
        assert lengths is not None
        # A batch without requests is SGLang's own, to warm up.
        slots, self._slots = self._slots or [-1] * len(lengths), []
        prompts, self._prompts = self._prompts, []
        self._parts, start = [], 0
        taken: list[tuple[int, int, int]] = []
        kept: list[tuple[int, int]] = []
        for row, (slot, prefix, new) in enumerate(zip(slots, prefixes, lengths, strict=True)):
            cuts = self._shape.cut(prefix, prefix + new)
            for i, (begin, end) in enumerate(cuts):
                if i:  # a request has one row in a part
                    start = self._add_part(taken, kept, start)
                    taken, kept = [], []
                taken.append((slot, begin, end))
            # The deepest close of this batch: what comes later begins with the most.
            if prompts and self._shape.closes(begin):
                kept += self._snapshot(slot, *prompts[row], begin)
        if taken:
            self._add_part(taken, kept, start)

    def _snapshot(
        self, slot: int, ids: Sequence[int], extra_key: Any, length: int
    ) -> list[tuple[int, int]]:
        """(slot, slot of the snapshot) of a request's first ``length`` tokens, if it is new."""
        found = self._pool.snapshots.reserve(radix_key(ids[:length], extra_key))
        return [] if found is None else [(slot, found.slot)]

    def _add_part(
        self, taken: list[tuple[int, int, int]], kept: list[tuple[int, int]], start: int
    ) -> int:
        """Add rows of (slot, first position, end) whose tokens lie from ``start`` on; their end."""
        new = [end - begin for _, begin, end in taken]
        columns = torch.tensor(
            [[slot for slot, _, _ in taken], [end for *_, end in taken], [b for _, b, _ in taken]],
            dtype=torch.int32,
        ).to(self.device)
        first = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        rows = CascadeBatch(columns[0], columns[1], first.to(self.device), max(new))
        closes = any(self._shape.closes(begin) for _, begin, _ in taken)
        stop = start + sum(new)
        self._parts.append(Part(slice(start, stop), rows, columns[2], closes, tuple(kept)))
        return stop

    def _close(self, state: Any, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        close_strides(state, slots, tokens, workspace=self._workspace, impl=self._impl)

    # Running, once a layer.

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._run(*args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._run(*args, **kwargs)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        check_keywords(layer, kwargs)
        if k is None or v is None or not save_kv_cache:
            raise refuse(
                "--model-path",
                f"layer {layer.layer_id}",
                "layers that hand K and V to the attention backend",
                "this layer writes them by itself: serve it with another method",
            )
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        k, v = (x.view(-1, layer.tp_k_head_num, layer.head_dim) for x in (k, v))
        state, out = self._pool.layer_state(layer.layer_id), torch.zeros_like(q)
        softmax = Softmax(layer.scaling, layer.logit_cap)
        for part in self._parts:
            for source, target in part.kept:
                for tensor in (state.k, state.v, state.scores):
                    tensor[:, target].copy_(tensor[:, source])
            if part.closes:
                self._close(state, part.rows.slots, part.before)
            at = part.tokens
            append_tokens(k[at], v[at], state, part.rows, impl=self._impl)
            cascade_attention(
                q[at],
                state,
                part.rows,
                self._cos_sin,
                softmax=softmax,
                average=self._average,
                out=out[at],
                workspace=self._workspace,
                impl=self._impl,
            )
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    # What people are told.

    def reached(self) -> None:
        """Nothing: no budget is reached here."""

    def describe(self) -> dict[str, Any]:
        """The ``sparse`` block of ``/server_info``; plain JSON types."""
        resolved, pool = self._launch.resolved, self._pool
        return {
            "version": __version__,
            "method": resolved.method,
            "source": resolved.source,
            "preset_hash": resolved.hash,
            "retention": resolved.config.retention.model_dump(mode="json"),
            "implementation": self._impl,
            "graphs": {"decode": "captured" if self._captures_graphs else "off"},
            "slots": pool.slots,
            "free_slots": self.req_to_token_pool.available_size(),
            "tokens_held": self._shape.rows,
            "longest_row": compat.longest_row(self.max_context_len, pool.size, pool.page_size),
            "kv_bytes": pool.state.nbytes,
            "slot_bytes": pool.state.nbytes // pool.state.k.shape[1],
            "snapshots": {
                "slots": pool.snapshots.capacity,
                "kept": len(pool.snapshots),
                "taken": pool.snapshots.taken,
                "restored": pool.snapshots.restored,
            },
            "sglang": compat.sglang_version(),
            "progress": None,
            "fidelity": None,
        }

    def _banner(self) -> str:
        """The line that a server logs at start."""
        facts = self.describe()
        settings = ", ".join(f"{k}={v}" for k, v in facts["retention"].items() if k != "kind")
        return (
            f"sglang-sparse {facts['version']}: method {facts['method']} ({facts['source']}, "
            f"{facts['preset_hash']}); retention {facts['retention']['kind']}({settings}); "
            f"{facts['slots']} slots of requests and {facts['snapshots']['slots']} of prefixes, "
            f"{facts['slot_bytes'] / 2**20:.1f} MiB each, "
            f"{facts['tokens_held']} tokens held a request; rows of up to {facts['longest_row']} "
            f"tokens; sglang {facts['sglang']}"
        )
