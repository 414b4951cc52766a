# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of top-k selection with forced units."""

import torch

from ..common import rankable
from ..plan import DecodePlan


def select_topk_reference(
    scores: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    sink: int,
    recent: int,
    out_indices: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.select_topk`."""
    heads, width = scores.shape[1:]
    for row in plan.reselect.nonzero().squeeze(1).tolist():
        tokens = int(plan.tail_start[row])
        units = -(-tokens // unit)
        kept = min(int(plan.k_units[row]), units, out_indices.shape[2], width)
        target = int(plan.list_rows[row])
        out_counts[target] = kept
        if kept == 0:
            continue
        index = torch.arange(units, device=scores.device)
        forced = (index < -(-sink // unit)) | (index >= max(0, tokens - recent) // unit)
        # Forced units rank first, then by score; stable sorts keep the lower index.
        ranked = rankable(scores[row, :, :units], scores.dtype)
        ranked = ranked.masked_fill(forced, torch.inf)
        by_score = ranked.sort(dim=-1, descending=True, stable=True).indices
        by_force = forced.expand(heads, -1).gather(1, by_score).int()
        order = by_force.sort(dim=-1, descending=True, stable=True).indices
        chosen = by_score.gather(1, order[:, :kept]).sort(dim=-1).values
        out_indices[target, :, :kept] = chosen.int()
