# SPDX-License-Identifier: Apache-2.0
"""A server's memory side without the model: real SGLang pools, allocator, tree, requests, batches.

Only the forward pass is stood in for: it writes random K and V through `set_kv_buffer` for each
layer and then updates the planes, as the attention backend does. A batch is launched and run in two
steps, so that a test can let the scheduler work on the tree in between, as the overlap scheduler
does.

Beside K and V, a forward pass notes for each KV slot which sparse attention its token saw: its own,
and what the tokens before it had seen. That is what prefixes are checked against.
"""

from array import array
from collections import Counter
from collections.abc import Callable

import invariants
import torch
from invariants import DENSE_KV
from radix_parts import (
    ASKED,
    DIM,
    HEADS,
    LAYERS,
    VOCAB,
    asked_for,
    build_context,
    make_pool,
    scheduler,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import TreeNode
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_sparse_kernels.common import FP8, Impl
from sglang_sparse_radix.branches import DENSE, SparseFrom
from sglang_sparse_radix.planes_spec import PlaneSpec

RunForward = Callable[[], None]
UpdatePlanes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


class MemorySide:
    """Requests moving through real pools and a real tree, one scheduler step a method."""

    def __init__(
        self,
        model_config: ModelConfig,
        spec: PlaneSpec,
        *,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype = torch.bfloat16,
        max_requests: int = 6,
        seed: int = 0,
        disable_radix_cache: bool = False,
        impl: Impl = "torch",
        build: dict[str, object] | None = None,
    ) -> None:
        """`build` replaces what the tree is built of."""
        self.page_size = page_size
        self.model_config = model_config
        self.random = torch.Generator().manual_seed(seed)
        self.pool = make_pool(
            spec, page_size=page_size, num_pages=num_pages, dtype=dtype, impl=impl
        )
        self.requests = ReqToTokenPool(
            size=max_requests,
            max_context_len=num_pages * page_size,
            device="cpu",
            enable_memory_saver=False,
        )
        context = build_context(
            self.pool,
            page_size=page_size,
            requests=self.requests,
            disable_radix_cache=disable_radix_cache,
            **(build or {}),
        )
        self.tree = create_tree_cache(context)
        self.allocator = context.params.token_to_kv_pool_allocator
        self.layers = [
            RadixAttention(2 * HEADS, DIM, 1.0, num_kv_heads=HEADS, layer_id=i)
            for i in range(LAYERS)
        ]
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        self.running: ScheduleBatch | None = None
        self.update_planes: UpdatePlanes = self.pool.update_planes
        # Slot -> the kinds of sparse attention that its KV saw.
        self.saw: dict[int, frozenset[object]] = {}
        self.seen: Counter[str] = Counter()
        for name in ("_split_node", "_delete_leaf"):
            self._count_calls(name)
        self._next_rid = 0

    def _count_calls(self, method: str) -> None:
        original = getattr(self.tree, method, None)
        if original is not None:

            def counted(*args: object) -> object:
                self.seen[method] += 1
                return original(*args)

            setattr(self.tree, method, counted)

    # -- the forward pass ------------------------------------------------------------------------

    def launch(self, batch: ScheduleBatch, starts: list[int]) -> RunForward:
        """What one forward pass will do, with the row and the slots it was launched with."""
        ends = batch.seq_lens_cpu.to(torch.int32)
        rows = self.requests.req_to_token[batch.req_pool_indices]
        page_table = (rows[:, :: self.page_size] // self.page_size).contiguous()
        start = torch.tensor(starts, dtype=torch.int32)
        slots = batch.out_cache_loc
        prefill = batch.forward_mode.is_extend()
        sparse = [asked_for(None, req) for req in batch.reqs]
        held = [row[:end].tolist() for row, end in zip(rows, ends.tolist(), strict=True)]

        def run() -> None:
            self.enter_forward(batch, any(starts))
            for row, first, asked in zip(held, starts, sparse, strict=True):
                self._note(row, first, asked, prefill=prefill)
            for layer in self.layers:
                self.pool.set_kv_buffer(
                    layer, KVWriteLoc(slots), self._random_rows(slots), self._random_rows(slots)
                )
            self.update_planes(page_table, start, ends, int((ends - start).max()))
            if prefill:
                self.pool.loads.update_planes()

        return run

    # What a host tier does beside; see `host_tier_harness`.

    def take_acknowledged(self) -> None:
        """Take note of copies that have ended."""

    def load_back(self, req: Req, batch_reqs: list[Req], budget: int) -> bool:
        """Ask for the part of a request's prefix that is on the host; False if it has to wait."""
        return True

    def start_loading(self, batch: ScheduleBatch) -> None:
        """Start the loads that were asked for, for a prefill batch."""

    def enter_forward(self, batch: ScheduleBatch, has_prefix: bool) -> None:
        """Let a forward pass wait for its loads."""

    def _note(self, row: list[int], first: int, sparse: SparseFrom, *, prefill: bool) -> None:
        seen: frozenset[object] = DENSE_KV
        for slot in row[:first]:
            seen |= self.saw[slot]
        start = sparse.prefill if prefill else sparse.decode
        kind = "prefill" if prefill else ("decode", sparse.budget)
        for position in range(first, len(row)):
            if start is not None and position >= start:
                seen |= {kind}
            self.saw[row[position]] = seen

    def _random_rows(self, slots: torch.Tensor) -> torch.Tensor:
        shape = (len(slots), HEADS, DIM)
        # Magnitudes from tiny to beyond fp8's range, and a zero row now and then.
        scale = 10.0 ** torch.randint(-3, 4, (len(slots), 1, 1), generator=self.random)
        zero = torch.rand((len(slots), 1, 1), generator=self.random) < 0.05
        rows = (torch.randn(shape, generator=self.random) * scale).masked_fill(zero, 0.0)
        if self.pool.dtype == FP8:
            # SGLang's cast turns what is larger into NaN; scales keep keys below.
            rows = rows.clamp(-448, 448)
        return rows.to(self.pool.dtype)

    # -- scheduler steps -------------------------------------------------------------------------

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int = 64,
        *,
        sparse: SparseFrom = DENSE,
        extra_key: str | None = None,
    ) -> Req:
        """A new request, waiting."""
        self._next_rid += 1
        params = SamplingParams(max_new_tokens=max_new_tokens, custom_params={ASKED: sparse})
        prompt = array("q", tokens)
        req = Req(f"r{self._next_rid}", "", prompt, params, vocab_size=VOCAB, extra_key=extra_key)
        self.waiting.append(req)
        return req

    def prefill(self, chunk_tokens: int, *, overlap: bool = False) -> list[Req]:
        """One extend batch of at most `chunk_tokens`; a prompt that does not fit is chunked."""
        batch_reqs: list[Req] = []
        budget = chunk_tokens
        self.take_acknowledged()
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            budget -= self._set_extend(self.chunked, budget)
            batch_reqs.append(self.chunked)
            if not self._fits(batch_reqs):
                return []
        while self.waiting and budget > 0 and self.requests.available_size() > len(batch_reqs):
            req = self.waiting[0]
            req.init_next_round_input(self.tree)
            if not self.load_back(req, batch_reqs, budget):
                break
            scheduler.lock(req, self.tree)
            tokens = self._set_extend(req, budget)
            if not self._fits([*batch_reqs, req]):
                scheduler.unlock(req, self.tree)
                break
            budget -= tokens
            batch_reqs.append(self.waiting.pop(0))
        if not batch_reqs:
            return []
        partial = [
            r for r in batch_reqs if scheduler.extend_end(r) < len(r.full_untruncated_fill_ids)
        ]
        batch = ScheduleBatch.init_new(
            batch_reqs,
            self.requests,
            self.allocator,
            self.tree,
            self.model_config,
            enable_overlap=overlap,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            chunked_req=partial[0] if partial else None,
        )
        self.start_loading(batch)
        for req in batch_reqs:
            if req is not self.chunked:
                self.check_prefix(req)
        batch.prepare_for_extend()
        for req in partial:
            req.inflight_middle_chunks += 1
        run = self.launch(batch, [scheduler.prefix(r) for r in batch_reqs])
        if not overlap:
            run()
        for req in batch_reqs:
            if req in partial:
                self.seen["chunk that ends inside a page"] += (
                    scheduler.extend_end(req) % self.page_size > 0
                )
                scheduler.checkpoint(req, self.tree, chunked=True)
                req.inflight_middle_chunks -= 1
            else:
                self._append_token(req)
                scheduler.checkpoint(req, self.tree, chunked=False)
        if overlap:
            run()
        self.chunked = partial[0] if partial else None
        self._join_running(batch)
        return batch_reqs

    def decode(self, finish: int | None = None, *, overlap: bool = False) -> list[Req]:
        """One decode step; request number `finish` ends with it. Returns who was retracted.

        With `overlap`, the ending request is released between launch and run, when its extra step
        is already in flight.
        """
        if self.running is None:
            return []
        retracted: list[Req] = []
        if not self.running.check_decode_mem():
            retracted, aborted = scheduler.retract(self.running)
            self.seen["retraction for want of memory"] += len(retracted)
            self.waiting.extend(retracted)
            if self.running.is_empty():
                self.running = None
            if self.running is None or aborted:
                return retracted
        batch = self.running
        batch.prepare_for_decode()
        run = self.launch(batch, (batch.seq_lens_cpu - 1).tolist())
        ending = batch.reqs[finish % len(batch.reqs)] if finish is not None else None
        if overlap and ending is not None:
            self.seen["finish with a step in flight"] += 1
            self.release(ending)
        run()
        for req in batch.reqs:
            if req is not ending:
                self._append_token(req)
        if ending is not None:
            if not overlap:
                self.release(ending)
            self._leave_running(ending)
        return retracted

    def release(self, req: Req, *, is_insert: bool = True) -> None:
        """Finish or abort, as the batch-result processor does it."""
        self.allocator.free_group_begin()
        scheduler.release(req, self.tree, insert=is_insert)
        self.allocator.free_group_end()

    def abort_chunked(self) -> None:
        """Abort the request whose prompt is half prefilled."""
        assert self.chunked is not None
        scheduler.release(self.chunked, self.tree, insert=False)
        self.chunked = None

    def retract(self, index: int) -> None:
        """Release a running request's memory; it waits to be recomputed."""
        assert self.running is not None
        req = self.running.reqs[index % len(self.running.reqs)]
        scheduler.release_to_wait(req, self.running)
        self._leave_running(req)
        self.waiting.append(req)

    def flush(self) -> None:
        """`/flush_cache` on an idle server: end every request first."""
        self.waiting.clear()
        if self.chunked is not None:
            self.abort_chunked()
        while self.running is not None:
            req = self.running.reqs[0]
            self.release(req)
            self._leave_running(req)
        self.take_acknowledged()
        self.tree.reset()
        self.requests.clear()
        self.allocator.clear()

    def _set_extend(self, req: Req, budget: int) -> int:
        start = scheduler.prefix(req)
        end = min(len(req.full_untruncated_fill_ids), start + budget)
        scheduler.set_extend(req, end)
        return end - start

    def _fits(self, reqs: list[Req]) -> bool:
        need = sum(scheduler.extend_end(r) - scheduler.prefix(r) + self.page_size for r in reqs)
        return self.allocator.available_size() + self.tree.evictable_size() >= need

    def _append_token(self, req: Req) -> None:
        req.output_ids.append(int(torch.randint(VOCAB, (1,), generator=self.random)))

    def _join_running(self, batch: ScheduleBatch) -> None:
        scheduler.leave_out(batch, self.chunked)
        if batch.is_empty():
            return
        if self.running is None:
            self.running = batch
        else:
            self.running.merge_batch(batch)

    def _leave_running(self, req: Req) -> None:
        assert self.running is not None
        keep = [i for i, other in enumerate(self.running.reqs) if other is not req]
        self.running.filter_batch(keep_indices=keep)
        if self.running.is_empty():
            self.running = None

    # -- what must hold --------------------------------------------------------------------------

    def live_requests(self) -> list[Req]:
        """Requests that own a row."""
        reqs = list(self.running.reqs) if self.running is not None else []
        return reqs if self.chunked is None else [*reqs, self.chunked]

    def seen_by(self, node: TreeNode) -> list[frozenset[object]]:
        """What each token of a node saw."""
        return [self.saw[slot] for slot in node.value.tolist()]

    def loaded(self, pages: torch.Tensor) -> torch.Tensor:
        """bool `[n]`, which of `pages` hold what their owner takes them to hold."""
        return torch.ones(len(pages), dtype=torch.bool)

    def check_prefix(self, req: Req) -> None:
        """A request takes over nothing that it would not have computed itself."""
        invariants.check_prefix(self, req)

    def check(self) -> None:
        """Planes equal recomputation, no page is lost or owned twice."""
        invariants.check(self)
