# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of exact scores."""

import math

import torch

from ..common import accumulate_dtype, rankable
from ..plan import DecodePlan
from ..records import KVView, Scores, Softmax, scored_rows


def exact_score_reference(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    *,
    softmax: Softmax,
    pool: str,
    out: Scores,
) -> None:
    """See :func:`sglang_sparse_kernels.exact_score`."""
    heads, group = kv.num_heads, kv.group_of(q)
    acc = accumulate_dtype(q.dtype)
    for row in scored_rows(plan):
        tail, length = int(plan.tail_start[row]), int(plan.seq_lens[row])
        keys = kv.keys(kv.slots(row, torch.arange(length, device=q.device)), acc)
        query = q[row].view(heads, group, -1).to(acc)
        logits = softmax.logits(torch.einsum("hgd,nhd->hgn", query, keys))
        log_p = logits.log_softmax(-1)[..., :tail]
        pooled = log_p.logsumexp((0, 1))[None] if pool == "heads" else log_p.logsumexp(1)
        out.write(row, rankable(pooled / math.log(2), out.values.dtype))
