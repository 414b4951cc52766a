# SPDX-License-Identifier: Apache-2.0
"""Attention of draft models in PyTorch, for a CPU: SGLang has none for its ``torch_native``.

Seams: ``layers/attention/torch_native_backend.py: TorchNativeAttnBackend``, and what
``speculative/eagle_worker_v2.py: EagleDraftWorker`` asks of a draft's backends.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftSteps:
    """Backends of the steps that draft a chain, each a token longer than the one before.

    Attributes:
        attn_backends: one a step. The last draft token is never fed back.
        needs_cpu_seq_lens: whether steps read the lengths on the host.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner, steps: int) -> None:
        """``steps`` is the number of draft tokens."""
        self.attn_backends = [DraftStep(runner, done + 1) for done in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing is planned: each step reads the batch."""


class DraftStep(TorchNativeAttnBackend):
    """Decodes for rows that are longer than the batch says."""

    def __init__(self, runner: ModelRunner, longer: int) -> None:
        """``longer`` tokens were drafted for each row, the one that is run included.

        ``ForwardBatch.seq_lens`` of a draft counts the committed tokens in all steps.
        """
        super().__init__(runner)
        self._longer = longer

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch = copy(forward_batch)
        batch.seq_lens = forward_batch.seq_lens + self._longer
        out: torch.Tensor = super().forward_decode(
            q, k, v, layer, batch, save_kv_cache=save_kv_cache, **kwargs
        )
        return out
