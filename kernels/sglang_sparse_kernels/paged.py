# SPDX-License-Identifier: Apache-2.0
"""Rows of a paged cache on a CPU: whole pages are copied at once, in pieces that fit in a cache."""

from collections.abc import Iterator

import torch

from .common import FP8, accumulate_dtype

PIECE_TOKENS = 4096
"""Tokens that are converted and multiplied together; 4 KV heads of 64 channels take 4 MiB."""


def select_rows(stored: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows ``index`` (int32 or int64 [n]) of a tensor of any dtype, a copy."""
    if stored.dtype == FP8:  # which cannot be indexed; its bytes can
        return stored.view(torch.uint8).index_select(0, index).view(FP8)
    return stored.index_select(0, index)


def pages_of(cache: torch.Tensor, pages: torch.Tensor, rows_a_page: int) -> torch.Tensor:
    """Rows of whole pages, in the order of ``pages``.

    Args:
        cache: [rows, H, D], contiguous; page p is its rows from ``p * rows_a_page`` on.
        pages: int32 or int64 [n].
        rows_a_page: rows of one page.

    Returns:
        [n * rows_a_page, H, D], a copy.
    """
    whole = cache.shape[0] // rows_a_page
    by_page = cache[: whole * rows_a_page].view(whole, -1)
    return select_rows(by_page, pages).view(-1, *cache.shape[1:])


def pieces(
    cache: torch.Tensor, table: torch.Tensor, stop: int, page_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first position, rows [n, H, D]) of positions [0, stop) of a request, piece by piece.

    Rows come in the precision to compute in.

    Args:
        cache: [slots, H, D], contiguous.
        table: int32 [pages], physical page of each logical one.
        stop: one past the last position.
        page_size: tokens a page (P).
    """
    some = PIECE_TOKENS // page_size
    for first in range(0, -(-stop // page_size), some):
        start = first * page_size
        rows = pages_of(cache, table[first : min(first + some, -(-stop // page_size))], page_size)
        yield start, rows[: stop - start].to(accumulate_dtype(cache.dtype))


def products(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, stop: int, page_size: int
) -> torch.Tensor:
    """q.k of ``query`` [H, G, D] with positions [0, stop): [H, G, stop]; see :func:`pieces`."""
    found = query.new_empty((*query.shape[:2], stop))
    for start, rows in pieces(cache, table, stop, page_size):
        found[..., start : start + len(rows)] = torch.bmm(query, rows.permute(1, 2, 0))
    return found


def weighted_sum(
    weights: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Rows of positions [0, n) times ``weights`` [H, G, n], added up: [H, G, D]."""
    total = weights.new_zeros((*weights.shape[:2], cache.shape[2]))
    for start, rows in pieces(cache, table, weights.shape[2], page_size):
        total.baddbmm_(weights[..., start : start + len(rows)], rows.transpose(0, 1))
    return total
