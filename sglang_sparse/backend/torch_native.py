# SPDX-License-Identifier: Apache-2.0
"""SGLang's dense backend for a CPU, where only new tokens of prompts attend.

Seam: ``layers/attention/torch_native_backend.py: TorchNativeAttnBackend``.
"""

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import pad, scaled_dot_product_attention

_QUERIES = 512  # of one mask


class TorchNativeBackend(TorchNativeAttnBackend):
    """SGLang's own, but for causal prompts."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *rows: Any,
        **kind: Any,
    ) -> torch.Tensor:
        """Attention of each row's last tokens, SGLang's own unless it is plain causal.

        Args:
            query, output: [tokens, heads, head_dim].
            k_cache, v_cache: [slots, kv_heads, head_dim].
            rows: SGLang's table, int32 [request slots, max context]; of each row its request slot,
                tokens, those before the new ones, new ones, and an encoder's.
            kind: of attention.
        """
        req_to_token, request_slots, seq_lens, _, new_tokens, encoder = rows
        if encoder is not None or not kind["causal"] or kind["sliding_window_size"] is not None:
            out: torch.Tensor = super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, *rows, **kind
            )
            return out
        attend = partial(_attend, scale=kind["scaling"], enable_gqa=kind["enable_gqa"])
        done = 0
        lengths = (of_each.tolist() for of_each in (request_slots, seq_lens, new_tokens))
        for row, length, new in zip(*lengths, strict=True):
            slots, here = req_to_token[row, :length], slice(done, done + new)
            q, k, v = (
                x.movedim(0, 1).unsqueeze(0).to(query.dtype)
                for x in (query[here], k_cache[slots], v_cache[slots])
            )
            output[here] = attend(q, k, v).squeeze(0).movedim(1, 0)
            done += new
        return output


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """Causal attention of the last tokens of a row, ``q``."""
    new = q.shape[2]
    end = k.shape[2] - new
    if end < new // 2:
        # A mask would cost more than to compute the few tokens before, too.
        whole = pad(q, (0, 0, end, 0))
        return scaled_dot_product_attention(whole, k, v, is_causal=True, **how)[:, :, end:]
    parts = []
    for part in q.split(_QUERIES, dim=2):
        start, end = end, end + part.shape[2]
        position = torch.arange(end)
        seen = position <= position[start:, None]
        k_seen, v_seen = k[:, :, :end], v[:, :, :end]
        parts.append(scaled_dot_product_attention(part, k_seen, v_seen, attn_mask=seen, **how))
    return torch.cat(parts, dim=2)
