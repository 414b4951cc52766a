# SPDX-License-Identifier: Apache-2.0
"""Decode attention for a CPU: KV rows are gathered once for all heads and multiplied in float32."""

import torch

from ..common import accumulate_dtype
from ..paged import products, select_rows, weighted_sum
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax


def gathered_decode_attention_cpu(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, lists: Lists, *, softmax: Softmax,
    out: torch.Tensor, queries: int,
) -> None:  # fmt: skip
    """See :func:`sglang_sparse_kernels.gathered_decode_attention`."""
    lengths, tails, kept = (
        column.tolist() for column in (plan.seq_lens, plan.tail_start, plan.k_units)
    )
    query = q.to(accumulate_dtype(q.dtype)).unflatten(1, (kv.num_heads, -1))
    softmax, windows = kv.logits(softmax), lists.windows
    streams = torch.zeros(kv.num_heads) if windows is None else windows.streams
    reading, streaming = ((streams == kind).nonzero().flatten() for kind in (0, 1))
    for row, (length, tail, units) in enumerate(zip(lengths, tails, kept, strict=True)):
        for token in range(row * queries, (row + 1) * queries):
            end = length + token % queries
            if units == 0 and tail == 0:
                result = _attend_to_all(query[token], kv, row, end, softmax)
            else:
                result = torch.empty_like(query[token])
                if len(reading):
                    positions, hidden = _positions(lists, row, reading, end, tail, units)
                    result[reading] = _attend(
                        query[token], kv, row, reading, positions, hidden, softmax
                    )
                if windows is not None and len(streaming):
                    window = windows.positions(end).expand(len(streaming), -1)
                    result[streaming] = _attend(
                        query[token], kv, row, streaming, window, None, softmax
                    )
            out[token] = result.flatten(0, 1).mul_(kv.scales.v)


def _attend_to_all(
    query: torch.Tensor, kv: KVView, row: int, length: int, softmax: Softmax
) -> torch.Tensor:
    """Attention of ``query`` [H, G, D] to all of a row; [H, G, D]."""
    table = kv.page_table[row]
    logits = softmax.logits(products(query, kv.k, table, length, kv.page_size))
    return weighted_sum(logits.softmax(-1), kv.v, table, kv.page_size)


def _positions(
    lists: Lists, row: int, heads: torch.Tensor, length: int, tail: int, units: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The positions that each of ``heads`` attends to, and which of them are padding.

    Lists differ in length. A shorter one is padded with the row's last position, which every head
    attends to in any case, so padding reads no further row.

    Returns:
        int64 [heads, n] positions, and bool [heads, n] that is set where they are padding, or None
        if nothing is.
    """
    unit, after = lists.unit, torch.arange(tail, length)
    if units == 0:
        return after.expand(len(heads), -1), None
    list_row, num_units = int(lists.rows[row]), min(units, lists.capacity)
    taken = heads if lists.head_map is None else lists.head_map[heads]
    indices, counts = lists.indices[list_row][taken], lists.counts[list_row][taken]
    selected = indices[:, :num_units].long()
    short = min(counts.tolist()) < num_units
    if unit > 1:
        selected = (selected[..., None] * unit + torch.arange(unit)).flatten(1)
    hidden = None
    if short or (unit > 1 and tail % unit):
        in_list = torch.arange(num_units) < counts[:, None]
        shown = in_list.repeat_interleave(unit, 1) & (selected < tail)
        selected = selected.where(shown, length - 1)
        hidden = torch.nn.functional.pad(~shown, (0, length - tail))
    return torch.cat((selected, after.expand(len(heads), -1)), 1), hidden


def _attend(
    query: torch.Tensor,
    kv: KVView,
    row: int,
    heads: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor | None,
    softmax: Softmax,
) -> torch.Tensor:
    """Attention of ``heads`` to ``positions`` [heads, n], without the padding.

    ``query`` is [H, G, D], the result [heads, G, D].
    """
    query, dim = query[heads], query.shape[2]
    # The heads of a slot are rows of their own.
    at = (kv.slots(row, positions) * kv.num_heads + heads[:, None]).flatten()
    keys, values = (
        select_rows(cache.view(-1, dim), at).view(len(heads), -1, dim).to(query.dtype)
        for cache in (kv.k, kv.v)
    )
    logits = softmax.logits(torch.bmm(query, keys.transpose(1, 2)))
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None], float("-inf"))
    return torch.bmm(logits.softmax(-1), values)
