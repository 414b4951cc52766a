# SPDX-License-Identifier: Apache-2.0
"""Prompts of a server whose KV lies in host memory: a copy of one layer at a time on the device.

The inner backend attends to rows, as ever. It sees a pool that has the pages of one layer of a
batch's requests, and a table that leads to them. The prefixes of a layer are copied from the host
while the layer before it runs; what the layer writes goes back to the host behind its attention.
There are two buffers, which layers take in turns. Requests lie in a buffer one behind the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse.backend.window_view import View
from sglang_sparse_kernels.frames import read_pages, write_pages
from sglang_sparse_radix.host_kv import StagedPlanes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_sparse_radix.host_kv import HostKVPool

_BUFFERS = 2
# Triton compiles a kernel anew for another kind of stride; a table of one row has no use for it.
_ROW_STRIDE = 16


@dataclass(frozen=True)
class Span:
    """A request of a prefill batch, and where its pages lie in a buffer.

    Attributes:
        pages: int32 [n], its physical pages up to the batch's last token.
        base: page of a buffer that its first page is copied to.
        prefix: tokens before those of the batch.
        end: tokens with those of the batch.
        page_size: tokens.
    """

    pages: torch.Tensor
    base: int
    prefix: int
    end: int
    page_size: int

    @property
    def read(self) -> torch.Tensor:
        """Pages with tokens of the prefix."""
        return self.pages[: -(-self.prefix // self.page_size)]

    @property
    def first(self) -> int:
        """The first logical page that the batch writes to."""
        return self.prefix // self.page_size

    @property
    def written(self) -> torch.Tensor:
        """Pages that the batch writes to."""
        return self.pages[self.first :]

    @property
    def open_page(self) -> torch.Tensor:
        """The last page if it is not full, int32 [1], else none, [0]."""
        return self.pages[len(self.pages) - bool(self.end % self.page_size) :]


class HostPrompts:
    """Buffers of two layers, the table that leads to them, and the copies from and to the host.

    Attributes:
        pages: that a buffer has room for.
        spans: requests of the batch that was planned last.
        table: int32 [request slots, max context], slots in a buffer by request slot and position.
        read_bytes, written_bytes: from and to the host, of all batches that were planned.
    """

    def __init__(
        self, pool: HostKVPool, *, request_slots: int, max_context: int, pages: int
    ) -> None:
        """Make the buffers.

        Args:
            pool: keys and values in host memory.
            request_slots: rows of SGLang's request table.
            max_context: its columns.
            pages: of the longest batch.
        """
        self._pool, self._device = pool, torch.device(pool.device)
        # Page 0, which the table has for rows of nobody, stays empty.
        shape = ((1 + pages) * pool.page_size, pool.head_num, pool.head_dim)
        self._buffers = tuple(
            (
                torch.zeros(shape, dtype=pool.dtype, device=self._device),
                torch.zeros(shape, dtype=pool.dtype, device=self._device),
            )
            for _ in range(_BUFFERS)
        )
        self._planes = [StagedPlanes(pool, [k]) for k, _ in self._buffers]
        self.pages = pages
        self.table = torch.zeros(
            (request_slots, max_context), dtype=torch.int32, device=self._device
        )
        self.spans: list[Span] = []
        self.read_bytes = self.written_bytes = 0
        self._slots = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._copies = _Copies(self._device)

    # What the inner backend sees.

    def runner(self, runner: Any) -> Any:
        """A model runner whose pool and table are those of a prompt."""
        return View(
            runner,
            token_to_kv_pool=View(
                self._pool,
                get_key_buffer=lambda layer: self._buffer(layer)[0],
                get_value_buffer=lambda layer: self._buffer(layer)[1],
                get_kv_buffer=self._buffer,
                set_kv_buffer=self._store,
            ),
            req_to_token_pool=View(runner.req_to_token_pool, req_to_token=self.table),
        )

    def _buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._buffers[layer % _BUFFERS]

    def _store(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        """Write the batch's keys and values; `loc` says where they would lie in a resident pool.

        Fp8 weights bring scales of 1, which are for keys in fp8: SGLang divides only what it casts.
        """
        if k.dtype != self._pool.dtype and any(scale is not None for scale in scales):
            raise RuntimeError(
                f"keys of {k.dtype} with scales cannot be kept as {self._pool.dtype} in host "
                "memory: start with --kv-cache-dtype auto"
            )
        for rows, fresh in zip(self._buffer(layer.layer_id), (k, v), strict=True):
            # Rows behind the batch's tokens pad a graph.
            fresh = fresh.view(-1, *rows.shape[1:])[: len(self._slots)]
            rows.index_copy_(0, self._slots, fresh.to(rows.dtype))

    # A batch.

    def plan(self, forward_batch: ForwardBatch, page_table: torch.Tensor) -> None:
        """Lay out a batch's requests in the buffers, and begin to load the first layer.

        Args:
            forward_batch: of a prefill.
            page_table: int32 [requests, max_pages], physical pages.

        Raises:
            RuntimeError: its requests are longer than a buffer.
        """
        prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        self.spans = lay_out(page_table, prefixes, lengths, self._pool.page_size)
        used = sum(len(span.pages) for span in self.spans)
        if used > self.pages:
            raise RuntimeError(f"a prefill of {used} pages exceeds the {self.pages} of a copy")
        of_a_page = self._pool.host[:, 0].nbytes
        # What is left open goes from the host to where decoding goes on.
        read = sum(len(span.read) + len(span.open_page) for span in self.spans)
        self.read_bytes += of_a_page * read
        self.written_bytes += of_a_page * sum(len(span.written) for span in self.spans)
        slots, page = forward_batch.req_pool_indices.long(), self._pool.page_size
        written = []
        for row, span in enumerate(self.spans):
            start = span.base * page
            places = torch.arange(start, start + span.end, device=self._device)
            self.table[:, : span.end].index_copy_(0, slots[row : row + 1], places.int()[None])
            written.append(places[span.prefix :])
        self._slots = torch.cat(written)
        self._places = torch.cat(
            [
                torch.arange(s.base + s.first, s.base + len(s.pages), device=self._device)
                for s in self.spans
            ]
        )
        self._written = torch.cat([span.written for span in self.spans]).long()
        self._load(self._pool.start_layer)

    def begin_layer(self, layer: int) -> None:
        """Wait for a layer's prefix, and begin to load the next one's."""
        self._copies.wait(layer % _BUFFERS)
        if layer + 1 < self._pool.end_layer:
            self._load(layer + 1)

    def _load(self, layer: int) -> None:
        k, v = self._buffer(layer)
        with self._copies.into(layer % _BUFFERS):
            for span in self.spans:
                start = span.base * self._pool.page_size
                read_pages(self._host(layer), span.read, k[start:], v[start:], impl=self._pool.impl)

    def end_layer(self, layer: int) -> None:
        """Write what a layer computed to the host, and bring its planes up to date."""
        k, v = self._buffer(layer)
        for span in self.spans:
            start = (span.base + span.first) * self._pool.page_size
            write_pages(self._host(layer), span.written, k[start:], v[start:], impl=self._pool.impl)
        if layer not in self._pool.plane_layers:
            return
        planes, page = self._planes[layer % _BUFFERS], self._pool.page_size
        # Rows of the written pages alone, counted from the first of them.
        for span in self.spans:
            count = len(span.written)
            first = torch.arange(
                span.base + span.first, span.base + span.first + count, device=self._device
            )
            start = torch.zeros(1, dtype=torch.int32, device=self._device)
            tokens = span.end - span.first * page
            table = first.int().as_strided((1, count), (_ROW_STRIDE, 1))
            planes.update(table, start, start + tokens, max_new_tokens=tokens)
        planes.copy(layer, self._places, self._written)

    def rehearse(self, tokens: int) -> None:
        """Launch what a prompt needs beside attention; see `ahead.compile_kernels`.

        Args:
            tokens: of the longest chunk.
        """
        k, v = self._buffers[0]
        pages = torch.zeros(2, dtype=torch.int32, device=self._device)
        for some in (pages[:1], pages[1:]):  # of either alignment
            for copy in (read_pages, write_pages):
                copy(self._host(self._pool.start_layer), some, k, v, impl=self._pool.impl)
        table, ends = pages[:1].as_strided((1, 1), (_ROW_STRIDE, 1)), pages[:1]
        self._planes[0].update(table, ends, ends, max_new_tokens=tokens)

    def _host(self, layer: int) -> torch.Tensor:
        return self._pool.host[layer - self._pool.start_layer]

    def nbytes(self) -> int:
        """Device bytes of the buffers, of planes before they are copied, and of the table."""
        rows = sum(k.nbytes + v.nbytes for k, v in self._buffers)
        return rows + sum(planes.nbytes() for planes in self._planes) + self.table.nbytes


def buffer_bytes(pool: HostKVPool, pages: int) -> int:
    """Device bytes of the buffers of :class:`HostPrompts`, and of planes before they are copied."""
    heads, dim, page = pool.head_num, pool.head_dim, pool.page_size
    rows = 2 * page * heads * dim * pool.dtype.itemsize
    planes = pool.plane_spec.bytes_per_page(heads, dim, page, pool.dtype)
    return _BUFFERS * (1 + pages) * (rows + planes)


def lay_out(
    page_table: torch.Tensor, prefixes: Sequence[int], lengths: Sequence[int], page_size: int
) -> list[Span]:
    """Put requests one behind the other in a buffer, from page 1 on.

    Args:
        page_table: int32 [requests, max_pages], physical pages.
        prefixes: tokens of each request before those of the batch.
        lengths: tokens of each in the batch.
        page_size: tokens.
    """
    spans, base = [], 1
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        pages = -(-(prefix + length) // page_size)
        spans.append(Span(page_table[row, :pages], base, prefix, prefix + length, page_size))
        base += pages
    return spans


class _Copies:
    """A stream for copies into buffers, where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = [torch.cuda.Event() for _ in range(_BUFFERS)] if self._stream else []

    def into(self, buffer: int) -> AbstractContextManager[Any]:
        """Inside, work goes behind all that was launched before; `wait` waits for it."""
        return nullcontext() if self._stream is None else _Copying(self._stream, self._done[buffer])

    def wait(self, buffer: int) -> None:
        """Let the current stream wait for the copies into a buffer."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done[buffer])


class _Copying:
    """Copies on a stream, with an event behind them."""

    def __init__(self, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        self._stream, self._done = stream, done
        self._inside = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._done.record(self._stream)
        self._inside.__exit__(*error)
