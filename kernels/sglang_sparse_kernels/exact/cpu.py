# SPDX-License-Identifier: Apache-2.0
"""Exact scores for a CPU: K is read once, whole pages at a time, and multiplied in float32."""

import torch

from ..common import accumulate_dtype, rankable
from ..paged import products
from ..plan import DecodePlan
from ..records import KVView, Scores, Softmax, scored_rows

_LOG2_E = 1.4426950408889634


def exact_score_cpu(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    *,
    softmax: Softmax,
    pool: str,
    out: Scores,
) -> None:
    """See :func:`sglang_sparse_kernels.exact_score`. It uses powers of 2, which are faster."""
    query = q.to(accumulate_dtype(q.dtype)).unflatten(1, (kv.num_heads, -1))
    softmax = kv.logits(softmax)
    for row in scored_rows(plan):
        tail, length = int(plan.tail_start[row]), int(plan.seq_lens[row])
        found = products(query[row], kv.k, kv.page_table[row], length, kv.page_size)
        logits = softmax.logits(found).mul_(_LOG2_E)
        logits -= _log2_sum(logits, -1)
        logits = logits[..., :tail]
        pooled = _log2_sum(logits.flatten(0, 1)[None] if pool == "heads" else logits, 1)
        out.write(row, rankable(pooled[:, 0], out.values.dtype))


def _log2_sum(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """log2 of the sum of 2**logits over ``dim``, which is kept with a size of one."""
    largest = logits.amax(dim, keepdim=True)
    return (logits - largest).exp2_().sum(dim, keepdim=True).log2_().add_(largest)
