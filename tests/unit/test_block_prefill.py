# SPDX-License-Identifier: Apache-2.0
"""Prefill `block_bounds`: what tiles select, and that cuts of a prompt do not change a bit.

Nor does a prefix that is still on its way from the host, with `tile_topk` either.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from sglang_sparse.backend.allocate import Heads, allocate
from sglang_sparse.backend.attention import SparseAttentionBackend
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.backend.kv_scales import StoredKV
from sglang_sparse.backend.program import compile_programs
from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Columns
from sglang_sparse.choices.prefill._tiles import TileBatch, TileRun
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels import planes
from sglang_sparse_kernels.planes import update_planes
from sglang_sparse_kernels.records import KVScales, Softmax
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import bind_pool_class

HEADS, GROUP, DIM, PAGE, LENGTH = 2, 4, 64, 64, 421
SINK, LOCAL, UNIT, PAGES = 64, 64, 32, 9


def config_of(**heads: Any) -> SparseConfig:
    return SparseConfig.model_validate(
        {
            "layers": {"kind": "every"},
            "score": {"kind": "page_minmax", "logical_page": 16, "select": UNIT},
            "budget": {"kind": "tokens", "tokens": 128},
            "heads": {
                "kind": "streaming", "sink": SINK, "local": LOCAL, "streaming": [[1]],
                **heads,
            },
            "prefill": {
                "kind": "block_bounds", "fraction": 0.4, "floor": 128, "min_tokens": 160,
            },
            "sink_tokens": 16,
            "recent_tokens": 32,
        }
    )  # fmt: skip


def built(config: SparseConfig, impl: str, layers: int = 1) -> tuple[Any, ...]:
    """A pool full of NaN, its buffers, and the programs and the prefill over it."""
    spec = PlaneSpec(planes=config.score.planes())
    pool: Any = bind_pool_class(spec, impl)(
        (PAGES + 1) * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM,
        layer_num=layers, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=layers,
    )  # fmt: skip
    for tensor in (*pool.k_buffer, *pool.v_buffer, *pool.planes.tensors().values()):
        tensor.view(torch.uint8).fill_(255)
    heads, columns = Heads(HEADS * GROUP, HEADS, DIM, 0, HEADS), Columns(2, torch.device("cpu"))
    build = allocate(config, pool, heads, columns, max_context=PAGES * PAGE, impl=impl)
    score, budget = config.score.build(build), config.budget.build(build, config.score)
    programs = compile_programs(config, build, score, budget)
    prefill = config.prefill.build(build, config.score, programs)
    assert isinstance(prefill, TileRun)
    return pool, build, programs, prefill


class Prompt:
    """One layer, one prompt: its queries and keys, and a pool that it is written to by parts."""

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.q = torch.randn(LENGTH, HEADS * GROUP, DIM, generator=rng).bfloat16()
        self.k = torch.randn(LENGTH, HEADS, DIM, generator=rng).bfloat16()
        self.v = torch.randn(LENGTH, HEADS, DIM, generator=rng).bfloat16()
        self.table = (torch.randperm(PAGES, generator=rng)[None] + 1).int()

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table[0].long()[positions // PAGE] * PAGE + positions % PAGE

    def run(self, ends: list[int], impl: str, **heads: int) -> tuple[torch.Tensor, TileBatch]:
        """The output of a prompt that is prefilled up to each of ``ends``, and its last batch."""
        config = config_of(**heads)
        pool, _, _, prefill = built(config, impl)
        out = torch.full_like(self.q, float("nan"))
        for start, end in pairwise([0, *ends]):
            at = self.slots(torch.arange(start, end))
            pool.k_buffer[0][at], pool.v_buffer[0][at] = self.k[start:end], self.v[start:end]
            batch = prefill.plan(self.table, [start], [end - start], [])
            if batch is not None:
                q = self.q[start:end]
                out[start:end] = prefill.run(batch, 0, q, Softmax(DIM**-0.5), KVScales())
            spans = [torch.tensor([n], dtype=torch.int32) for n in (start, end)]
            pool.update_planes(self.table, *spans, max_new_tokens=end - start)
        return out, batch


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_prompt_that_is_cut_or_cached_answers_with_the_same_bits(impl: str) -> None:
    prompt = Prompt()
    whole, _ = prompt.run([LENGTH], impl)
    assert not whole.isnan().any()
    cut, _ = prompt.run([256, 320, LENGTH], impl)
    assert torch.equal(cut[256:], whole[256:])


def test_a_tile_selects_the_blocks_of_the_largest_bounds_of_its_mean_query() -> None:
    prompt = Prompt(3)
    _, batch = prompt.run([LENGTH], "triton")
    rows, checked = batch.plan.rows, 0
    for tile in range(rows.num_rows):
        tail, kept = int(rows.tail_start[tile]), int(rows.k_units[tile])
        if not kept:
            continue
        first, end = int(rows.update_start[tile]), int(rows.seq_lens[tile])
        # Rounded as the operator says: the mean of a tile is in the queries' dtype.
        mean = prompt.q[first:end].float().mean(0).bfloat16().double()[:GROUP]
        keys = prompt.k[:, 0].double()
        pages = [keys[p : min(p + 16, LENGTH)] for p in range(0, tail, 16)]
        up, low = (torch.stack([f(p, 0) for p in pages]) for f in (torch.amax, torch.amin))
        bounds = torch.maximum(mean[:, None] * up, mean[:, None] * low).sum(-1).amax(0)
        units = -(-tail // UNIT)
        joined = torch.stack([bounds[2 * u : 2 * u + 2].max() for u in range(units)])
        forced = [u for u in range(units) if u * UNIT < 16 or u >= (tail - 32) // UNIT]
        joined[forced] = float("inf")
        got = batch.indices[tile, 0, : int(batch.counts[tile, 0])].tolist()
        assert got == sorted(set(got))
        assert len(got) == min(kept, units)
        assert set(forced) <= set(got)
        left = [u for u in range(units) if u not in got]
        if left:
            # fp32 sums of products of bf16 numbers: far below the gaps that count.
            assert joined[got].min() >= joined[left].max() - 1e-3
            checked += 1
    assert checked > 2


@pytest.mark.parametrize(
    ("local", "heads"), [(LOCAL, {}), (2 * PAGE, {"prompt_local": 2 * PAGE})], ids=["same", "own"]
)
def test_a_head_that_streams_sees_its_window_alone(local: int, heads: dict[str, int]) -> None:
    prompt = Prompt(5)
    whole, _ = prompt.run([LENGTH], "triton", **heads)
    at = LENGTH - 1
    seen = torch.tensor([p for p in range(LENGTH) if p < SINK or p > at - local])
    logits = prompt.q[at, GROUP:].double() @ prompt.k[seen, 1].double().T * DIM**-0.5
    want = logits.softmax(-1) @ prompt.v[seen, 1].double()
    # P is rounded to bf16 before PV, and the output once more: 2 u of sums of |V| below 4.
    assert (whole[at, GROUP:].double() - want).abs().max() <= 2 * 2**-8 * 4


CHANGES: dict[str, dict[str, Any]] = {
    "block_bounds": {},
    "tile_topk": {
        "score": {"kind": "key_sketch"}, "heads": {"kind": "retrieval"},
        "prefill": {"kind": "tile_topk", "fraction": 0.4, "min_tokens": 160},
    },
}  # fmt: skip


def behind_a_prefix(kind: str, *, loaded: bool) -> torch.Tensor:
    """What two layers answer to the end of a prompt; all planes are right then.

    Its prefix is there, or each layer of it comes when it is waited for.
    """
    layers, prefix = [Prompt(0), Prompt(1)], 4 * PAGE
    content = config_of(streaming=[[1], [0]]).model_dump() | CHANGES[kind]
    config = SparseConfig.model_validate(content)
    pool, build, programs, prefill = built(config, "torch", len(layers))
    slots, pages = layers[0].slots(torch.arange(PAGES * PAGE)), layers[0].table

    def load(layer: int) -> None:
        pool.k_buffer[layer][slots[:prefix]] = layers[layer].k[:prefix]
        pool.v_buffer[layer][slots[:prefix]] = layers[layer].v[:prefix]

    if loaded:
        pool.layer_transfer_counter = SimpleNamespace(consumer_index=0, wait_until=load)
        pool.loads.expect(0, slots[:prefix])
    else:
        for layer in range(len(layers)):
            load(layer)
        start, end = (torch.tensor([n], dtype=torch.int32) for n in (0, prefix))
        pool.update_planes(pages, start, end, max_new_tokens=prefix)
    # What a layer of a prompt asks of a backend.
    backend: Any = object.__new__(SparseAttentionBackend)
    backend.token_to_kv_pool, backend._programs = pool, programs
    backend._stored = StoredKV(pool.dtype, "torch_native", [])
    requests = RequestTable(config, Columns(1, torch.device("cpu")))
    backend.extend = ExtendSteps(build, prefill, requests, slots[None].int(), torch.bfloat16)
    batch = SimpleNamespace(
        req_pool_indices=torch.zeros(1, dtype=torch.int64), seq_lens=torch.tensor([LENGTH]),
        extend_prefix_lens=torch.tensor([prefix]), extend_prefix_lens_cpu=[prefix],
        extend_seq_lens_cpu=[LENGTH - prefix], out_cache_loc=slots[prefix:LENGTH],
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
    )  # fmt: skip
    backend.extend.plan_batch(batch)
    shape = {"tp_q_head_num": HEADS * GROUP, "head_dim": DIM, "scaling": 0.125, "logit_cap": 0.0}
    found = []
    for number, layer in enumerate(layers):
        new = (rows[prefix:] for rows in (layer.q, layer.k, layer.v))
        of = SimpleNamespace(layer_id=number, **shape)
        found.append(backend.forward_extend(*new, of, batch))
    assert pool.verify_planes(pages[0, : LENGTH // PAGE].long()) == []
    return torch.stack(found)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_prefix_on_its_way_from_the_host_gives_the_bits_of_one_that_is_there(kind: str) -> None:
    there = behind_a_prefix(kind, loaded=False)
    assert not there.isnan().any()
    assert torch.equal(behind_a_prefix(kind, loaded=True), there)


def test_a_layer_sends_nothing_from_the_host_and_updates_planes_of_new_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU each layer would wait for such a copy, and look at all pages of the prefix."""
    prompt, prefix = Prompt(), 256
    pool, _, _, prefill = built(config_of(), "torch")
    at = prompt.slots(torch.arange(LENGTH))
    pool.k_buffer[0][at], pool.v_buffer[0][at] = prompt.k, prompt.v
    starts, ends = (torch.tensor([n], dtype=torch.int32) for n in (0, prefix))
    pool.update_planes(prompt.table, starts, ends, max_new_tokens=prefix)
    batch = prefill.plan(prompt.table, [prefix], [LENGTH - prefix], [])
    assert batch is not None
    bounds: list[int] = []

    def update(*args: Any, max_new_tokens: int, **kwargs: Any) -> None:
        bounds.append(max_new_tokens)
        update_planes(*args, max_new_tokens=max_new_tokens, **kwargs)

    def run() -> torch.Tensor:
        return prefill.run(batch, 0, prompt.q[prefix:], Softmax(DIM**-0.5), KVScales())

    monkeypatch.setattr(planes, "update_planes", update)
    first = run()
    monkeypatch.setattr(torch, "tensor", None)  # calling it is an error
    assert torch.equal(run(), first)
    pool.layer_transfer_counter = object()  # the prefix is on its way: its planes are made, too
    assert torch.equal(run(), first)
    assert bounds == [LENGTH - prefix, LENGTH - prefix, LENGTH]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"score": {"kind": "exact"}}, "scores bounds of pages, score exact has none"),
        ({"prefill": {"kind": "block_bounds", "fraction": 0.1, "floor": 16}}, "cannot hold"),
    ],
)
def test_what_it_cannot_score_or_hold_is_refused_by_name(
    change: dict[str, object], line: str
) -> None:
    content = config_of().model_dump() | change
    with pytest.raises(ValidationError, match=line):
        SparseConfig.model_validate(content)
