# SPDX-License-Identifier: Apache-2.0
"""Batches and prompts of LServe's preset, run by what a server compiles of it, and their checks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cases import LayerData, Shape

from sglang_sparse.backend.allocate import allocate
from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.heads import Heads, head_kinds
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Build, Columns, LayerProgram
from sglang_sparse.config import SparseConfig, deep_merge, load_preset
from sglang_sparse_kernels import (
    BLOCK_UNITS,
    KVScales,
    Lists,
    TilePlan,
    page_minmax_score,
    select_topk,
    tile_attention,
    tile_mean,
)
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

DEVICE = "cuda"
MODEL = Shape(context=0, batch=0, budget=4096)
PRESET = load_preset("llama-3.1-8b", "lserve")
CHANGES: dict[str, Any] = {}  # what differs from the preset
EVERY = 4  # steps between selections, as the preset says
PROMPT: dict[str, Any] = {"kind": PRESET.prefill.kind, "floor": PRESET.prefill.floor}
CHECKED_DECODE, CHECKED_PREFILL = (20_001, 3), 4001
CHECKED_PROMPT = {"min_tokens": 1500, "fraction": 0.1, "floor": 1024}
# Calls that a timed graph holds at least, so that to start it, some 10 us, is no part of a call.
CALLS = 32
SCORE, SELECT, ATTEND, ALL = slice(0, 1), slice(1, 2), slice(2, 3), slice(None)
# P and the output are rounded to bf16, which is a quarter of it.
MOST_ERROR = 1e-2
Streaming = Sequence[tuple[int, ...]]


def streaming_heads() -> Streaming:
    """Streaming heads of each layer of the preset."""
    return PRESET.heads.streaming


def halves(layers: int) -> Streaming:
    """Streaming heads of ``layers`` layers, each with half of its heads streaming."""
    found = [heads for heads in streaming_heads() if 2 * len(heads) == MODEL.heads]
    return [found[i % len(found)] for i in range(layers)]


def config_of(streaming: Streaming, **changes: Any) -> SparseConfig:
    """The preset with these heads, a list a layer, of which there may be fewer than the model's."""
    heads = {"model": None, "heads": {"streaming": streaming}}
    content = deep_merge(deep_merge(PRESET.model_dump(), CHANGES), heads)
    return SparseConfig.model_validate(deep_merge(content, changes))


def random_pool(config: SparseConfig, shape: Shape, pages: int, layers: int) -> Any:
    """The server's KV pool for ``pages`` pages beside the padding page, filled at random."""
    pool = bind_pool_class(PlaneSpec(config.score.planes()), "triton")(
        pages * shape.page_size, page_size=shape.page_size, dtype=shape.dtype,
        head_num=shape.heads, head_dim=shape.dim, layer_num=layers, device=DEVICE,
        enable_memory_saver=False, start_layer=0, end_layer=layers,
    )  # fmt: skip
    for rows in (*pool.k_buffer, *pool.v_buffer):
        rows.normal_()
    return pool


def random_queries(shape: Shape, tokens: int) -> torch.Tensor:
    """[tokens, query heads, dim]."""
    return torch.randn(tokens, shape.heads * shape.group, shape.dim, device=DEVICE).to(shape.dtype)


def heads_of(shape: Shape) -> Heads:
    """One rank that has all heads."""
    return Heads(shape.heads * shape.group, shape.heads, shape.dim, total_kv=shape.heads)


def programs_of(build: Build, config: SparseConfig, shape: Shape) -> list[LayerProgram]:
    """A program a layer, of the heads that stream in ``config``."""
    layers = range(build.pool.start_layer, build.pool.end_layer)
    kinds = head_kinds(config, layers, heads_of(shape), lists=shape.heads, device=build.device)
    build = replace(build, kinds=kinds)
    score, budget = config.score.build(build), config.budget.build(build, config.score)
    return list(compile_programs(config, build, score, budget).values())


def head_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error of a token's output of one head.

    Raises:
        AssertionError: it is too large, or no number.
    """
    got, want = got.float(), want.float()
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
    assert error < MOST_ERROR, f"attention: relative error {error}"
    return error


def check_scores(got: torch.Tensor, want: torch.Tensor, units: int) -> float:
    """Relative error of scores, NaN where none is due.

    Raises:
        AssertionError: they are wrong, or not ``units`` in all.
    """
    defined = ~want.isnan()
    assert torch.equal(defined, ~got.isnan()), "scores are written where they should be"
    assert int(defined.sum()) == units, f"{int(defined.sum())} scores, not {units}"
    got, want = got[defined], want[defined]
    error = float((got - want).norm() / want.norm())
    assert error < 1e-5, f"page scores: relative error {error}"
    return error


class DecodeCase:
    """Requests with KV of their own, ``layers`` sets of it, and the steps that a server runs.

    Attributes:
        half: programs of layers in which half of the heads stream.
        preset: those of all layers of the preset, over the same KV in turn.
    """

    def __init__(self, shape: Shape, layers: int) -> None:
        self.shape, self.device = shape, torch.device(DEVICE)
        self.config = config = config_of(halves(layers))
        size, rows = shape.page_size, shape.batch
        pages = -(-(shape.context + EVERY) // size)
        pool = random_pool(config, shape, rows * pages, layers)
        columns = Columns(rows + 1, self.device)
        requests = RequestTable(config, columns)
        # The clock of all requests is such that they select anew at ``context`` tokens.
        requests.decode_start.fill_(shape.context - 1)
        self.build = build = allocate(
            config, pool, heads_of(shape), columns, max_context=pages * size, impl="triton"
        )
        self.half = programs_of(build, config, shape)
        every = streaming_heads()
        self.preset = [
            program
            for start in range(0, len(every) // layers * layers, layers)
            for program in programs_of(build, config_of(every[start : start + layers]), shape)
        ]
        tokens = torch.arange(rows * pages * size, device=self.device, dtype=torch.int32)
        table = torch.zeros((rows + 1, pages * size), dtype=torch.int32, device=self.device)
        table[1:] = (size + tokens).view(rows, -1)
        self.slots = torch.arange(1, rows + 1, device=self.device)
        budget = config.budget.build(build, config.score)
        programs = {program.layer: program for program in self.half}
        self.steps = {
            impl: DecodeSteps(
                config, replace(build, impl=impl), budget, programs, requests, table, None
            )
            for impl in ("triton", "torch")
        }
        self.layers = [
            LayerData(q, program.k, program.v, pool.planes, torch.empty_like(q))
            for program in self.half
            for q in [random_queries(shape, rows)]
        ]
        self.step_to(0)
        starts = torch.zeros_like(self.plan.seq_lens)
        pool.update_planes(
            self.plan.page_table, starts, self.plan.seq_lens, max_new_tokens=shape.context
        )

    @property
    def plan(self) -> Any:
        """The plan that kernels read."""
        return self.steps["triton"].plan

    def step_to(self, step: int) -> None:
        """Plan the ``step``-th step after one in which all requests select anew."""
        lengths = torch.full_like(self.slots, self.shape.context + step)
        batch: Any = SimpleNamespace(
            batch_size=len(lengths), req_pool_indices=self.slots, seq_lens=lengths,
            forward_mode=SimpleNamespace(is_target_verify=lambda: False),
        )  # fmt: skip
        for steps in self.steps.values():
            steps.plan_batch(batch, graph=False)

    def run(self, program: LayerProgram, stages: slice = ALL, impl: str = "triton") -> torch.Tensor:
        """Run some stages of a layer; its output, [rows, query heads, dim]."""
        program = replace(program, stages=program.stages[stages])
        layer = self.layers[program.layer]
        return self.steps[impl].run(program, layer.q, self.shape.softmax, KVScales())

    def run_poisoned(self, program: LayerProgram) -> torch.Tensor:
        """A whole layer, whose output most likely lies where NaNs were freed."""
        torch.full_like(self.layers[program.layer].q, torch.nan)
        return self.run(program)

    def calls(self, programs: list[LayerProgram], stages: slice = ALL) -> list[Callable[[], Any]]:
        """Enough calls for a graph, layer by layer."""
        calls = [partial(self.run, program, stages) for program in programs]
        return calls * -(-CALLS // len(calls))

    def check(self) -> dict[str, float]:
        """Errors of every operator of a selecting step, and of those that reuse its lists.

        Raises:
            AssertionError: one is wrong, or a step that reuses lists wrote scores or lists.
        """
        program, scores = self.half[-1], self.build.scores.values
        indices, counts = program.indices, program.counts
        self.step_to(0)
        want_plan = vars(self.steps["torch"].plan)
        for name, tensor in vars(self.plan).items():
            if name != "page_table":
                assert torch.equal(tensor, want_plan[name]), f"plan_decode: {name}"
        scores.fill_(torch.nan)
        indices.fill_(-1)
        got_out = self.run_poisoned(program)
        got = scores.clone()
        got_lists, got_counts = indices[1:].clone(), counts[1:].clone()
        scores.fill_(torch.nan)
        self.run(program, SCORE, "torch")
        units = self.selecting * -(-(self.shape.context - 1) // self.config.unit)
        errors = {"score": check_scores(got, scores, units)}
        scores.copy_(got)
        indices.fill_(-1)
        self.run(program, SELECT, "torch")
        assert torch.equal(indices[1:], got_lists), "select_topk: units"
        assert torch.equal(counts[1:], got_counts), "select_topk: counts"
        errors["attend"] = head_error(got_out, self.run(program, ATTEND, "torch"))
        for step in range(1, EVERY):
            self.step_to(step)
            scores.fill_(torch.nan)
            got_out = self.run_poisoned(program)
            assert bool(scores.isnan().all()), "a step that reuses lists scored"
            assert torch.equal(indices[1:], got_lists), "a step that reuses lists selected"
            want_out = self.run(program, ATTEND, "torch")
            errors[f"attend, step {step}"] = head_error(got_out, want_out)
        self.step_to(0)
        return errors

    @property
    def selecting(self) -> int:
        """Lists of a layer that are selected, of all rows."""
        return self.shape.batch * (self.shape.heads - len(self.config.heads.streams_in(0)))

    def bytes_moved(self) -> dict[str, float]:
        """Bytes that each stage of a layer has to move where half of the heads stream."""
        s, config = self.shape, self.config
        token = 2 * s.dim * s.dtype.itemsize
        pages, units = s.context / config.score.logical_page, s.context / config.unit
        capacity = self.build.limits.capacity_units
        window = min(sum(config.heads.window), s.context)
        streams = s.batch * s.heads - self.selecting
        attend = self.selecting * min(s.budget + 1, s.context) + streams * window
        return {
            "score": self.selecting * (pages * token + units * (4 + 4 / BLOCK_UNITS)),
            "select": self.selecting * (4 * units / BLOCK_UNITS + capacity * 4 * (BLOCK_UNITS + 1)),
            "attend": attend * token,
        }


class PromptCase:
    """The tokens of one prompt behind its first ``prefix`` ones, in one batch of tiles."""

    def __init__(self, shape: Shape, prefix: int = 0) -> None:
        self.shape, self.prefix = shape, prefix
        s, self.new = shape, shape.context - prefix
        self.config = config = config_of(halves(1), prefill=PROMPT | CHECKED_PROMPT)
        device, pages = torch.device(DEVICE), -(-s.context // s.page_size)
        self.pool = random_pool(config, s, pages, 1)
        self.q = random_queries(s, self.new)
        self.out = torch.empty_like(self.q)
        self.table = (torch.randperm(pages, device=device) + 1).int()[None]
        self.build = allocate(
            config, self.pool, heads_of(s), Columns(2, device), max_context=pages * s.page_size,
            impl="triton",
        )  # fmt: skip
        (self.program,) = programs_of(self.build, config, s)

    def prompt(self, **changes: Any) -> None:
        """Plan the prompt under a prefill with some keys changed."""
        config = config_of(halves(1), prefill=PROMPT | changes)
        programs = {0: self.program}
        run = config.prefill.build(self.build, config.score, programs)
        assert run is not None
        self.prefill: Any = run
        self.batch = run.plan(self.table, [self.prefix], [self.new], [])
        if self.batch is None:
            least = config.prefill.min_tokens
            raise ValueError(
                f"a prompt of {self.shape.context} tokens: tiles select behind {least}"
            )
        plan = self.plan
        assert len(self.batch.scores.values) >= plan.rows.num_rows, "scores take one pass"
        tiles = plan.rows.num_rows
        self.means = torch.empty((tiles, *self.q.shape[1:]), dtype=self.q.dtype, device=DEVICE)
        self.lists = Lists(
            self.batch.indices, self.batch.counts, plan.rows.request_slots, config.unit,
            windows=self.program.windows,
        )  # fmt: skip
        unread = self.build.kinds.unread.get(0)
        self.scores = replace(self.batch.scores.rows(tiles), unread=unread)

    @property
    def plan(self) -> TilePlan:
        """The prompt's tiles."""
        return self.batch.plan

    def served(self) -> torch.Tensor:
        """The whole layer, as a server runs it."""
        return self.prefill.run(self.batch, 0, self.q, self.shape.softmax, KVScales())

    def update(self) -> None:
        """Bounds of all pages of the prompt; a batch alone would leave out those of the prefix."""
        spans = self.batch.spans
        self.pool.update_planes(
            spans.page_table,
            torch.zeros_like(spans.prefix),
            spans.end,
            max_new_tokens=spans.longest,
        )

    def mean(self, impl: Any = "triton") -> None:
        """Mean query of every tile."""
        tile_mean(self.q, self.plan, out=self.means, impl=impl)

    def score(self, impl: Any = "triton") -> None:
        """Scores of the units before every tile."""
        choice: Any = self.config.score
        page_minmax_score(
            self.means, self.build.cuboids(0, choice.cuboids(bound=False)), self.plan.rows,
            unit=self.config.unit, reduce=choice.reduce, out=self.scores, impl=impl,
        )  # fmt: skip

    def select(self, impl: Any = "triton") -> None:
        """Lists of every tile."""
        select_topk(
            self.scores, self.plan.rows, replace(self.lists, windows=None),
            always=replace(self.build.always, recent=max(1, self.build.always.recent)),
            workspace=self.batch.topk.rows(self.plan.rows.num_rows), impl=impl,
        )  # fmt: skip

    def attend(self, impl: Any = "triton") -> None:
        """Attention to lists, windows and the tiles themselves."""
        kv = self.program.kv(self.plan.rows.page_table, self.shape.page_size, KVScales())
        tile_attention(
            self.q, kv, self.plan, self.lists, softmax=self.shape.softmax, out=self.out, impl=impl
        )

    def check(self) -> dict[str, float]:
        """Errors of every operator, and that a server's prompt gives the same bits as they do.

        Raises:
            AssertionError: one is wrong.
        """
        self.prompt(**CHECKED_PROMPT)
        for filled in (self.scores.values, self.means, self.out):
            filled.fill_(torch.nan)
        self.lists.indices.fill_(-1)
        for operator in (self.update, self.mean, self.score, self.select, self.attend):
            operator()
        means, scores, out = self.means.clone(), self.scores.values.clone(), self.out.clone()
        lists, counts = self.lists.indices.clone(), self.lists.counts.clone()
        self.mean("torch")
        torch.testing.assert_close(means, self.means, rtol=2**-7, atol=1e-5)
        self.means.copy_(means)
        self.scores.values.fill_(torch.nan)
        self.score("torch")
        rows, read = self.plan.rows, len(self.scores.read)
        units = int((-(-rows.tail_start // self.config.unit) * (rows.k_units > 0)).sum())
        errors = {"score": check_scores(scores, self.scores.values, units * read)}
        self.scores.values.copy_(scores)
        self.select("torch")
        assert torch.equal(self.lists.counts, counts), "select_topk: counts"
        listed = torch.arange(lists.shape[2], device=DEVICE) < counts[..., None]
        assert torch.equal(self.lists.indices[listed], lists[listed]), "select_topk: units"
        self.attend("torch")
        errors["attend"] = head_error(out, self.out)
        assert torch.equal(self.served(), out), "a served prompt differs from its operators"
        return errors

    def flops(self) -> dict[str, float]:
        """Operations of products over the pages that are scored and the keys attended to."""
        s, rows = self.shape, self.plan.rows
        first, end, tail = (x.double() for x in (rows.update_start, rows.seq_lens, rows.tail_start))
        queries, within = end - first, (end - first + 1) / 2
        listed = (rows.k_units * self.config.unit).double().clamp(max=tail)
        streams = len(self.config.heads.streams_in(0))
        window = end.clamp(max=sum(self.config.heads.window))
        sparse = (s.heads - streams) * (listed + within) + streams * window
        keys = torch.where(tail > 0, sparse, s.heads * (first + within))
        pages = float(tail.sum()) / self.config.score.logical_page
        product = 4 * s.group * s.dim
        return {
            "score": pages * (s.heads - streams) * product,
            "attend": float((queries * keys).sum()) * product,
        }
