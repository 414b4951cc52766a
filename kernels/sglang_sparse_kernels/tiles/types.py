# SPDX-License-Identifier: Apache-2.0
"""The description of one prefill batch as tiles of queries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..common import sent
from ..plan import DecodePlan
from ..plan.types import PPM

_ALIGNMENT = 16


@dataclass(frozen=True)
class TilePlan:
    """Tiles of a prefill batch, T of them.

    Attributes:
        rows: a row a tile. ``update_start`` is the position of its first query and ``seq_lens`` one
            past its last; selection covers [0, tail_start), and a query at position p attends to
            its tile's list and to [tail_start, p]. ``tail_start`` is 0 for a dense tile.
        q_rows: int32 [T], row of a tile's first query among the batch's tokens.
        tile_tokens: most queries a tile has.
        max_units: largest ``k_units``, on the host; 0 if no tile selects.
        max_tail: largest ``tail_start``, on the host.
    """

    rows: DecodePlan
    q_rows: torch.Tensor
    tile_tokens: int
    max_units: int
    max_tail: int

    def part(self, start: int, stop: int) -> "TilePlan":
        """Tiles [start, stop)."""
        part = slice(start, stop)
        return replace(self, rows=self.rows.part(part), q_rows=self.q_rows[part])


def tile_tokens_of(tile: int, group: int, page_size: int) -> int:
    """Tokens in a tile of ``tile`` queries, where each token has a group of query heads.

    It is the largest power of two that fits and divides a page. So a cached prefix, which ends with
    a page, never ends inside a tile.
    """
    tokens = 1
    while 2 * tokens * group <= tile and 2 * tokens <= page_size:
        tokens *= 2
    return tokens


def tile_budget(tail: int, *, floor: int, fraction: float) -> int:
    """Tokens that a tile selects of the ``tail`` before it, in exact integer arithmetic."""
    return min(tail, max(floor, -(-tail * round(fraction * PPM) // PPM)))


def plan_tiles(
    page_table: torch.Tensor,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    *,
    tile_tokens: int,
    min_tokens: int,
    floor: int,
    fraction: float,
    dense: Sequence[bool] = (),
    unit: int = 1,
) -> TilePlan:
    """Cut the new tokens of a batch into tiles; all arithmetic is on the host.

    Tiles start at multiples of ``tile_tokens`` within the request, wherever its chunk starts. A
    tile that starts at s >= ``min_tokens`` selects min(s, max(floor, ceil(fraction * s))) of the s
    tokens before it, in whole units; other tiles are dense. So what a token attends to follows from
    its position alone. How the prompt was cut into chunks, and what was cached, make no difference.

    Args:
        page_table: int32 [R, max_pages], pages of each request.
        prefix_lens: tokens of each request whose KV was computed before.
        extend_lens: new tokens of each request, in the order of the batch's queries.
        tile_tokens: see :func:`tile_tokens_of`.
        min_tokens: tiles that start before this are dense.
        floor: smallest budget, in tokens.
        fraction: budget as a fraction of the tokens before the tile, exact to one millionth.
        dense: whether all tiles of a request are dense; requests past its end are not.
        unit: tokens that are selected together.
    """
    columns: list[tuple[int, int, int, int, int, int]] = []
    q_row = 0
    for request, (prefix, extend) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        first = prefix
        while first < prefix + extend:
            aligned = first // tile_tokens * tile_tokens
            end = min(aligned + tile_tokens, prefix + extend)
            budget = 0
            if aligned >= max(min_tokens, 1) and not any(dense[request : request + 1]):
                budget = -(-tile_budget(aligned, floor=floor, fraction=fraction) // unit)
            columns.append((request, first, end, aligned if budget else 0, budget, q_row))
            q_row += end - first
            first = end
    # Triton compiles anew for vectors that do not start on 16 bytes: each starts on its own line.
    table = torch.zeros((6, -(-len(columns) // _ALIGNMENT) * _ALIGNMENT), dtype=torch.int32)
    table[:, : len(columns)] = torch.tensor(columns, dtype=torch.int32).view(-1, 6).T
    table = sent(table, page_table.device)[:, : len(columns)]
    requests, firsts, ends, tails, units, queries = table.unbind()
    number = torch.arange(table.shape[1], dtype=torch.int32, device=page_table.device)
    rows = DecodePlan(
        page_table=page_table[requests.long()],
        seq_lens=ends,
        tail_start=tails,
        k_units=units,
        reselect=(units > 0).int(),
        refresh=torch.zeros_like(units),
        request_slots=number,
        update_start=firsts,
    )
    return TilePlan(
        rows,
        queries,
        tile_tokens,
        max_units=max((column[4] for column in columns), default=0),
        max_tail=max((column[3] for column in columns), default=0),
    )
