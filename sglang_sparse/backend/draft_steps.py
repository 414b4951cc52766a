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
from torch.nn.functional import scaled_dot_product_attention

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


class DraftExtension(TorchNativeAttnBackend):
    """Prefill of prompts, and of the tokens that a verification ran.

    For a few tokens behind a long row SGLang's own would attend from every token of the row.
    """

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *rows: Any,
        scaling: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Causal attention of the last tokens of each row to the whole row.

        Args:
            query, output: [tokens, heads, head_dim].
            k_cache, v_cache: [slots, kv_heads, head_dim].
            rows: SGLang's table, int32 [request slots, max context]; int64 [rows] request slots,
                and tokens of each row, the new ones included; int32 [rows] tokens before the new
                ones, and new ones; the lengths of an encoder, which a draft model lacks.
            scaling: of the logits.
            enable_gqa: whether query heads share KV heads.
            kwargs: of other kinds of attention, which a draft model lacks.
        """
        done = 0
        req_to_token, request_slots, seq_lens, _, new_tokens = rows[:5]
        lengths = (of_each.tolist() for of_each in (request_slots, seq_lens, new_tokens))
        for row, length, new in zip(*lengths, strict=True):
            slots = req_to_token[row, :length]
            position = torch.arange(length)
            found = scaled_dot_product_attention(
                query[done : done + new].movedim(0, 1).unsqueeze(0),
                k_cache[slots].movedim(0, 1).unsqueeze(0).to(query.dtype),
                v_cache[slots].movedim(0, 1).unsqueeze(0).to(query.dtype),
                attn_mask=position <= position[length - new :, None],
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[done : done + new] = found.squeeze(0).movedim(1, 0)
            done += new
        return output
