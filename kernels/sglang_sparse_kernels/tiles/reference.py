# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of tile scores and of attention over a tile's list."""

import math

import torch

from ..common import accumulate_dtype, group_size, rankable
from .types import TilePlan


def _slots(plan: TilePlan, tile: int, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = plan.rows.page_table[tile].long()[positions // page_size]
    return pages * page_size + positions % page_size


def _queries(q: torch.Tensor, plan: TilePlan, tile: int, heads: int) -> torch.Tensor:
    """[H, G, queries, D] in the precision to compute in."""
    first, count = int(plan.q_rows[tile]), _count(plan, tile)
    group = group_size(q.shape[1], heads)
    query = q[first : first + count].to(accumulate_dtype(q.dtype))
    return query.view(count, heads, group, -1).permute(1, 2, 0, 3)


def _count(plan: TilePlan, tile: int) -> int:
    return int(plan.rows.seq_lens[tile] - plan.rows.update_start[tile])


def _capped(logits: torch.Tensor, logit_cap: float) -> torch.Tensor:
    return logit_cap * torch.tanh(logits / logit_cap) if logit_cap > 0 else logits


def tile_score_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    plan: TilePlan,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float,
    pool: str,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.tile_score`."""
    heads, rows = k_buffer.shape[1], plan.rows
    for tile in ((rows.reselect != 0) & (rows.k_units > 0)).nonzero().squeeze(1).tolist():
        tail, end = int(rows.tail_start[tile]), int(rows.seq_lens[tile])
        position = torch.arange(end, device=q.device)
        query = _queries(q, plan, tile, heads)
        keys = k_buffer[_slots(plan, tile, position, page_size)].to(query.dtype)
        logits = torch.einsum("hgqd,nhd->hgqn", query, keys) * sm_scale
        at = torch.arange(int(rows.update_start[tile]), end, device=q.device)
        logits = _capped(logits, logit_cap).masked_fill(position > at[:, None], float("-inf"))
        log_p = logits.log_softmax(-1)[..., :tail]
        pooled = log_p.logsumexp((0, 1, 2))[None] if pool == "heads" else log_p.logsumexp((1, 2))
        out[tile, :, :tail] = rankable(pooled / math.log(2), out.dtype)


def tile_attention_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: TilePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    page_size: int,
    sm_scale: float,
    logit_cap: float,
    head_map: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See :func:`sglang_sparse_kernels.tile_attention`."""
    heads, rows = k_buffer.shape[1], plan.rows
    head = torch.arange(heads, device=q.device)[:, None]
    mapped = slice(None) if head_map is None else head_map.long()
    for tile in range(rows.num_rows):
        tail, end = int(rows.tail_start[tile]), int(rows.seq_lens[tile])
        positions = torch.arange(tail, end, device=q.device).expand(heads, -1)
        visible = torch.ones_like(positions, dtype=torch.bool)
        if rows.k_units[tile] > 0:
            state = int(rows.list_rows[tile])
            listed = min(int(rows.k_units[tile]), indices.shape[2])
            selected = indices[state, mapped, :listed].long()
            in_list = torch.arange(listed, device=q.device) < counts[state, mapped][:, None]
            in_list &= (selected >= 0) & (selected < tail)
            positions = torch.cat((selected.where(in_list, 0), positions), 1)
            visible = torch.cat((in_list, visible), 1)
        query = _queries(q, plan, tile, heads)
        slots = _slots(plan, tile, positions, page_size)
        shown = visible[..., None]
        keys = k_buffer[slots, head].to(query.dtype).where(shown, 0)
        values = v_buffer[slots, head].to(query.dtype).where(shown, 0)
        logits = _capped(torch.einsum("hgqd,hnd->hgqn", query, keys) * sm_scale, logit_cap)
        at = torch.arange(int(rows.update_start[tile]), end, device=q.device)
        seen = visible[:, None] & (positions[:, None] <= at[None, :, None])
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
        result = torch.einsum("hgqn,hnd->qhgd", logits.softmax(-1), values)
        first = int(plan.q_rows[tile])
        out[first : first + len(at)] = result.flatten(1, 2).to(out.dtype)
