# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definition of the scores that selection ranks."""

import torch

from ..common import accumulate_dtype, group_size, rankable, take
from ..plan import DecodePlan
from ..planes import KeySketch, PageCuboids, by_page, sketch_values
from ..records import Scores, scored_rows


def select_channels_reference(
    q: torch.Tensor, channels: torch.Tensor, plan: DecodePlan, read: torch.Tensor | None = None
) -> None:
    """See :func:`sglang_sparse_kernels.select_channels`; of the KV heads in ``read``, else all."""
    _, heads, kept = channels.shape
    read = torch.arange(heads, device=q.device) if read is None else read
    rows = ((plan.refresh != 0) & (plan.k_units > 0)).nonzero().squeeze(1)
    group = group_size(q.shape[1], heads)
    magnitude = q[rows].to(accumulate_dtype(q.dtype)).abs()
    importance = magnitude.unflatten(1, (heads, group)).sum(2)
    ranked = importance.sort(dim=-1, descending=True, stable=True).indices
    chosen = ranked[:, read, :kept].sort(dim=-1).values.int()
    channels[plan.request_slots[rows].long()[:, None], read] = chosen


def reduce_group(scores: torch.Tensor, reduce: str) -> torch.Tensor:
    """One score for each group of query heads: [H, G, n] -> [H, n]."""
    return scores.amax(1) if reduce == "max" else scores.sum(1)


def sketch_score_reference(
    q: torch.Tensor,
    channels: torch.Tensor,
    sketch: KeySketch,
    plan: DecodePlan,
    *,
    reduce: str,
    out: Scores,
) -> None:
    """See :func:`sglang_sparse_kernels.sketch_score`."""
    heads, page_size = sketch.values.shape[1], sketch.page_size
    group = group_size(q.shape[1], heads)
    acc = accumulate_dtype(q.dtype)
    head = torch.arange(heads, device=q.device)[:, None]
    paged = by_page(sketch.values, page_size)
    raw = paged.view(torch.uint8) if paged.dtype == torch.float8_e4m3fn else paged
    in_run = paged.shape[1]
    for row in scored_rows(plan):
        tokens = int(plan.tail_start[row])
        pages = plan.page_table[row, : -(-tokens // page_size)].long()
        kept = channels[plan.request_slots[row].long()].long()
        pages_of_heads = pages[:, None, None]
        keys = raw[pages_of_heads // in_run, pages_of_heads % in_run, head, kept]
        keys = sketch_values(keys.view(sketch.values.dtype), acc)
        query = q[row].view(heads, group, -1).to(acc)
        query = query.gather(2, kept[:, None, :].expand(-1, group, -1))
        partial = torch.einsum("hgc,nhcp->hgnp", query, keys)
        if sketch.scale is not None:
            partial = partial * sketch.scale[pages].to(acc).permute(1, 0, 2)[:, None]
        scores = reduce_group(partial.flatten(2), reduce)
        out.write(row, rankable(scores[:, :tokens], out.values.dtype))


def _page_bounds(q: torch.Tensor, pages: PageCuboids, plan: DecodePlan, row: int) -> torch.Tensor:
    """[H, G, units] of one row."""
    heads, unit = pages.low.shape[1], pages.unit
    group = group_size(q.shape[1], heads)
    acc = accumulate_dtype(q.dtype)
    per_page = pages.page_size // unit
    within = torch.arange(per_page, device=q.device)
    tokens = int(plan.tail_start[row])
    physical = plan.page_table[row, : -(-tokens // pages.page_size)].long()
    entries = (physical[:, None] * per_page + within).flatten()[: -(-tokens // unit)]
    query = q[row].view(heads, group, -1).to(acc)
    low, high = (take(ends, entries).to(acc) for ends in (pages.low, pages.high))
    # The larger of q*min and q*max is q*max for q > 0 and q*min for q < 0.
    bound = torch.einsum("hgd,nhd->hgn", query.clamp(min=0), high)
    return bound + torch.einsum("hgd,nhd->hgn", query.clamp(max=0), low)


def joined(scores: torch.Tensor, pages: int) -> torch.Tensor:
    """[..., n] -> [..., ceil(n / pages)]: the largest of so many neighbours."""
    if pages == 1:
        return scores
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % pages), value=-torch.inf)
    return padded.unflatten(-1, (-1, pages)).amax(-1)


def page_bounds_reference(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int,
    out: torch.Tensor,
    unread: torch.Tensor | None = None,
) -> None:
    """See :func:`sglang_sparse_kernels.page_bounds`."""
    for row in scored_rows(plan):
        bound = joined(_page_bounds(q, pages, plan, row), unit // pages.unit).to(out.dtype)
        own = out[row, :, :, : bound.shape[-1]]
        own.copy_(bound if unread is None else bound.where(unread[:, None, None] == 0, own))


def page_minmax_score_reference(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int,
    reduce: str,
    out: Scores,
) -> None:
    """See :func:`sglang_sparse_kernels.page_minmax_score`."""
    for row in scored_rows(plan):
        scores = reduce_group(_page_bounds(q, pages, plan, row), reduce)
        out.write(row, joined(rankable(scores, out.values.dtype), unit // pages.unit))
