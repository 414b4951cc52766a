# SPDX-License-Identifier: Apache-2.0
"""Anchors by dynamic programming beside every possible choice; head maps."""

from itertools import combinations

import numpy as np
import pytest

from sglang_sparse.calibrate.anchors import choose_anchors, map_heads, mapped_similarity


def kept(similarity: np.ndarray, importance: np.ndarray, anchors: list[int]) -> float:
    """What a choice of anchors keeps, layer by layer."""
    total = 0.0
    for layer in range(len(similarity)):
        anchor = max(a for a in anchors if a <= layer)
        total += importance[layer] * similarity[anchor, layer]
    return total


@pytest.mark.parametrize("layers", range(1, 11))
def test_dynamic_programming_equals_brute_force(layers: int) -> None:
    rng = np.random.default_rng(layers)
    for _ in range(5):
        similarity, importance = rng.random((layers, layers)), rng.random(layers)
        for count in range(1, layers + 1):
            anchors = choose_anchors(similarity, importance, count)
            assert anchors[0] == 0
            assert len(anchors) == count
            assert anchors == sorted(set(anchors))
            best = max(
                kept(similarity, importance, [0, *rest])
                for rest in combinations(range(1, layers), count - 1)
            )
            assert kept(similarity, importance, anchors) == pytest.approx(best, rel=1e-12)


def test_an_important_layer_becomes_an_anchor() -> None:
    similarity = np.full((6, 6), 0.9)
    np.fill_diagonal(similarity, 1.0)
    for layer in range(1, 6):
        importance = np.where(np.arange(6) == layer, 10.0, 1.0)
        assert layer in choose_anchors(similarity, importance, 2)


@pytest.mark.parametrize("count", [0, 5])
def test_a_number_of_anchors_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} anchors of 4 layers"):
        choose_anchors(np.eye(4), np.ones(4), count)


def test_each_head_takes_the_best_head_and_its_own_if_none_is_better() -> None:
    similarity = np.array([[0.5, 0.9, 0.2], [0.5, 0.1, 0.3], [0.4, 0.9, 0.3]])
    assert map_heads(similarity, 1).tolist() == [0, 0, 2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_maps_stay_within_ranks_and_are_the_best_there(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    heads, share = 8, 8 // ranks
    similarity = rng.random((3, 3, heads, heads))
    taken = map_heads(similarity, ranks)
    mapped = mapped_similarity(similarity, taken)
    for a in range(3):
        for b in range(3):
            best = []
            for j in range(heads):
                first = j // share * share
                options = similarity[a, b, first : first + share, j]
                assert taken[a, b, j] == first + options.argmax()
                best.append(options.max())
            assert mapped[a, b] == pytest.approx(np.mean(best))
