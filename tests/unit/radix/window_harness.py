# SPDX-License-Identifier: Apache-2.0
"""The memory side of a server whose streaming heads hold sinks and windows, beside an oracle.

The oracle keeps everything: it knows of each token of a request what its KV is a function of, all
tokens up to it. A forward pass writes that into the slots of both pools, and then compares what
each of its queries would read there.
"""

from collections import Counter
from typing import Any

import torch
from invariants import DENSE_KV
from radix_harness import MemorySide, RunForward
from radix_parts import DIM, HEADS, LAYERS, asked_for, build_context, scheduler
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_sparse_radix.planes import PageBounds
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class
from sglang_sparse_radix.split_pool import SplitHeadKVPool, SplitShape, make_allocator

FULL, SWA = ComponentType.FULL, ComponentType.SWA


def make_split_pool(shape: SplitShape, page_size: int) -> SplitHeadKVPool:
    """Both pools of a tiny model."""
    return SplitHeadKVPool(
        bind_pool_class(PlaneSpec((PageBounds(),)), "torch"),
        shape,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=LAYERS,
    )


class WindowSide(MemorySide):
    """Requests moving through two pools and SGLang's tree of both."""

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        page_size: int,
        num_pages: int,
        window_pages: int,
        sink: int,
        local: int,
        seed: int = 0,
    ) -> None:
        self.page_size, self.model_config = page_size, model_config
        self.sink, self.local = sink, local
        self.random = torch.Generator().manual_seed(seed)
        shape = SplitShape(
            num_pages * page_size, window_pages * page_size, 1, HEADS - 1, sink, local
        )
        self.pool = make_split_pool(shape, page_size)
        self.requests = ReqToTokenPool(
            size=6, max_context_len=num_pages * page_size, device="cpu", enable_memory_saver=False
        )
        self.allocator = make_allocator(self.pool, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            sliding_window_size=local,
        )
        self.tree = create_tree_cache(
            build_context(
                self.pool.full_kv_pool,
                page_size=page_size,
                requests=self.requests,
                params=params,
                is_hybrid_swa=True,
            )
        )
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        self.running: ScheduleBatch | None = None
        self.saw: dict[int, frozenset[object]] = {}
        self.seen: Counter[str] = Counter()
        # Slot -> what the KV there is a function of.
        self.full_holds: dict[int, int] = {}
        self.window_holds: dict[int, int] = {}
        self._next_rid = 0
        core = self.tree.tree_core
        original = core._evict_component_and_detach_lru

        def counted(node: Any, component: Any, *args: Any, **kwargs: Any) -> Any:
            if component.component_type is SWA and node.children:
                self.seen["tombstone"] += 1
            return original(node, component, *args, **kwargs)

        core._evict_component_and_detach_lru = counted

    # -- the forward pass ------------------------------------------------------------------------

    def launch(self, batch: ScheduleBatch, starts: list[int]) -> RunForward:
        """What one forward pass will do, with the rows and slots it was launched with."""
        ends = batch.seq_lens_cpu.tolist()
        rows = self.requests.req_to_token[batch.req_pool_indices].clone()
        reqs, prefill = list(batch.reqs), batch.forward_mode.is_extend()
        marks = [
            _marks([*req.origin_input_ids, *req.output_ids][:end])
            for req, end in zip(reqs, ends, strict=True)
        ]

        def run() -> None:
            table = rows[:, :: self.page_size] // self.page_size
            windows = self.pool.window_pages(table)
            for i, req in enumerate(reqs):
                held = rows[i, : ends[i]].tolist()
                self._note(held, starts[i], asked_for(None, req), prefill=prefill)
                self._write(held, starts[i], marks[i])
                self._compare(held, windows[i].tolist(), starts[i], marks[i])

        return run

    def _write(self, held: list[int], start: int, marks: list[int]) -> None:
        slots = torch.tensor(held[start:])
        translated = self.pool.translate_loc_from_full_to_swa(slots).tolist()
        assert 0 not in translated, "a token that is written has no slot for streaming heads"
        self.full_holds.update(zip(held[start:], marks[start:], strict=True))
        self.window_holds.update(zip(translated, marks[start:], strict=True))

    def _compare(self, held: list[int], pages: list[int], start: int, marks: list[int]) -> None:
        """What the queries from ``start`` on read is what the oracle kept."""
        assert [self.full_holds[slot] for slot in held] == marks, "retrieval heads read other KV"
        page, end = self.page_size, len(held)
        window = [p for p in range(end) if p < self.sink or p > start - self.local]
        assert all(pages[p // page] for p in window), "a page that is seen was given back"
        read = [self.window_holds[pages[p // page] * page + p % page] for p in window]
        assert read == [marks[p] for p in window], "streaming heads read other KV"
        self.seen["window without its past"] += len(window) < end
        self.seen["past given back"] += any(not pages[p // page] for p in range(end))

    # -- scheduler steps -------------------------------------------------------------------------

    def prefill(self, chunk_tokens: int, *, overlap: bool = False) -> list[Req]:
        """See `MemorySide.prefill`; servers with windows do not overlap steps."""
        return super().prefill(chunk_tokens)

    def decode(self, finish: int | None = None, *, overlap: bool = False) -> list[Req]:
        """See `MemorySide.decode`."""
        return super().decode(finish)

    def _fits(self, reqs: list[Req]) -> bool:
        need = sum(scheduler.extend_end(r) - scheduler.prefix(r) + self.page_size for r in reqs)
        full = self.allocator.full_available_size() + self.tree.full_evictable_size()
        window = self.allocator.swa_available_size() + self.tree.swa_evictable_size()
        return min(full, window) >= need

    def check_prefix(self, req: Req) -> None:
        """A prefix holds what prompts computed, and its last window."""
        slots = scheduler.prefix_slots(req, self.tree)
        seen = DENSE_KV.union(*(self.saw[slot] for slot in slots))
        assert seen == DENSE_KV, "a request took over KV that saw sparse steps"
        key = [*req.origin_input_ids, *req.output_ids]
        self.seen["reused tokens"] += len(slots)
        self.seen["shortened match"] += len(slots) < self._held_everywhere(key)

    def _held_everywhere(self, tokens: list[int]) -> int:
        """Tokens of ``tokens`` whose full KV is in the tree, to whole pages, the last one aside."""
        node, count, most = self.tree.tree_core.root_node, 0, len(tokens) - 1
        while True:
            for child in node.children.values():
                own = list(child.key.token_ids)
                if own == tokens[count : count + len(own)] and count + len(own) <= most:
                    node, count = child, count + len(own)
                    break
            else:
                return count

    # -- what must hold --------------------------------------------------------------------------

    def nodes(self) -> list[Any]:
        """All nodes of the tree but the root."""
        stack, found = [self.tree.tree_core.root_node], []
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found[1:]

    def check(self) -> None:
        """No slot is lost or owned twice, in either pool; sinks are held, and end a node."""
        full: set[int] = set()
        window: set[int] = set()
        for node in self.nodes():
            value, own = (node.component_data[kind].value for kind in (FULL, SWA))
            assert not full & set(value.tolist()), "a slot lies in two nodes"
            full |= set(value.tolist())
            start, above = 0, node.parent
            while above is not self.tree.tree_core.root_node:
                start, above = start + len(above.key), above.parent
            if start < self.sink:
                assert own is not None, "sinks were given back"
                assert start + len(node.key) <= self.sink, "a node goes on behind the sinks"
            if own is None:
                continue
            translated = self.pool.translate_loc_from_full_to_swa(value)
            assert own.tolist() == translated.tolist(), "the tree and the mapping differ"
            assert not window & set(own.tolist()), "a window's slot lies in two nodes"
            window |= set(own.tolist())
        for req in self.live_requests():
            row = self.requests.req_to_token[scheduler.row(req), : scheduler.committed(req)]
            pages = torch.unique(row // self.page_size)
            slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            full |= set(slots.tolist())
            window |= set(self.pool.translate_loc_from_full_to_swa(slots).tolist()) - {0}
        self._count_pages(full, self.pool.size, self.allocator.full_available_size())
        self._count_pages(window, self.pool.size_swa, self.allocator.swa_available_size())
        if not self.live_requests():
            self.tree.sanity_check()

    def _count_pages(self, slots: set[int], size: int, free: int) -> None:
        pages = {slot // self.page_size for slot in slots}
        assert 0 not in pages, "the padding page was handed out"
        assert free + len(pages) * self.page_size == size, "pages lost or owned twice"


def _marks(tokens: list[int]) -> list[int]:
    """What each token's KV is a function of: the tokens up to it."""
    marks, mark = [], 0
    for token in tokens:
        mark = hash((mark, token))
        marks.append(mark)
    return marks
