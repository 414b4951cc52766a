# SPDX-License-Identifier: Apache-2.0
"""Has FlashInfer plan a prompt by the lengths that the host knows, and a short one in one piece.

SGLang gives FlashInfer's ``plan`` a prompt's offsets on the device
(``layers/attention/flashinfer_backend.py: FlashInferIndicesUpdaterPrefill.call_begin_forward``),
and ``plan`` copies them back (``flashinfer/prefill.py``, ``qo_indptr.to("cpu")``). That waits for
the step that runs, so nothing of the prompt is launched beside it. Offsets on the host are copied
to the device instead, for which nobody waits.

SGLang attends to new and to cached tokens apart and merges both, unless
``SGLANG_FLASHINFER_USE_PAGED`` is set (``FlashInferAttnBackend.use_paged``). A chunk of few tokens
takes longer to launch than to run, layer by layer, while every other request waits for its next
token. So such chunks attend to all their tokens at once: one call a layer instead of three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


# New tokens of a batch that attends in one piece. Batches of some fifty were measured; a long one
# runs for longer than its launches take, so nothing is to be gained there.
_MOST_TOGETHER = 512


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Where each row begins, and where the last ends: int32 [rows + 1], on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class HostLengths:
    """Gives the prefill wrappers of a FlashInfer backend offsets on the host, batch by batch."""

    def __init__(self, backend: Any, *, together: bool) -> None:
        """Take the place of the wrappers' ``begin_forward``, which are kept beside ours.

        Args:
            backend: SGLang's.
            together: whether short chunks attend in one piece. Where KV is fp8 they do not: SGLang
                attends to new keys before they are rounded.
        """
        updater = backend.indices_updater_prefill
        self._together = together and updater.data_type == updater.q_data_type
        self._backend, self._use_paged = backend, backend.use_paged
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
            short = self._together and sum(self._new) <= _MOST_TOGETHER
            self._backend.use_paged = self._use_paged or (short and any(self._prefix))
        try:
            yield
        finally:
            self._backend.use_paged = self._use_paged
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
