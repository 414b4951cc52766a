# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of attention over selected units and a contiguous tail."""

import torch

from ..common import accumulate_dtype
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax


def gathered_decode_attention_reference(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, lists: Lists, *, softmax: Softmax,
    out: torch.Tensor, queries: int,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.gathered_decode_attention`."""
    heads, group, unit, windows = kv.num_heads, kv.group_of(q), lists.unit, lists.windows
    acc = accumulate_dtype(q.dtype)
    device = q.device
    head = torch.arange(heads, device=device)[:, None]
    within = torch.arange(unit, device=device)
    mapped = slice(None) if lists.head_map is None else lists.head_map.long()
    for row in range(plan.num_rows):
        seq_len = int(plan.seq_lens[row])
        tail_start = int(plan.tail_start[row])
        last = torch.arange(seq_len - 1, seq_len - 1 + queries, device=device)
        positions = torch.arange(tail_start, seq_len - 1 + queries, device=device).expand(heads, -1)
        visible = torch.ones_like(positions, dtype=torch.bool)
        if plan.k_units[row] > 0:
            list_row = int(lists.rows[row])
            num_units = min(int(plan.k_units[row]), lists.capacity)
            units = lists.indices[list_row, mapped, :num_units].long()
            counts = lists.counts[list_row, mapped][:, None]
            in_list = torch.arange(num_units, device=device) < counts
            selected = (units[..., None] * unit + within).flatten(1)
            in_list = in_list.repeat_interleave(unit, 1) & (selected < tail_start)
            positions = torch.cat((selected.where(in_list, 0), positions), 1)
            visible = torch.cat((in_list, visible), 1)
        if windows is not None and tail_start > 0:
            window = windows.positions(seq_len, queries).expand(heads, -1)
            streams = (windows.streams != 0)[:, None]
            positions = torch.cat((positions, window), 1)
            visible = torch.cat((visible & ~streams, streams.expand_as(window)), 1)
        slots = kv.slots(row, positions)
        shown = visible[..., None]
        keys = kv.keys((slots, head), acc).where(shown, 0)
        values = kv.values((slots, head), acc).where(shown, 0)
        tokens = slice(row * queries, (row + 1) * queries)
        query = q[tokens].reshape(queries, heads, group, -1).to(acc)
        logits = softmax.logits(torch.einsum("qhgd,hnd->qhgn", query, keys))
        seen = visible & (positions <= last[:, None, None])  # [queries, heads, positions]
        if windows is not None and tail_start > 0:
            recent = positions > last[:, None, None] - windows.local
            seen &= recent | (positions < windows.sink) | ~streams
        logits = logits.masked_fill(~seen[:, :, None], float("-inf"))
        result = torch.einsum("qhgn,hnd->qhgd", logits.softmax(-1), values)
        out[tokens] = result.reshape(queries, heads * group, -1).to(out.dtype)
