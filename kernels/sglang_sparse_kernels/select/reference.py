# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of top-k selection with forced units."""

import torch

from ..common import rankable
from ..plan import DecodePlan
from ..records import BLOCK_UNITS, Always, Lists, Scores, scored_rows


def find_block_max_reference(scores: Scores, plan: DecodePlan, *, unit: int) -> None:
    """See :func:`sglang_sparse_kernels.find_block_max`."""
    for row in scored_rows(plan):
        units = -(-int(plan.tail_start[row]) // unit)
        values = scores.values[row, :, :units]
        values.copy_(rankable(values, values.dtype))
        padded = torch.nn.functional.pad(values, (0, -units % BLOCK_UNITS), value=-torch.inf)
        best = padded.unflatten(1, (-1, BLOCK_UNITS)).amax(2)
        scores.block_max[row, :, : best.shape[1]] = best


def select_topk_reference(
    scores: Scores, plan: DecodePlan, lists: Lists, *, always: Always
) -> None:
    """See :func:`sglang_sparse_kernels.select_topk`."""
    values, read, unit = scores.values, scores.read, lists.unit
    device, dtype, width = values.device, values.dtype, values.shape[2]
    for row in plan.reselect.nonzero().squeeze(1).tolist():
        tokens = int(plan.tail_start[row])
        units = -(-tokens // unit)
        kept = min(int(plan.k_units[row]), units, lists.capacity, width)
        target = int(lists.rows[row])
        lists.counts[target, read] = kept
        if kept == 0:
            continue
        index = torch.arange(units, device=device)
        recent = max(0, tokens - always.recent) // unit
        forced = (index < -(-always.sink // unit)) | (index >= recent)
        # Forced units rank first, then by score; stable sorts keep the lower index.
        ranked = rankable(values[row, read, :units], dtype)
        ranked = ranked.masked_fill(forced, torch.inf)
        by_score = ranked.sort(dim=-1, descending=True, stable=True).indices
        by_force = forced.expand(len(read), -1).gather(1, by_score).int()
        order = by_force.sort(dim=-1, descending=True, stable=True).indices
        chosen = by_score.gather(1, order[:, :kept]).sort(dim=-1).values
        lists.indices[target, read, :kept] = chosen.int()
