# SPDX-License-Identifier: Apache-2.0
"""Has FlashInfer plan a prompt by the lengths that the host knows.

SGLang gives FlashInfer's ``plan`` a prompt's offsets on the device
(``layers/attention/flashinfer_backend.py: FlashInferIndicesUpdaterPrefill.call_begin_forward``),
and ``plan`` copies them back (``flashinfer/prefill.py``, ``qo_indptr.to("cpu")``). That waits for
the step that runs, so nothing of the prompt is launched beside it. Offsets on the host are copied
to the device instead, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Where each row begins, and where the last ends: int32 [rows + 1], on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class HostLengths:
    """Gives the prefill wrappers of a FlashInfer backend offsets on the host, batch by batch."""

    def __init__(self, backend: Any) -> None:
        """``backend`` is SGLang's; its wrappers keep their own ``begin_forward`` beside ours."""
        ragged, (paged,) = backend.prefill_wrapper_ragged, backend.prefill_wrappers_paged
        self._plan_ragged, self._plan_paged = ragged.begin_forward, paged.begin_forward
        ragged.begin_forward, paged.begin_forward = self._ragged, self._paged
        self._prefix: Sequence[int] = ()
        self._new: Sequence[int] = ()
        self._apart = False

    @contextmanager
    def of(self, forward_batch: ForwardBatch) -> Iterator[None]:
        """While a batch is planned. One that is no prompt is planned as SGLang does it."""
        if forward_batch.forward_mode.is_extend_without_speculative():
            self._prefix = forward_batch.extend_prefix_lens_cpu
            self._new = forward_batch.extend_seq_lens_cpu
        try:
            yield
        finally:
            self._prefix, self._new, self._apart = (), (), False

    def _ragged(self, rows: torch.Tensor, keys: torch.Tensor, *args: Any, **kw: Any) -> None:
        """Plan attention among a prompt's new tokens; what is cached then comes by itself."""
        if self._new:
            self._apart = True
            rows = keys = self._checked(self._new, rows)
        self._plan_ragged(rows, keys, *args, **kw)

    def _paged(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        indices: torch.Tensor,
        last_page: torch.Tensor,
        *args: Any,
        **kw: Any,
    ) -> None:
        """Plan attention to what is cached, or to all tokens where nothing was planned apart."""
        if self._new:
            cached = self._prefix
            if not self._apart:
                cached = [a + b for a, b in zip(self._prefix, self._new, strict=True)]
            rows, keys = self._checked(self._new, rows), self._checked(cached, keys)
            last_page = torch.ones(len(self._new), dtype=torch.int32)  # pages of one token
        self._plan_paged(rows, keys, indices, last_page, *args, **kw)

    @staticmethod
    def _checked(lengths: Sequence[int], given: torch.Tensor) -> torch.Tensor:
        """Offsets of ``lengths``; raises RuntimeError if SGLang planned another number of rows."""
        if len(lengths) + 1 != len(given):
            raise RuntimeError(
                f"SGLang plans {len(given) - 1} rows of a prompt, the host knows {len(lengths)}"
            )
        return offsets(lengths)
