# SPDX-License-Identifier: Apache-2.0
"""The longest path of a tree of draft tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse.speculation.chains import into_chains


def masks_of(parents: list[int]) -> np.ndarray:
    """[nodes, nodes]: each node attends to itself and its ancestors; the root's parent is -1."""
    mask = np.eye(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    width = draw(st.integers(1, 8))
    rows = draw(st.integers(1, 4))
    return [
        [-1, *(draw(st.integers(0, node - 1)) for node in range(1, width))] for _ in range(rows)
    ]


@given(trees())
def test_the_longest_path_is_kept_and_filled_up(found: list[list[int]]) -> None:
    width = len(found[0])
    tokens = np.arange(100, 100 + len(found) * width, dtype=np.int64)
    masks = np.stack([masks_of(parents) for parents in found])
    chains, causal = into_chains(tokens, masks.reshape(-1), width)
    assert causal.reshape(-1, width, width).tolist() == [np.tri(width).tolist()] * len(found)
    for row, parents in enumerate(found):
        longest = max((path_to(parents, node) for node in range(width)), key=len)
        want = [100 + row * width + node for node in longest]
        assert chains.reshape(-1, width)[row].tolist() == want + [0] * (width - len(want))


@pytest.mark.parametrize(
    ("parents", "tokens", "chain"),
    [
        # SGLang's filling lies below the root; a single draft comes before it.
        ([-1, 0, 0, 0], [7, 5, 0, 0], [7, 5, 0, 0]),
        ([-1, 0, 0, 0], [7, 0, 0, 0], [7, 0, 0, 0]),
        # Two matches part at once; the deeper one is kept.
        ([-1, 0, 0, 2], [7, 5, 6, 8], [7, 6, 8, 0]),
        ([-1, 0, 1, 2], [7, 5, 6, 8], [7, 5, 6, 8]),
    ],
)
def test_what_sglang_drafts(parents: list[int], tokens: list[int], chain: list[int]) -> None:
    mask = masks_of(parents).reshape(-1)
    assert into_chains(np.array(tokens), mask, 4)[0].tolist() == chain
