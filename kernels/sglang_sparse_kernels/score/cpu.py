# SPDX-License-Identifier: Apache-2.0
"""Scores that selection ranks, for a CPU: whole pages are gathered, and multiplied in float32."""

from collections.abc import Iterator

import torch

from ..common import accumulate_dtype, rankable
from ..paged import pages_of
from ..plan import DecodePlan
from ..planes import KeySketch, PageCuboids
from ..planes.types import INT4_ZERO, tokens_per_element
from ..records import Scores, scored_rows
from .reference import joined, reduce_group, select_channels_reference

PIECE_TOKENS = 16384
"""Tokens that are scored together; 16 channels of 4 KV heads take 4 MiB."""

_FP8_OF_FP16 = 256.0
"""What a number of fp8 is in units of the fp16 number with the same bits."""

_FP8_NAN = 0x7F


def select_channels_cpu(
    q: torch.Tensor, channels: torch.Tensor, plan: DecodePlan, read: torch.Tensor | None = None
) -> None:
    """See :func:`sglang_sparse_kernels.select_channels`; runs the reference if a row refreshes."""
    if any(plan.refresh.tolist()):
        select_channels_reference(q, channels, plan, read)


def sketch_score_cpu(
    q: torch.Tensor,
    channels: torch.Tensor,
    sketch: KeySketch,
    plan: DecodePlan,
    *,
    reduce: str,
    out: Scores,
) -> None:
    """See :func:`sglang_sparse_kernels.sketch_score`."""
    heads = sketch.values.shape[1]
    query = q.to(accumulate_dtype(q.dtype)).unflatten(1, (heads, -1))
    for row in scored_rows(plan):
        tokens = int(plan.tail_start[row])
        kept = channels[int(plan.request_slots[row])].long()
        chosen = query[row].gather(2, kept[:, None].expand(-1, query.shape[2], -1))
        start = 0
        for pages, keys in _pieces(sketch, plan.page_table[row], kept, tokens):
            partial = torch.bmm(chosen, keys.to(chosen.dtype))
            if sketch.values.dtype == torch.float8_e4m3fn:
                partial *= _FP8_OF_FP16
            if sketch.scale is not None:
                scale = sketch.scale.index_select(0, pages).to(chosen.dtype)
                partial *= scale.transpose(0, 1).reshape(heads, 1, -1)
            scores = reduce_group(partial, reduce)[:, : tokens - start]
            out.write(row, rankable(scores, out.values.dtype), start)
            start += scores.shape[1]


def _pieces(
    sketch: KeySketch, table: torch.Tensor, kept: torch.Tensor, tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(pages [n], keys [H, D_b, n * P]) of the channels ``kept`` [H, D_b], piece by piece.

    Keys come in a dtype that holds them exactly, fp8 divided by ``_FP8_OF_FP16``.
    """
    values, size = sketch.values, sketch.page_size
    _, heads, dim, elements = values.shape
    bytes_of = values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values
    in_run = elements * tokens_per_element(values.dtype) // size
    lines = bytes_of.view(-1, elements // in_run)  # [runs * H * D * pages a run, a page's channel]
    line = ((torch.arange(heads)[:, None] * dim + kept) * in_run)[..., None]
    some, count = PIECE_TOKENS // size, -(-tokens // size)
    for first in range(0, count, some):
        pages = table[first : min(first + some, count)].long()
        run = pages // in_run * (heads * dim * in_run) + pages % in_run
        found = lines.index_select(0, (line + run).flatten())
        yield pages, _numbers(found, values.dtype).view(*kept.shape, -1)


def _numbers(lines: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of lines of a sketch of ``dtype``; those of fp8 in units of ``_FP8_OF_FP16``."""
    if dtype == torch.uint8:
        return torch.cat((lines & 15, lines >> 4), -1).to(torch.int8) - INT4_ZERO
    if dtype != torch.float8_e4m3fn:
        return lines
    # Sign, exponent and mantissa move to where fp16 has them; converting fp8 takes 17 times as
    # long. The shift fills bit 14 with the sign.
    numbers = lines.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    numbers = numbers.view(torch.float16)
    codes = lines.numpy()  # NumPy compares bytes 20 times as fast
    if codes.max() == _FP8_NAN or (codes == -1).any():
        numbers.masked_fill_((lines & _FP8_NAN) == _FP8_NAN, torch.nan)
    return numbers


def _page_bounds(
    query: torch.Tensor, pages: PageCuboids, plan: DecodePlan, row: int
) -> torch.Tensor:
    """[H, G, units] of one row's ``query`` [H, G, D]."""
    tokens, per_page = int(plan.tail_start[row]), pages.page_size // pages.unit
    physical = plan.page_table[row, : -(-tokens // pages.page_size)]
    units = -(-tokens // pages.unit)
    high, low = (
        pages_of(ends, physical, per_page)[:units].to(query.dtype).permute(1, 2, 0)
        for ends in (pages.high, pages.low)
    )
    # The larger of q*min and q*max is q*max for q > 0 and q*min for q < 0.
    return torch.bmm(query.clamp(min=0), high).baddbmm_(query.clamp(max=0), low)


def page_bounds_cpu(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int,
    out: torch.Tensor,
    unread: torch.Tensor | None,
) -> None:
    """See :func:`sglang_sparse_kernels.page_bounds`."""
    query = q.to(accumulate_dtype(q.dtype)).unflatten(1, (pages.low.shape[1], -1))
    for row in scored_rows(plan):
        bound = joined(_page_bounds(query[row], pages, plan, row), unit // pages.unit)
        own = out[row, :, :, : bound.shape[-1]]
        own.copy_(bound if unread is None else bound.where(unread[:, None, None] == 0, own))


def page_minmax_score_cpu(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int,
    reduce: str,
    out: Scores,
) -> None:
    """See :func:`sglang_sparse_kernels.page_minmax_score`."""
    query = q.to(accumulate_dtype(q.dtype)).unflatten(1, (pages.low.shape[1], -1))
    for row in scored_rows(plan):
        scores = reduce_group(_page_bounds(query[row], pages, plan, row), reduce)
        out.write(row, joined(rankable(scores, out.values.dtype), unit // pages.unit))
