# SPDX-License-Identifier: Apache-2.0
"""Batches of LServe's preset, run by what a server compiles of it, and their checks."""

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
from sglang_sparse_kernels import BLOCK_UNITS, KVScales
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

DEVICE = "cuda"
MODEL = Shape(context=0, batch=0, budget=4096)
PRESET = load_preset("llama-3.1-8b", "lserve")
CHANGES: dict[str, Any] = {}  # what differs from the preset
EVERY = 4  # steps between selections, as the preset says
CHECKED_DECODE = (20_001, 3)  # tokens and requests
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
