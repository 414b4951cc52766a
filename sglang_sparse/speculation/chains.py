# SPDX-License-Identifier: Apache-2.0
"""From a tree of draft tokens to its longest path.

SGLang's n-gram worker drafts a tree even at a breadth of one: each length of the match gives a
path of its own, and tokens that are missing are filled in below the root
(``cpp_ngram/ngram_corpus``: ``buildRecency``, ``fillResult``).
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def into_chains(tokens: Ints, masks: Ints, width: int) -> tuple[Ints, Ints]:
    """Keep the longest path of each tree, the first one at equal depths.

    A path that is shorter than ``width`` is filled up with zeros behind it. They are candidates
    like any other token, and are accepted where the model would have decoded them.

    Args:
        tokens: [rows * width], nodes of each tree; node 0 is the root, the last accepted token,
            and a node's parent comes before it.
        masks: [rows * width * width], 1 where a node (second axis) attends to another (third):
            to its ancestors and itself.
        width: nodes of a tree.

    Returns:
        Tokens and masks of the same shapes, in which each node but the root is the only child of
        the one before it.
    """
    trees = tokens.reshape(-1, width)
    ancestors = masks.reshape(-1, width, width).astype(bool)
    chains = np.zeros_like(trees)
    # A filled-in zero is a leaf below the root: at equal depths it comes behind every real token.
    deepest = ancestors.sum(-1).argmax(-1)
    for chain, tree, above, leaf in zip(chains, trees, ancestors, deepest, strict=True):
        path = tree[above[leaf]]
        chain[: len(path)] = path
    causal = np.tril(np.ones((width, width), dtype=masks.dtype))
    return chains.reshape(-1), np.tile(causal, (len(trees), 1, 1)).reshape(-1)
