# SPDX-License-Identifier: Apache-2.0
"""A sparse prompt reads the pool's buffers itself, so it waits for loads from the host itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.backend.allocate import Heads, allocate
from sglang_sparse.backend.attention import SparseAttentionBackend
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.kv_scales import StoredKV
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Columns
from sglang_sparse.config import SparseConfig
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

LAYERS, HEADS, DIM, PAGE, PAGES = 2, 2, 64, 64, 8
PREFIX, LENGTH = 4 * PAGE, 421
SCORES = {
    "block_bounds": {"kind": "page_minmax", "logical_page": 16},
    "tile_topk": {"kind": "key_sketch"},
}


def answers(kind: str, *, loaded: bool) -> torch.Tensor:
    """What layers answer to the end of a prompt; behind it, all planes are right.

    Its prefix is there, or each layer of it comes when it is waited for; NaN is there until then.
    """
    config = SparseConfig.model_validate(
        {
            "layers": {"kind": "every"}, "score": SCORES[kind], "sink_tokens": 16,
            "recent_tokens": 32, "budget": {"kind": "tokens", "tokens": 128},
            "prefill": {"kind": kind, "fraction": 0.4, "floor": 128, "min_tokens": 160},
        }
    )  # fmt: skip
    pool: Any = bind_pool_class(PlaneSpec(tuple(config.score.planes())), "torch")(
        PAGES * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip
    for tensor in (*pool.k_buffer, *pool.v_buffer, *pool.planes.tensors().values()):
        tensor.view(torch.uint8).fill_(255)
    columns = Columns(2, torch.device("cpu"))
    requests = RequestTable(config, columns)
    heads = Heads(2 * HEADS, HEADS, DIM)
    build = allocate(config, pool, heads, columns, max_context=PAGES * PAGE, impl="torch")
    score, budget = config.score.build(build), config.budget.build(build, config.score)
    programs = compile_programs(config, build, score, budget)
    numbers = torch.Generator().manual_seed(1)
    pages = torch.randperm(PAGES, generator=numbers) + 1
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    # A stand-in for the backend with the parts that a layer of a prompt asks.
    backend: Any = object.__new__(SparseAttentionBackend)
    backend.token_to_kv_pool, backend._programs = pool, programs
    backend._stored = StoredKV(pool.dtype, "torch_native", [])
    prefill = config.prefill.build(build, config.score, programs)
    backend.extend = ExtendSteps(build, prefill, requests, slots[None].int(), torch.bfloat16)
    q, k, v = (
        torch.randn(LAYERS, LENGTH, count, DIM, generator=numbers).bfloat16()
        for count in (2 * HEADS, HEADS, HEADS)
    )

    def load(layer: int) -> None:
        for rows, values in ((pool.k_buffer, k), (pool.v_buffer, v)):
            rows[layer][slots[:PREFIX]] = values[layer, :PREFIX]

    if loaded:
        pool.layer_transfer_counter = SimpleNamespace(consumer_index=0, wait_until=load)
        pool.loads.expect(0, slots[:PREFIX])
    else:
        for layer in range(LAYERS):
            load(layer)
        start, end = (torch.tensor([n], dtype=torch.int32) for n in (0, PREFIX))
        pool.update_planes(pages[None].int(), start, end, max_new_tokens=PREFIX)
    batch = SimpleNamespace(
        req_pool_indices=torch.zeros(1, dtype=torch.int64), seq_lens=torch.tensor([LENGTH]),
        extend_prefix_lens=torch.tensor([PREFIX]), extend_prefix_lens_cpu=[PREFIX],
        extend_seq_lens_cpu=[LENGTH - PREFIX], out_cache_loc=slots[PREFIX:LENGTH],
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
    )  # fmt: skip
    backend.extend.plan_batch(batch)
    found = []
    shape = {"tp_q_head_num": 2 * HEADS, "head_dim": DIM, "scaling": 0.125, "logit_cap": 0.0}
    for number in range(LAYERS):
        new = (rows[number, PREFIX:] for rows in (q, k, v))
        layer = SimpleNamespace(layer_id=number, **shape)
        found.append(backend.forward_extend(*new, layer, batch))
    assert pool.verify_planes(pages[: LENGTH // PAGE]) == []
    return torch.stack(found)


@pytest.mark.parametrize("kind", SCORES)
def test_a_prefix_on_its_way_from_the_host_gives_the_bits_of_one_that_is_there(kind: str) -> None:
    there = answers(kind, loaded=False)
    assert not there.isnan().any()
    assert torch.equal(answers(kind, loaded=True), there)
