# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: no prompt meets a shape that its kernels were not compiled for at start."""

import random
from typing import Any

import pytest
import torch

from sglang_sparse.backend.allocate import Heads, allocate
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.choices.build import Columns
from sglang_sparse.choices.prefill._tiles import TileBatch, TileRun
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.records import Softmax
from sglang_sparse_kernels.tiles import TilePlan, plan_tiles
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

HEADS, GROUP, DIM, PAGE = 2, 4, 64, 64


def prefill_of(fraction: float, **more: int) -> TileRun:
    """Sparse prefill of an anchor and of a layer that reuses; nothing of it is launched."""
    config = SparseConfig.model_validate(
        {
            "layers": {"kind": "anchors", "anchors": [0]},
            "score": {"kind": "exact"},
            "budget": {"kind": "fraction", "fraction": fraction, "floor": 128},
            "prefill": {"kind": "tile_topk", "fraction": fraction, "min_tokens": 8192, **more},
        }
    )
    pool = bind_pool_class(PlaneSpec(), "torch")(
        PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM, layer_num=2,
        device="cpu", enable_memory_saver=False, start_layer=0, end_layer=2,
    )  # fmt: skip
    heads, columns = Heads(HEADS * GROUP, HEADS, DIM), Columns(2, torch.device("cpu"))
    build = allocate(config, pool, heads, columns, max_context=PAGE, impl="triton")
    score, budget = config.score.build(build), config.budget.build(build, config.score)
    programs = compile_programs(config, build, score, budget)
    prefill = config.prefill.build(build, config.score, programs)
    assert isinstance(prefill, TileRun)
    return prefill


def shape_of(batch: TileBatch) -> tuple[int, ...]:
    """What the kernels of a batch are compiled for."""
    scratch = (batch.scores.block_max.shape[2], batch.topk.blocks.shape[2])
    return (batch.scores.values.shape[2], batch.indices.shape[2], *scratch)


@pytest.mark.parametrize("least", [1, 500])
@pytest.mark.parametrize(("max_pages", "fraction"), [(2049, 0.1), (700, 0.0300006), (130, 1.0)])
def test_every_chunk_of_every_prompt_has_a_shape_that_was_compiled_at_start(
    monkeypatch: pytest.MonkeyPatch, max_pages: int, fraction: float, least: int
) -> None:
    prefill, compiled = prefill_of(fraction, min_new_tokens=least), set()

    softmax = Softmax(0.125, logit_cap=30.0)

    def run(
        batch: TileBatch, layer: int, q: torch.Tensor, given: Softmax, _: object
    ) -> torch.Tensor:
        assert given is softmax
        assert q.dtype == torch.float16
        assert q.shape == (len(batch.counts) * prefill.tile_tokens, HEADS * GROUP, DIM)
        compiled.add((layer, shape_of(batch)))
        return q

    monkeypatch.setattr(prefill, "run", run)
    prefill.warm_up(max_pages, torch.float16, softmax)
    table = torch.zeros((1, max_pages), dtype=torch.int32)
    source = random.Random(max_pages)
    longest = max_pages * PAGE
    for start in [8192, longest - PAGE, *(source.randrange(0, longest - PAGE) for _ in range(30))]:
        new = min(source.choice([1, 33, 512]), longest - start)
        batch = prefill.plan(table, [start], [new], [])
        if start + new - 1 < 8192 + prefill.tile_tokens or new < least:
            continue
        assert batch is not None
        assert batch.plan.max_units <= batch.indices.shape[2]
        for layer in (0, 1):
            assert (layer, shape_of(batch)) in compiled
        # Alignment is part of what a kernel is compiled for.
        rows = batch.plan.rows
        for vector in (rows.seq_lens, rows.tail_start, rows.k_units, rows.update_start):
            assert vector.data_ptr() % 16 == 0


def test_a_chunk_of_few_new_tokens_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, asked = prefill_of(0.1, min_new_tokens=128), []

    def plan(*args: Any, dense: list[bool], **kw: Any) -> TilePlan:
        asked.append(dense)
        return plan_tiles(*args, dense=dense, **kw)

    monkeypatch.setattr("sglang_sparse_kernels.tiles.plan_tiles", plan)
    table = torch.zeros((3, 2049), dtype=torch.int32)
    long = [30_000] * 3
    assert prefill.plan(table, long, [127, 64, 1], []) is None
    assert not asked  # nothing is planned for it
    assert prefill.plan(table, long, [128, 127, 500], []) is not None
    assert prefill.plan(table, long, [128, 127, 500], [False, False, True]) is not None
    assert prefill.plan(table, long, [128, 127, 500], [True, False, True]) is None
    assert asked == [[False, True, False], [False, True, True], [True, True, True]]
