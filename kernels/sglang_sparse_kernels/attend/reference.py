# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of attention over selected units and a contiguous tail."""

import torch

from ..common import accumulate_dtype, group_size
from ..plan import DecodePlan


def gathered_decode_attention_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    unit: int,
    page_size: int,
    sm_scale: float,
    logit_cap: float,
    head_map: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.gathered_decode_attention`."""
    heads = k_buffer.shape[1]
    group = group_size(q.shape[1], heads)
    acc = accumulate_dtype(q.dtype)
    device = q.device
    head = torch.arange(heads, device=device)[:, None]
    within = torch.arange(unit, device=device)
    mapped = slice(None) if head_map is None else head_map.long()
    for row in range(plan.num_rows):
        seq_len = int(plan.seq_lens[row])
        tail_start = int(plan.tail_start[row])
        positions = torch.arange(tail_start, seq_len, device=device).expand(heads, -1)
        visible = torch.ones_like(positions, dtype=torch.bool)
        if plan.k_units[row] > 0:
            state = int(plan.list_rows[row])
            listed = min(int(plan.k_units[row]), indices.shape[2])
            units = indices[state, mapped, :listed].long()
            in_list = torch.arange(listed, device=device) < counts[state, mapped][:, None]
            selected = (units[..., None] * unit + within).flatten(1)
            in_list = in_list.repeat_interleave(unit, 1) & (selected < tail_start)
            positions = torch.cat((selected.where(in_list, 0), positions), 1)
            visible = torch.cat((in_list, visible), 1)
        pages = plan.page_table[row].long()[positions // page_size]
        slots = pages * page_size + positions % page_size
        shown = visible[..., None]
        keys = k_buffer[slots, head].to(acc).where(shown, 0)
        values = v_buffer[slots, head].to(acc).where(shown, 0)
        query = q[row].view(heads, group, -1).to(acc)
        logits = torch.einsum("hgd,hnd->hgn", query, keys) * sm_scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        logits = logits.masked_fill(~visible[:, None], float("-inf"))
        result = torch.einsum("hgn,hnd->hgd", logits.softmax(-1), values)
        out[row] = result.reshape(heads * group, -1).to(out.dtype)
