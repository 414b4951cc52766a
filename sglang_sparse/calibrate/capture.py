# SPDX-License-Identifier: Apache-2.0
"""Runs a model of transformers and records the queries and keys of its attention layers."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sparse.calibrate.loading import load_model
from sglang_sparse.calibrate.similarity import LayerQK
from sglang_sparse.config import ConfigError

Importance = Literal["cosine", "effect"]
# The tokens that a layer still sees while its effect is measured, and the measured positions.
SINK, RECENT = 16, 64
JUDGED = 64


class Capture:
    """A model whose forward pass records queries, keys and importance.

    Attributes:
        geometry: its shape.
        tokenizer: its tokenizer.
        device: where it runs.
    """

    def __init__(self, path: str, device: str) -> None:
        """Load the model at ``path`` in bf16 on a GPU, in fp32 on a CPU.

        Raises:
            ConfigError: transformers cannot load it, or its layers are not plain Llama-like ones.
        """
        self.device = torch.device(device)
        loaded = load_model(path, self.device, self._attend)
        self.geometry, self.tokenizer = loaded.geometry, loaded.tokenizer
        self._model: Any = loaded.model
        self._seen: dict[int, LayerQK] = {}
        self._inputs: dict[int, Tensor] = {}
        self._importance: dict[int, float] = {}
        self._cut: int | None = None
        layers = getattr(self._model.base_model, "layers", ())
        for index, layer in enumerate(layers):
            if not (hasattr(layer, "input_layernorm") and hasattr(layer, "self_attn")):
                layers = ()
                break
            layer.input_layernorm.register_forward_pre_hook(self._before(index))
            layer.self_attn.register_forward_hook(self._after(index))
        if len(layers) != self.geometry.num_hidden_layers:
            raise ConfigError(
                flag="--model",
                value=path,
                problem="its layers have no input_layernorm and self_attn",
                allowed="Llama- or Qwen-shaped models",
                remedy="calibrate another model",
            )

    def _before(self, index: int) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            self._inputs[index] = args[0]

        return hook

    def _after(self, index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            x = self._inputs.pop(index).float()
            y = x + output[0].float()
            self._importance[index] = float(1.0 - F.cosine_similarity(x, y, dim=-1).mean())

        return hook

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
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        self._seen[module.layer_idx] = LayerQK(query[0], key[0], scaling)
        mask = None
        if module.layer_idx == self._cut:
            key_at = torch.arange(key.shape[2], device=key.device)
            ago = key_at[:, None] - key_at
            mask = (ago >= 0) & ((ago < RECENT) | (key_at < SINK))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def run(self, ids: list[int], importance: Importance) -> tuple[list[LayerQK], list[float]]:
        """Every layer's queries and keys of one prompt, and its importance.

        Args:
            ids: the prompt.
            importance: "cosine": 1 - cos(x, y) of the residual stream before and after a layer's
                attention, mean over the prompt's tokens (Kascade section 3.3); "effect": how far
                the predictions at the prompt's end move (Kullback-Leibler divergence) if the layer
                sees the first and the last tokens alone.
        """
        tokens = torch.tensor([ids], device=self.device)
        before = self._predict(tokens)
        layers = [self._seen.pop(i) for i in range(self.geometry.num_hidden_layers)]
        if importance == "cosine":
            return layers, [self._importance[i] for i in range(len(layers))]
        effects = []
        for self._cut in range(len(layers)):
            after = self._predict(tokens)
            effects.append(float((before.exp() * (before - after)).sum(-1).mean()))
        self._cut = None
        self._seen.clear()
        return layers, effects

    def _predict(self, tokens: Tensor) -> Tensor:
        """fp32 [positions, vocabulary] log-probabilities at the end of the prompt."""
        output = self._model(tokens, use_cache=False, logits_to_keep=JUDGED)
        predicted: Tensor = output.logits[0].float().log_softmax(-1)
        return predicted
