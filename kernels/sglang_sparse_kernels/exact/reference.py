# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of exact scores."""

import math

import torch

from ..common import accumulate_dtype, group_size, rankable
from ..plan import DecodePlan


def exact_score_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    plan: DecodePlan,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float,
    pool: str,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.exact_score`."""
    heads = k_buffer.shape[1]
    group = group_size(q.shape[1], heads)
    acc = accumulate_dtype(q.dtype)
    for row in ((plan.reselect != 0) & (plan.k_units > 0)).nonzero().squeeze(1).tolist():
        tail, length = int(plan.tail_start[row]), int(plan.seq_lens[row])
        position = torch.arange(length, device=q.device)
        slots = plan.page_table[row].long()[position // page_size] * page_size
        keys = k_buffer[slots + position % page_size].to(acc)
        query = q[row].view(heads, group, -1).to(acc)
        logits = torch.einsum("hgd,nhd->hgn", query, keys) * sm_scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        log_p = logits.log_softmax(-1)[..., :tail]
        pooled = log_p.logsumexp((0, 1))[None] if pool == "heads" else log_p.logsumexp(1)
        out[row, :, :tail] = rankable(pooled / math.log(2), out.dtype)
