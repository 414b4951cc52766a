# SPDX-License-Identifier: Apache-2.0
"""The study's sparse prefill and shared selections, beside the kernels' references."""

import json
from pathlib import Path

import pytest
import torch
from error_budget import attention_difference
from live_server import MODEL

from sglang_sparse.research import kascade
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.kascade import methods, sharing
from sglang_sparse.research.policies import Cache, Policy, Pool, attend_mask, layer_mask
from sglang_sparse.research.study import Study
from sglang_sparse.research.tiles import TilePrefill
from sglang_sparse.tasks import FileEncoder, TaskSuite, is_exact
from sglang_sparse.tasks.encoding import END
from sglang_sparse_kernels import (
    Always,
    KVView,
    Lists,
    Softmax,
    make_scores,
    plan_tiles,
    select_topk,
    tile_attention,
    tile_score,
)

HEADS, GROUPS, DIM, LENGTH, PAGE = 8, 4, 16, 310, 16


def kernels_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, taken: list[int] | None, pool: Pool
) -> torch.Tensor:
    """[heads, T, D] by the operators, on a pool that holds the prompt in order."""
    lists = GROUPS if pool == "group" else 1

    def pooled(x: torch.Tensor) -> torch.Tensor:
        pad = -LENGTH % PAGE
        return torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, pad)).contiguous()

    table = torch.arange(-(-LENGTH // PAGE), dtype=torch.int32)[None]
    plan = plan_tiles(table, [0], [LENGTH], tile_tokens=32, min_tokens=64, floor=40, fraction=0.3)
    tiles, keys, queries = plan.rows.num_rows, pooled(k), q.transpose(0, 1)
    scores = make_scores(tiles, lists, plan.max_tail, "cpu")
    indices = torch.zeros(tiles, lists, plan.max_units, dtype=torch.int32)
    counts = torch.zeros(tiles, lists, dtype=torch.int32)
    kv = KVView(keys, pooled(v), plan.rows.page_table, PAGE)
    shared = {"softmax": Softmax(DIM**-0.5), "impl": "torch"}
    tile_score(queries, kv, plan, pool=pool, out=scores, **shared)
    out = torch.full_like(queries, torch.nan).contiguous()
    head_map = None if taken is None else torch.tensor(taken, dtype=torch.int32)
    taken_lists = Lists(indices, counts, plan.rows.request_slots, head_map=head_map)
    select_topk(scores, plan.rows, taken_lists, always=Always(4, 8), impl="torch")
    tile_attention(queries, kv, plan, taken_lists, out=out, **shared)
    return out.transpose(0, 1)


def random_layer(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, LENGTH, DIM, generator=rng) for n in (HEADS, GROUPS, GROUPS))
    return 2 * q, k, v


@pytest.mark.parametrize(("pool", "taken"), [("group", None), ("heads", [0] * GROUPS)])
def test_tiles_of_the_study_equal_the_operators(pool: Pool, taken: list[int] | None) -> None:
    prefill = TilePrefill(0.3, floor=40, sink=4, recent=8, least=64, tile=32, pool=pool)
    q, k, v = random_layer(1)
    got = prefill(0, q[None], k[None], v[None])[0]
    expected, atol = kernels_prefill(q, k, v, taken, pool), attention_difference(q, k, v, DIM**-0.5)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )[0]
    torch.testing.assert_close(got[:, :64], dense[:, :64])
    assert (got[:, 64:] - dense[:, 64:]).abs().max() > 0.05


def test_the_first_anchor_is_dense_and_a_reuse_layer_takes_mapped_lists() -> None:
    taken = [2, 0, 3, 3]
    prefill = TilePrefill(
        0.3,
        floor=40,
        sink=4,
        recent=8,
        least=64,
        tile=32,
        anchors=(0,),
        head_maps=((), tuple(taken)),
    )
    q, k, v = random_layer(2)
    first = prefill(0, q[None], k[None], v[None])
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(first, dense)
    # The same queries and keys again: what differs is whose list a head takes.
    got = prefill(1, q[None], k[None], v[None])[0]
    expected = kernels_prefill(q, k, v, taken, "group")
    atol = attention_difference(q, k, v, DIM**-0.5)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_layers_take_what_the_last_anchor_chose() -> None:
    q, k, v = random_layer(3)
    cache, lengths = Cache(k[None], v[None]), torch.tensor([LENGTH])
    maps = ((), (3, 3, 0, 1), (), ())
    policy = Policy("oracle", 60, anchors=(0, 2), head_maps=maps)
    step = q[None, :, -1]
    own = attend_mask(policy, step, cache, lengths)
    mask, chosen = layer_mask(policy, 0, step, cache, lengths, None)
    assert mask.all()
    assert torch.equal(chosen, own)
    mask, chosen = layer_mask(policy, 1, step, cache, lengths, chosen)
    assert torch.equal(mask, own[:, [3, 3, 0, 1]])
    assert torch.equal(chosen, own)
    mask, _ = layer_mask(policy, 2, step, cache, lengths, torch.zeros_like(own))
    assert torch.equal(mask, own)


def test_all_heads_may_share_one_list() -> None:
    q, k, v = random_layer(4)
    cache, lengths = Cache(k[None], v[None]), torch.tensor([LENGTH])
    mask = attend_mask(Policy("oracle", 60, pool="heads"), q[None, :, -1], cache, lengths)
    assert (mask == mask[:, :1]).all()
    p = (q[:, -1:] @ k.repeat_interleave(HEADS // GROUPS, 0).mT * DIM**-0.5).softmax(-1).sum((0, 1))
    best = p[16:-32].topk(60 - 48).indices + 16
    assert sorted(best.tolist()) == (mask[0, 0, 16:-32].nonzero()[:, 0] + 16).tolist()


def test_a_study_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def exact(self: Study, parts: object, policy: Policy, cut: None = None) -> int:
        measured.append(policy.kind)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return 1

    monkeypatch.setattr(Study, "exact", exact)
    monkeypatch.setattr(Study, "prepare", lambda *args, **options: [([None], None)])
    monkeypatch.setattr(kascade, "SWEEP", ())
    monkeypatch.setattr(kascade, "draw", lambda cells, path: None)
    out = tmp_path / "cells.json"
    arguments = ["--out", str(out), "--tasks", "passkey", "--lengths", "4096", "--count", "1"]
    monkeypatch.setattr("sys.argv", ["kascade", *arguments])
    with pytest.raises(KeyboardInterrupt):
        kascade.main()
    assert len(json.loads(out.read_text())["cells"]) == 4
    kascade.main()
    cells = json.loads(out.read_text())["cells"]
    keys = [(c["method"], c["fraction"], c["prefill_fraction"]) for c in cells]
    # Dense, eight methods and two over a sparse prefill at two fractions.
    assert len(keys) == len(set(keys)) == 1 + 2 * (8 + 2)
    assert len(measured) == len(keys) + 1


@pytest.mark.parametrize("fraction", [0.1, 0.2])
def test_a_draw_of_needles_survives_kascade_at_prefill_and_decode(fraction: float) -> None:
    model, encoder, length = load(MODEL).eval(), FileEncoder(MODEL), 1100
    suite, shared = TaskSuite(encoder, "heldout"), sharing()
    samples = [*suite.samples("multi_key", length, 2, 9), *suite.samples("passkey", length, 1, 9)]
    room = max(len(s.answer_ids) for s in samples) + 2
    tiles = TilePrefill(fraction, **shared)
    for prefill in (None, tiles):
        decoder = Decoder(model, [s.prompt_ids for s in samples], room, 2, prefill)
        chosen = methods(length, fraction)
        for name in ("kascade", "kascade_sketch"):
            replies = decoder.generate(chosen[name], encoder.token_id(END))
            assert all(
                is_exact(s, encoder.decode(r)) for s, r in zip(samples, replies, strict=True)
            ), (name, prefill is not None)
