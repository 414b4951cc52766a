# SPDX-License-Identifier: Apache-2.0
"""Requests over KV in host memory and over resident KV, step by step, with the same keys."""

import gc
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from machine import HAS_GPU

from sglang_sparse.backend.allocate import allocate
from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.heads import Heads
from sglang_sparse.backend.host_frame_sizes import frame_needs, pages_to_copy
from sglang_sparse.backend.host_frames import HostFrames
from sglang_sparse.backend.host_prompts import HostPrompts
from sglang_sparse.backend.hosted import HostedDecode, HostedExtend
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Columns
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.records import KVScales, Softmax
from sglang_sparse_radix.host_kv import HostKVPool
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import SparseMHATokenToKVPool, bind_pool_class

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
IMPL: Impl = "triton" if HAS_GPU else "cpu"
LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 64
SLOTS, CONTEXT = 4, 160
ROOMY = 1 << 30
_MASS = {"kind": "mass", "epsilon": 0.7, "cap": 112, "microbatch": 16}
_REUSE = {"kind": "anchors", "anchors": [0], "first": "selection"}
_CROSSED = [{"layer": layer, "heads": [1, 0]} for layer in (1, 2)]
# Up to a share, by what was seen, by bounds, by scores; layers that reuse the first one's lists.
BUDGETS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "mass": {"score": {"kind": "page_mean", "logical_page": 16}, "budget": _MASS},
    "bounds": {"budget": _MASS | {"estimator": "upper_bound", "epsilon": 0.1}},
    "scores": {"budget": _MASS | {"estimator": "scored", "margin": 2.0, "share": "mean"}},
    "reuse": {"layers": _REUSE | {"reuse": _CROSSED}},
    "reuse-mass": {"layers": _REUSE, "budget": _MASS},
}


def make_config(page: int = 16, **changes: Any) -> SparseConfig:
    """Short rows attend to all of 40 tokens; lists have 5 pages of 16, 3 of them given."""
    return SparseConfig.model_validate(
        {
            "layers": {"kind": "every"},
            "score": {"kind": "page_minmax", "logical_page": 16},
            "budget": {"kind": "tokens", "tokens": 80, "max_tokens": 80},
            "sink_tokens": 16,
            "recent_tokens": 16,
            "min_sparse_tokens": 41,
            "page_size": page,
            "placement": {"kind": "host", "device_bytes": ROOMY, "host_bytes": ROOMY},
        }
        | changes
    )


@dataclass
class Request:
    """A request of the schedule.

    Attributes:
        slot: its row in the request table.
        pages: its physical pages; the first `shared` of them belong to a prefix.
        length: tokens whose keys are written.
    """

    slot: int
    pages: list[int]
    length: int
    shared: int


@dataclass
class Prefix:
    """Full pages that requests may begin with, and how many do."""

    pages: list[int]
    users: int = 0


@dataclass
class Prompt:
    """A request to begin: its tokens behind a prefix, and the pages that a chunk has."""

    tokens: int
    chunk_pages: int
    prefix: Prefix | None = None


@dataclass
class Side:
    """One of the two servers: pool, buffers and steps."""

    pool: Any
    build: Any
    decode: DecodeSteps
    extend: ExtendSteps
    programs: dict[int, Any]
    budget: Any


class Twins:
    """The same requests over KV in host memory and on the device.

    Attributes:
        resident, hosted: the two sides.
        frames: the hosted side's, and `needs` of them.
        filled: pages that steps filled.
    """

    def __init__(
        self, config: SparseConfig, *, pages: int = 40, seed: int = 0, prompts: int = 1,
    ) -> None:  # fmt: skip
        """`prompts` of the hosted side may share a batch."""
        self.config, self.page, self.prompts = config, config.page_size, prompts
        if HAS_GPU:
            gc.collect()  # pools of earlier tests end now, and not while a graph is captured
        self.numbers, self.rng = torch.Generator().manual_seed(seed), Random(seed)
        self.table = torch.zeros((SLOTS, CONTEXT), dtype=torch.int32, device=DEVICE)
        self.free_pages, self.free_slots = list(range(1, pages)), list(range(1, SLOTS))
        self.running: list[Request] = []
        self.filled = 0
        self.prefixes: list[Prefix] = []
        self.resident = self._side(SparseMHATokenToKVPool, pages, DecodeSteps, ExtendSteps)
        self.hosted = self._side(HostKVPool, pages, HostedDecode, HostedExtend)
        self.frames = self.hosted.build.fetched
        self.hosted.decode.allocate_for_graphs(SLOTS)
        self.graphs: dict[int, Any] = {}
        self.seen = self.frames.prompts.runner(SimpleNamespace(req_to_token_pool=SimpleNamespace()))

    def _side(self, base: Any, pages: int, decode: Any, extend: Any) -> Side:
        config = self.config
        spec = PlaneSpec((*config.score.planes(), *config.budget.planes(config.score)))
        pool: Any = bind_pool_class(spec, IMPL, base)(
            (pages - 1) * self.page, page_size=self.page, dtype=torch.bfloat16, head_num=HEADS,
            head_dim=DIM, layer_num=LAYERS, device=DEVICE.type, enable_memory_saver=False,
            start_layer=0, end_layer=LAYERS,
        )  # fmt: skip
        columns = Columns(SLOTS, DEVICE)
        requests = RequestTable(config, columns)
        heads = Heads(HEADS * GROUP, HEADS, DIM)
        build = allocate(config, pool, heads, columns, max_context=CONTEXT, impl=IMPL)
        if base is HostKVPool:
            build = self._with_frames(build, pool)
        score, budget = config.score.build(build), config.budget.build(build, config.score)
        programs = compile_programs(config, build, score, budget)
        return Side(
            pool, build,
            decode(config, build, budget, programs, requests, self.table, None),
            extend(build, None, requests, self.table, torch.bfloat16),
            programs,
            budget,
        )  # fmt: skip

    def _with_frames(self, build: Any, pool: Any) -> Any:
        """Frames in the smallest number that is allowed, so that they are replaced all the time."""
        pages = pages_to_copy(
            self.config, pool, request_slots=SLOTS, max_context=CONTEXT, prompts=self.prompts
        )
        prompts = HostPrompts(pool, request_slots=SLOTS, max_context=CONTEXT, pages=pages)
        self.needs = frame_needs(
            self.config, pool, build.limits,
            request_slots=SLOTS, max_context=CONTEXT, copy_pages=pages,
        )  # fmt: skip
        fewest = self.needs.demand.blocks
        return replace(build, fetched=HostFrames(pool, build, self.needs, fewest, prompts))

    # The schedule.

    def can_begin(self, count: int = 1) -> bool:
        """Whether there are slots and room for so many requests of the greatest length."""
        room = len(self.free_pages) >= count * (CONTEXT // self.page)
        return room and len(self.free_slots) >= count

    def begin(self, *prompts: Prompt) -> None:
        """Prefill new requests together, each in chunks; its last one may end within a page."""
        begun = []
        for prompt in prompts:
            shared = [] if prompt.prefix is None else prompt.prefix.pages
            length = len(shared) * self.page
            request = Request(self.free_slots.pop(), list(shared), length, len(shared))
            if prompt.prefix is not None:
                prompt.prefix.users += 1
            end = min(length + prompt.tokens, CONTEXT - self.page)
            begun.append((request, end, prompt.chunk_pages * self.page))
        while chunks := [
            (request, min(end, request.length + chunk))
            for request, end, chunk in begun
            if request.length < end
        ]:
            self._prefill(chunks)
        self.running += [request for request, *_ in begun]

    def _grow(self, request: Request, length: int) -> None:
        while len(request.pages) * self.page < length:
            request.pages.append(self.free_pages.pop(self.rng.randrange(len(self.free_pages))))
        positions = torch.arange(length)
        slots = torch.tensor(request.pages)[positions // self.page] * self.page
        self.table[request.slot, :length] = (slots + positions % self.page).int().to(DEVICE)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.numbers).bfloat16().to(DEVICE)

    def _prefill(self, chunks: list[tuple[Request, int]]) -> None:
        """Prefill requests up to so many tokens: one by one on the device, at once on the host."""
        new = sum(end - request.length for request, end in chunks)
        k, v = (self._random(LAYERS, new, HEADS, DIM) for _ in "kv")
        first = 0
        for request, end in chunks:
            self._grow(request, end)
            at = slice(first, first + end - request.length)
            self._prefill_resident(request, end, k[:, at], v[:, at])
            first = at.stop
        # The steps of `hosted` are those of a hosted server.
        self.hosted.extend.plan_batch(_extend_batch(chunks))
        inner, copies = self.seen.token_to_kv_pool, self.frames.prompts.table
        rows = torch.cat([self.table[request.slot, :end].long() for request, end in chunks])
        copied = torch.cat([copies[request.slot, :end].long() for request, end in chunks])
        assert len(copied.unique()) == len(copied), "requests share rows of a copy"
        for layer in range(LAYERS):
            self.hosted.extend.begin_layer(layer)  # type: ignore[attr-defined]
            inner.set_kv_buffer(SimpleNamespace(layer_id=layer), None, k[layer], v[layer])
            found = inner.get_kv_buffer(layer)
            for got, want in zip(found, self._resident_rows(layer), strict=True):
                assert torch.equal(got[copied], want[rows]), f"layer {layer} of a prompt"
            self.hosted.extend.end_layer(layer)
        for request, end in chunks:
            request.length = end

    def _prefill_resident(
        self, request: Request, end: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        slots = self.table[request.slot, request.length : end].long()
        self.resident.extend.plan_batch(_extend_batch([(request, end)]))
        for layer in range(LAYERS):
            self._write_resident(layer, slots, k[layer], v[layer])
            self.resident.extend.end_layer(layer)

    def _resident_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.resident.pool
        return pool.get_key_buffer(layer), pool.get_value_buffer(layer)

    def _write_resident(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        for rows, fresh in zip(self._resident_rows(layer), (k, v), strict=True):
            rows[slots] = fresh

    def step(self, padding: int = 0, *, graph: bool = False) -> None:
        """Decode a token of each running request; rows behind them pad a graph's batch.

        With `graph` the hosted side reads what graphs read. On a GPU a batch of so many rows is
        captured behind its first step, and replayed from then on.
        """
        rows = [request for request in self.running if request.length < CONTEXT]
        if not rows or len(self.free_pages) < len(rows):
            return
        for request in rows:
            request.length += 1
            self._grow(request, request.length)
            self.filled += request.length % self.page == 0
        padding = min(padding, SLOTS - len(rows))
        lengths = [request.length for request in rows] + [1] * padding
        slots = [request.slot for request in rows] + [0] * padding
        last = [self.table[r.slot, r.length - 1].long() for r in rows]
        loc = torch.stack([*last, *[torch.zeros_like(last[0])] * padding])
        mode = SimpleNamespace(is_target_verify=lambda: False)
        batch = SimpleNamespace(
            batch_size=len(slots), req_pool_indices=torch.tensor(slots, device=DEVICE),
            seq_lens=torch.tensor(lengths, device=DEVICE), seq_lens_cpu=torch.tensor(lengths),
            forward_mode=mode,
        )  # fmt: skip
        # A stand-in for SGLang's batch.
        self.resident.decode.plan_batch(batch, graph=False)  # type: ignore[arg-type]
        self.hosted.decode.plan_batch(batch, graph=graph)  # type: ignore[arg-type]
        q = self._random(LAYERS, len(slots), HEADS * GROUP, DIM)
        k, v = (self._random(LAYERS, len(slots), HEADS, DIM) for _ in "kv")
        found = self._captured(q, k, v, loc) if graph else self._decode_hosted(q, k, v, loc)
        for layer, got in enumerate(found):
            self._write_resident(layer, loc, k[layer], v[layer])
            want = self._attend(self.resident, layer, q[layer])
            assert not want[: len(rows)].isnan().any()
            assert torch.equal(got[: len(rows)], want[: len(rows)]), f"layer {layer} of a step"
            self.resident.decode.end_layer(layer)

    @staticmethod
    def _attend(side: Side, layer: int, q: torch.Tensor) -> torch.Tensor:
        return side.decode.run(side.programs[layer], q, Softmax(0.125), KVScales())

    def _decode_hosted(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor
    ) -> list[torch.Tensor]:
        """Outputs of all layers, [rows, query heads, dim] each."""
        found = []
        for layer in range(LAYERS):
            self.frames.store(layer, k[layer], v[layer], loc)
            found.append(self._attend(self.hosted, layer, q[layer]))
            self.hosted.decode.end_layer(layer)
        return found

    def _captured(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """`_decode_hosted`, replayed where a batch of so many rows was captured."""
        rows = inputs[0].shape[1]
        if rows in self.graphs:
            graph, held, found = self.graphs[rows]
            for tensor, fresh in zip(held, inputs, strict=True):
                tensor.copy_(fresh)
            graph.replay()
            return [tensor.clone() for tensor in found]
        outputs = self._decode_hosted(*inputs)
        if HAS_GPU:
            held = tuple(tensor.clone() for tensor in inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = self._decode_hosted(*held)
            self.graphs[rows] = graph, held, found
        return outputs

    def end(self, request: Request, *, keep: bool) -> None:
        """End a request: its full pages become a prefix, or it was aborted and they are free."""
        self.running.remove(request)
        self.free_slots.append(request.slot)
        full = request.length // self.page if keep else request.shared
        self._unlock(request)
        self.free_pages += request.pages[max(full, request.shared) :]
        if full > request.shared:
            self.prefixes.append(Prefix(request.pages[:full]))

    def _unlock(self, request: Request) -> None:
        shared = request.pages[: request.shared]
        owner = next((one for one in self.prefixes if one.pages[: len(shared)] == shared), None)
        if shared and owner is not None:
            owner.users -= 1

    def evict(self, prefix: Prefix) -> None:
        """Give a prefix's pages back, but for those that another one begins with."""
        self.prefixes.remove(prefix)
        kept = {page for one in self.prefixes for page in one.pages}
        kept |= {page for request in self.running for page in request.pages}
        self.free_pages += [page for page in prefix.pages if page not in kept]

    # What always holds.

    def check(self) -> None:
        """Full pages are on the host, their planes are right, and no frame has two blocks."""
        held = {page for one in self.prefixes for page in one.pages}
        for request in self.running:
            held |= set(request.pages[: request.length // self.page])
        pages = torch.tensor(sorted(held), dtype=torch.int64)
        host = self.hosted.pool.host
        for layer in range(LAYERS):
            for part, rows in enumerate(self._resident_rows(layer)):
                want = rows.view(-1, self.page, HEADS, DIM)[pages.to(DEVICE)].cpu()
                assert torch.equal(host[layer, pages, :, part].transpose(1, 2).cpu(), want)
        for side in (self.resident, self.hosted):
            assert side.pool.verify_planes(pages.to(DEVICE)) == []
        pool = self.frames.frames
        owner, cached = pool.owner.cpu(), pool.cached
        found = pool.frame_of.flatten().cpu()
        blocks = ((found >= 0) & (found < cached)).nonzero().flatten()
        assert len(found[blocks].unique()) == len(blocks), "a frame with two blocks"
        assert torch.equal(owner[found[blocks].long()].long(), blocks)
        assert pool.counters[2] == 0
        flushed = self.frames.counts(wait=True)["flushed_bytes"]
        assert flushed == self.filled * self.hosted.pool.host[:, 0].nbytes


def _extend_batch(chunks: list[tuple[Request, int]]) -> Any:
    """A stand-in for SGLang's batch: requests, and how many tokens they have after it."""
    ends, starts = [end for _, end in chunks], [request.length for request, _ in chunks]
    return SimpleNamespace(
        req_pool_indices=torch.tensor([request.slot for request, _ in chunks], device=DEVICE),
        seq_lens=torch.tensor(ends, device=DEVICE),
        extend_prefix_lens=torch.tensor(starts, device=DEVICE),
        extend_seq_lens_cpu=[end - start for start, end in zip(starts, ends, strict=True)],
        extend_prefix_lens_cpu=starts,
    )
