# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill: no prompt meets a shape that its kernels were not compiled for at start."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.backend.prefill import SparsePrefill, TileBatch
from sglang_sparse.config import SparseConfig, TilePrefill

PRESET = Path(__file__).parents[2] / "configs" / "llama-3.1-8b" / "kascade.json"
HEADS, GROUP, DIM, PAGE = 2, 4, 64, 64


def prefill_of(fraction: float) -> SparsePrefill:
    """Sparse prefill of an anchor and of a layer that reuses; nothing of it is launched."""
    config = SparseConfig.model_validate(json.loads(PRESET.read_text()))
    choice = TilePrefill(fraction=fraction, min_tokens=8192)
    parts: dict[str, Any] = {
        "buffers": SimpleNamespace(query_heads=HEADS * GROUP),
        "k_buffer": torch.zeros((PAGE, HEADS, DIM)),
        "head_map": None,
    }
    programs: Any = {
        0: SimpleNamespace(scorer=object(), dense=True, **parts),
        1: SimpleNamespace(scorer=None, dense=False, **parts),
    }
    pool: Any = SimpleNamespace(page_size=PAGE, head_num=HEADS)
    return SparsePrefill(config, choice, pool, programs, "triton")


def shape_of(batch: TileBatch) -> tuple[int, ...]:
    """What the kernels of a batch are compiled for."""
    scratch = (batch.topk.block_max.shape[2], batch.topk.blocks.shape[2])
    return (batch.scores.shape[2], batch.indices.shape[2], *scratch)


@pytest.mark.parametrize(("max_pages", "fraction"), [(2049, 0.1), (700, 0.0300006), (130, 1.0)])
def test_every_chunk_of_every_prompt_has_a_shape_that_was_compiled_at_start(
    monkeypatch: pytest.MonkeyPatch, max_pages: int, fraction: float
) -> None:
    prefill, compiled = prefill_of(fraction), set()

    def run(batch: TileBatch, program: Any, q: torch.Tensor, **_: float) -> torch.Tensor:
        assert q.shape == (len(batch.counts) * prefill.tile_tokens, HEADS * GROUP, DIM)
        compiled.add((program.dense, shape_of(batch)))
        return q

    monkeypatch.setattr(prefill, "run", run)
    prefill.warm_up(max_pages)
    table = torch.zeros((1, max_pages), dtype=torch.int32)
    source = random.Random(max_pages)
    longest = max_pages * PAGE
    for start in [8192, longest - PAGE, *(source.randrange(0, longest - PAGE) for _ in range(30))]:
        new = min(source.choice([1, 33, 512]), longest - start)
        batch = prefill.plan(table, [start], [new], [])
        if start + new - 1 < 8192 + prefill.tile_tokens:
            continue
        assert batch is not None
        assert batch.plan.max_units <= batch.indices.shape[2]
        for dense in (True, False):
            assert (dense, shape_of(batch)) in compiled
        # Alignment is part of what a kernel is compiled for.
        rows = batch.plan.rows
        for vector in (rows.seq_lens, rows.tail_start, rows.k_units, rows.update_start):
            assert vector.data_ptr() % 16 == 0
