# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of tile scores and of attention over a tile's list."""

import math

import torch

from ..common import accumulate_dtype, rankable
from ..records import KVView, Lists, Softmax, scored_rows
from .types import TilePlan


def _queries(q: torch.Tensor, plan: TilePlan, tile: int, kv: KVView) -> torch.Tensor:
    """[H, G, queries, D] in the precision to compute in."""
    first = int(plan.q_rows[tile])
    count = int(plan.rows.seq_lens[tile] - plan.rows.update_start[tile])
    query = q[first : first + count].to(accumulate_dtype(q.dtype))
    return query.view(count, kv.num_heads, kv.group_of(q), -1).permute(1, 2, 0, 3)


def tile_score_reference(
    q: torch.Tensor,
    kv: KVView,
    plan: TilePlan,
    *,
    softmax: Softmax,
    pool: str,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.tile_score`."""
    rows = plan.rows
    for tile in scored_rows(rows):
        tail, end = int(rows.tail_start[tile]), int(rows.seq_lens[tile])
        position = torch.arange(end, device=q.device)
        query = _queries(q, plan, tile, kv)
        keys = kv.keys(kv.slots(tile, position), query.dtype)
        logits = softmax.logits(torch.einsum("hgqd,nhd->hgqn", query, keys))
        at = torch.arange(int(rows.update_start[tile]), end, device=q.device)
        log_p = logits.masked_fill(position > at[:, None], float("-inf")).log_softmax(-1)
        log_p = log_p[..., :tail]
        pooled = log_p.logsumexp((0, 1, 2))[None] if pool == "heads" else log_p.logsumexp((1, 2))
        out[tile, :, :tail] = rankable(pooled / math.log(2), out.dtype)


def tile_mean_reference(q: torch.Tensor, plan: TilePlan, out: torch.Tensor) -> None:
    """See :func:`sglang_sparse_kernels.tile_mean`."""
    for tile in range(plan.rows.num_rows):
        first = int(plan.q_rows[tile])
        count = int(plan.rows.seq_lens[tile] - plan.rows.update_start[tile])
        own = q[first : first + count].to(accumulate_dtype(q.dtype))
        out[tile] = own.mean(0).to(out.dtype)


def tile_attention_reference(
    q: torch.Tensor, kv: KVView, plan: TilePlan, lists: Lists, *, softmax: Softmax,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.tile_attention`."""
    heads, rows = kv.num_heads, plan.rows
    head = torch.arange(heads, device=q.device)[:, None]
    mapped = slice(None) if lists.head_map is None else lists.head_map.long()
    for tile in range(rows.num_rows):
        tail, end = int(rows.tail_start[tile]), int(rows.seq_lens[tile])
        positions = torch.arange(tail, end, device=q.device).expand(heads, -1)
        visible = torch.ones_like(positions, dtype=torch.bool)
        if rows.k_units[tile] > 0:
            list_row = int(lists.rows[tile])
            num_units = min(int(rows.k_units[tile]), lists.capacity)
            units = lists.indices[list_row, mapped, :num_units].long()
            counts = lists.counts[list_row, mapped][:, None]
            in_list = torch.arange(num_units, device=q.device) < counts
            in_list = in_list.repeat_interleave(lists.unit, 1)
            inside = torch.arange(lists.unit, device=q.device)
            selected = (units[..., None] * lists.unit + inside).flatten(1)
            in_list &= (selected >= 0) & (selected < tail)
            positions = torch.cat((selected.where(in_list, 0), positions), 1)
            visible = torch.cat((in_list, visible), 1)
        streams = torch.zeros(heads, 1, dtype=torch.bool, device=q.device)
        if lists.windows is not None and tail > 0:
            # Such a head sees none of the above, and its windows below.
            streams = (lists.windows.streams != 0)[:, None]
            everything = torch.arange(end, device=q.device).expand(heads, -1)
            positions = torch.cat((positions, everything), 1)
            visible = torch.cat((visible & ~streams, streams.expand(-1, end)), 1)
        at = torch.arange(int(rows.update_start[tile]), end, device=q.device)
        # [heads, queries, positions]
        seen = visible[:, None] & (positions[:, None] <= at[None, :, None])
        if lists.windows is not None:
            near = positions[:, None] > at[None, :, None] - lists.windows.local
            near |= positions[:, None] < lists.windows.sink
            seen &= near | ~streams[..., None]
        query = _queries(q, plan, tile, kv)
        slots = kv.slots(tile, positions)
        shown = seen.any(1)[..., None]
        keys = kv.keys((slots, head), query.dtype).where(shown, 0)
        values = kv.values((slots, head), query.dtype).where(shown, 0)
        logits = softmax.logits(torch.einsum("hgqd,hnd->hgqn", query, keys))
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
        result = torch.einsum("hgqn,hnd->qhgd", logits.softmax(-1), values)
        first = int(plan.q_rows[tile])
        out[first : first + len(at)] = result.flatten(1, 2).to(out.dtype)
