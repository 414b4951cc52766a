# SPDX-License-Identifier: Apache-2.0
"""A model whose KV heads each have a gate between full attention and sinks with a local window.

The output of head h is gate_h * full + (1 - gate_h) * streaming (DuoAttention, arXiv 2410.10819,
section 2.2). At 1 a head needs all of the context, at 0 it streams.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sparse.calibrate.loading import load_model
from sglang_sparse.config import ConfigError

JUDGED = 64
"""Positions at a prompt's end whose predictions are judged; answers are among them."""

_QUERIES = 1024  # of a window that are computed together


def windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, sink: int, local: int
) -> Tensor:
    """Causal attention of each token to the first ``sink`` and the last ``local`` tokens.

    Args:
        query: [1, heads, N, D].
        key, value: [1, KV heads, N, D].
        scale: factor on q.k.
        sink, local: tokens; ``local`` counts the query's own.

    Returns:
        [1, heads, N, D]. Work grows with N times the window.
    """
    length, parts = query.shape[2], []
    for first in range(0, length, _QUERIES):
        last = min(first + _QUERIES, length)
        start = min(max(first - local + 1, 0), first)
        sinks = torch.arange(min(sink, start), device=query.device)
        at = torch.cat((sinks, torch.arange(start, last, device=query.device)))
        ago = torch.arange(first, last, device=query.device)[:, None] - at
        mask = (ago >= 0) & ((ago < local) | (at < sink))
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, at], value[:, :, at], attn_mask=mask,
                scale=scale, enable_gqa=True,
            )
        )  # fmt: skip
    return torch.cat(parts, 2)


class GatedModel:
    """A frozen model with a gate a KV head.

    Attributes:
        geometry, tokenizer: the model's.
        device: where it runs.
        sink, local: what a streaming head sees.
    """

    def __init__(self, path: str, device: str, *, sink: int, local: int) -> None:
        """Load the model at ``path``; all gates are 1.

        Raises:
            ConfigError: transformers cannot load it, or its attention is not plain GQA.
        """
        self.device, self.sink, self.local = torch.device(device), sink, local
        loaded = load_model(path, self.device, self._attend)
        self.geometry, self.tokenizer = loaded.geometry, loaded.tokenizer
        self._model: Any = loaded.model.requires_grad_(False)
        if self.device.type == "cuda":
            self.recompute_layers()
        self._gates: Tensor | None = None
        self._called: set[int] = set()
        self.hidden(torch.zeros((1, 2), dtype=torch.int64, device=self.device))
        if self._called != set(range(self.geometry.num_hidden_layers)):
            raise ConfigError(
                flag="--model",
                value=path,
                problem="its layers do not take transformers' attention interface",
                allowed="Llama- or Qwen-shaped models",
                remedy="calibrate another model",
            )

    def recompute_layers(self) -> None:
        """Keep only what layers take in for the backward pass, which computes the rest anew."""
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model.train()  # there is no dropout

    def ones(self) -> Tensor:
        """float32 [layers, KV heads], all 1."""
        shape = (self.geometry.num_hidden_layers, self.geometry.num_key_value_heads)
        return torch.ones(shape, device=self.device)

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface: [1, heads, N, D] in, [1, N, heads, D] out."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._called.add(module.layer_idx)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        gates = None if self._gates is None else self._gates[module.layer_idx]
        if gates is not None and (gates.requires_grad or bool((gates != 1).any())):
            seen = windowed_attention(
                query, key, value, scale=scale, sink=self.sink, local=self.local
            )
            share = gates.repeat_interleave(query.shape[1] // key.shape[1])
            share = share[None, :, None, None].to(out.dtype)
            out = share * out + (1 - share) * seen
        return out.transpose(1, 2).contiguous(), None

    def hidden(self, tokens: Tensor, gates: Tensor | None = None) -> Tensor:
        """fp32 [positions, width]: last hidden states at the end of a prompt, after the norm.

        A backward pass through them comes before the next call: layers may be computed anew in it,
        with the gates of the last call.

        Args:
            tokens: int64 [1, N].
            gates: [layers, KV heads]; 1 for all if None.
        """
        self._gates = gates
        states = self._model.base_model(tokens, use_cache=False).last_hidden_state
        judged: Tensor = states[0, -JUDGED:].float()
        return judged

    def predictions(self, tokens: Tensor, gates: Tensor | None = None) -> Tensor:
        """fp32 [positions, vocabulary] log-probabilities; arguments as for :meth:`hidden`."""
        head = self._model.get_output_embeddings()
        states = self.hidden(tokens, gates).to(head.weight.dtype)
        predicted: Tensor = head(states).float().log_softmax(-1)
        return predicted

    def tokens(self, ids: list[int]) -> Tensor:
        """int64 [1, N] on the model's device."""
        return torch.tensor([ids], device=self.device)
