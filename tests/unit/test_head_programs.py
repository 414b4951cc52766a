# SPDX-License-Identifier: Apache-2.0
"""Which heads of a rank stream, which lists nobody reads, and what layers then run."""

from typing import Any

import pytest
import torch
from layer_programs import CPU, DIM, GROUP, LAYERS, PAGE, LayerPrograms

from sglang_sparse.backend.heads import Heads, head_kinds, lists_of_heads
from sglang_sparse.choices.role import Role
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.common import Impl

HEADS = 4
LENGTHS = (900, 333)
EVERY = {"kind": "every"}
ANCHORS = {"kind": "anchors", "anchors": [0, 1]}
CROSSED = ANCHORS | {"reuse": [{"layer": 2, "heads": [3, 1, 1, 0]}]}
PAGES = {"kind": "page_minmax", "logical_page": 16}
TOKENS = {"kind": "tokens", "tokens": 128}
MASS = {"kind": "mass", "epsilon": 0.9, "cap": 256, "microbatch": 32}


def configured(streaming: list[list[int]], **changes: Any) -> SparseConfig:
    heads = {"kind": "streaming", "sink": 64, "local": 128, "streaming": streaming}
    content = {
        "layers": EVERY, "score": PAGES, "budget": TOKENS, "heads": heads, "sink_tokens": 4,
        "recent_tokens": 8, "min_sparse_tokens": 64,
    }  # fmt: skip
    return SparseConfig.model_validate(content | changes)


def kinds_of(config: SparseConfig, first: int = 0, heads: int = HEADS, lists: int = HEADS) -> Any:
    """(streaming heads by layer, unread lists by layer) of a rank, as plain lists."""
    own = Heads(heads * GROUP, heads, DIM, first_kv=first)
    kinds = head_kinds(config, range(LAYERS), own, lists=lists, device=CPU)
    return (
        {layer: windows.streams.tolist() for layer, windows in kinds.windows.items()},
        {layer: unread.tolist() for layer, unread in kinds.unread.items()},
    )


def test_without_streaming_heads_nothing_is_kept_for_any_layer() -> None:
    assert kinds_of(configured([[], [], []], heads={"kind": "retrieval"})) == ({}, {})
    assert kinds_of(configured([[], [], []])) == ({}, {})


def test_where_each_layer_selects_the_lists_of_streaming_heads_are_unread() -> None:
    found = {0: [0, 1, 0, 1], 2: [1, 1, 1, 1]}
    assert kinds_of(configured([[1, 3], [], [0, 1, 2, 3]])) == (found, found)


def test_a_rank_takes_its_share_of_the_heads() -> None:
    config = configured([[1, 3], [], [2]])
    assert kinds_of(config, first=0, heads=2, lists=2) == ({0: [0, 1]}, {0: [0, 1]})
    assert kinds_of(config, first=2, heads=2, lists=2)[0] == {0: [0, 1], 2: [1, 0]}


def test_layers_that_attend_to_everything_have_no_windows() -> None:
    config = configured([[1], [2], [3]], layers={"kind": "first_dense", "n": 2})
    assert kinds_of(config) == ({2: [0, 0, 0, 1]}, {2: [0, 0, 0, 1]})


def test_a_list_is_unread_if_no_head_of_any_layer_takes_it() -> None:
    # Layer 0 attends to everything, and layer 1 comes before any layer could reuse its lists.
    windows, unread = kinds_of(configured([[0], [0, 1], [0, 2]], layers=ANCHORS))
    assert windows == {1: [1, 1, 0, 0], 2: [1, 0, 1, 0]}
    # Head 1 of layer 2 takes the list of a head that streams in layer 1.
    assert unread == {0: [1, 1, 1, 1], 1: [1, 0, 0, 0]}
    _, unread = kinds_of(configured([[0], [0, 1], [0, 2]], layers=CROSSED))
    # Layer 2's heads 1 and 3 take the lists of heads 1 and 0; heads 2 and 3 of layer 1 their own.
    assert 1 not in unread


def test_a_list_that_all_heads_share_is_unread_if_all_stream() -> None:
    exact = {"kind": "exact", "pool": "heads"}
    assert kinds_of(configured([[0, 1], [0, 1, 2, 3], []], score=exact), lists=1)[1] == {1: [1]}


def test_heads_read_their_own_list_or_the_one_that_a_map_names() -> None:
    own, mapped = Role(True, 0), Role(False, 0, heads=(1, 0, 3, 3))
    assert lists_of_heads(own, range(4), 4) == [0, 1, 2, 3]
    assert lists_of_heads(mapped, range(2, 4), 2) == [1, 1]
    assert lists_of_heads(mapped, range(4), 1) == [0, 0, 0, 0]


class Layers(LayerPrograms):
    """Programs of heads of two kinds."""

    def __init__(self, config: SparseConfig, impl: Impl) -> None:
        super().__init__(config, LENGTHS, HEADS, seed=11, impl=impl)

    def window(self, layer: int, row: int, head: int) -> torch.Tensor:
        """[group, dim] attention to 64 sinks and the last 128 tokens."""
        at = torch.arange(LENGTHS[row])
        at = at[(at < 64) | (at >= LENGTHS[row] - 128)]
        slots = self.plan.page_table[row].long()[at // PAGE] * PAGE + at % PAGE
        query = self.q[layer, row].view(HEADS, GROUP, DIM)[head]
        weights = (query @ self.pool.k_buffer[layer][slots, head].T * DIM**-0.5).softmax(-1)
        return weights @ self.pool.v_buffer[layer][slots, head]


@pytest.mark.parametrize("impl", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("layers", "score", "budget"),
    [
        (EVERY, PAGES, TOKENS),
        (EVERY, {"kind": "key_sketch"}, TOKENS),
        (EVERY, {"kind": "page_mean"}, MASS),
        (EVERY, PAGES, MASS | {"estimator": "upper_bound"}),
        (EVERY, PAGES, {"kind": "fraction", "fraction": 0.2, "floor": 128}),
        (CROSSED, {"kind": "exact"}, TOKENS),
        (ANCHORS, PAGES, MASS),
        (EVERY, {"kind": "exact", "pool": "heads"}, TOKENS),
    ],
)
def test_streaming_heads_see_their_window_and_change_no_other_head(
    layers: Any, score: Any, budget: Any, impl: Impl
) -> None:
    """With any layers, score and budget, beside the same server without streaming heads."""
    streaming = [[0], [0, 3], [0, 3]]
    mixed = Layers(configured(streaming, layers=layers, score=score, budget=budget), impl)
    plain = Layers(
        configured([], layers=layers, score=score, budget=budget, heads={"kind": "retrieval"}), impl
    )
    for layer in range(LAYERS):
        got, want = mixed.run(layer), plain.run(layer)
        if not mixed.programs[layer].attends:
            assert got.isnan().all()
            continue
        for head in range(HEADS):
            if head not in streaming[layer]:
                torch.testing.assert_close(got[:, head], want[:, head])
                continue
            for row in range(len(LENGTHS)):
                exact = mixed.window(layer, row, head)
                torch.testing.assert_close(got[row, head], exact)
                assert not torch.allclose(got[row, head], want[row, head], atol=1e-3)
