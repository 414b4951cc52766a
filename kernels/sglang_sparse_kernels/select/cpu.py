# SPDX-License-Identifier: Apache-2.0
"""Top-k selection for a CPU: NumPy's partition finds the k-th best score, a comparison the list."""

import numpy as np

from ..plan import DecodePlan
from ..records import Always, Lists, Scores


def select_topk_cpu(scores: Scores, plan: DecodePlan, lists: Lists, *, always: Always) -> None:
    """See :func:`sglang_sparse_kernels.select_topk`.

    NumPy partitions the numbers themselves with vector instructions. ``torch.topk`` carries their
    indices along and takes 9 times as long.
    """
    width, unit = scores.values.shape[2], lists.unit
    indices, counts, values = lists.indices.numpy(), lists.counts.numpy(), scores.values.numpy()
    read = slice(None) if scores.unread is None else scores.read.numpy()
    rows, tails, kept = lists.rows.tolist(), plan.tail_start.tolist(), plan.k_units.tolist()
    for row in plan.reselect.nonzero().flatten().tolist():
        tokens, target = tails[row], rows[row]
        units = -(-tokens // unit)
        most = min(kept[row], units, lists.capacity, width)
        counts[target, read] = most
        below = min(-(-always.sink // unit), units)
        recent = max(below, max(0, tokens - always.recent) // unit)
        forced = below + units - recent
        if most <= forced:
            indices[target, read, :most] = [*range(below), *range(recent, units)][:most]
            continue
        free = most - forced
        indices[target, read, :below] = np.arange(below)
        chosen = best(values[row, read, below:recent], free) + below
        indices[target, read, below : below + free] = chosen
        indices[target, read, below + free : most] = np.arange(recent, units)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` best of each row of ``scores`` [H, n], ascending; lower indices win ties.

    Args:
        scores: without NaN.
        count: 1 to n.

    Returns:
        int64 [H, count].
    """
    heads, width = scores.shape
    place = width - count
    threshold = np.partition(scores, place, axis=1)[:, place : place + 1]
    taken = scores >= threshold
    found = np.flatnonzero(taken)
    if len(found) > heads * count:
        # More equal the threshold than fit.
        above = scores > threshold
        room = count - np.count_nonzero(above, axis=1)[:, None]
        equal = taken & ~above
        found = np.flatnonzero(above | (equal & (equal.cumsum(1) <= room)))
    # Every row has the same count, so the flat indices reshape to rows.
    ends: np.ndarray = found.reshape(heads, count) - np.arange(heads)[:, None] * width
    return ends
