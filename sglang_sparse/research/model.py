# SPDX-License-Identifier: Apache-2.0
"""A plain Llama in PyTorch whose parameters carry the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (layer, q [B, heads, T, D], k and v [B, kv_heads, T, D]) to [B, heads, T, D], causal.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of the reference model; the defaults are the shipped one."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 500_000.0
    rms_eps: float = 1e-5
    max_positions: int = 32_768

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads

    def to_hf(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """``config.json`` of a ``LlamaForCausalLM``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": self.rms_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_hf`; also reads the ``rope_parameters`` of newer files."""
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rope_theta=float(theta),
            rms_eps=config["rms_norm_eps"],
            max_positions=config["max_position_embeddings"],
        )


def rope_tables(
    config: ModelConfig, length: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[length, head_dim]`` in fp32, each half repeated as Llama does."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    inverse = 1.0 / config.rope_theta ** (exponent / config.head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on ``x [..., head_dim]`` with tables that broadcast to it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm, in fp32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


class Linear(nn.Linear):
    """A bias-free linear map that computes in its input's dtype over fp32 master weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Projections of grouped-query attention; the attending itself is left to the caller."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width)
        self.k_proj = Linear(config.hidden_size, kv_width)
        self.v_proj = Linear(config.hidden_size, kv_width)
        self.o_proj = Linear(width, config.hidden_size)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer in two parts, before and after attention, so that both compile alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q ``[N, heads, D]`` and k, and v ``[N, kv_heads, D]``, of ``x [N, hidden]``."""
        c = self.config
        y = self.input_layernorm(x)
        q = self.self_attn.q_proj(y).view(-1, c.heads, c.head_dim)
        k = self.self_attn.k_proj(y).view(-1, c.kv_heads, c.head_dim)
        v = self.self_attn.v_proj(y).view(-1, c.kv_heads, c.head_dim)
        cos, sin = cos[:, None], sin[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input ``[N, hidden]`` and attention ``[N, heads * D]``."""
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


def dense_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally to everything, in any layer."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)


class ReferenceModel(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """Initialise from ``seed``: normal, 0.02, residual outputs scaled down by depth."""
        super().__init__()
        self.config = config
        self.model = Body(config)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.layers) ** 0.5 if scaled else 0.02
                with torch.no_grad():
                    p.copy_(torch.randn(p.shape, generator=generator) * std)

    def layer(self, index: int) -> Layer:
        """Layer ``index``."""
        layer = self.model.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings of ``ids`` in ``dtype``."""
        return F.embedding(ids, self.model.embed_tokens.weight).to(dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states."""
        y = self.model.norm(hidden)
        return F.linear(y, self.model.embed_tokens.weight.to(y.dtype))

    def forward(
        self,
        ids: Tensor,
        dtype: torch.dtype = torch.float32,
        tables: tuple[Tensor, Tensor] | None = None,
        keep: list[tuple[Tensor, Tensor]] | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Final hidden states ``[B, T, hidden]`` before the norm, of ``ids [B, T]``.

        ``keep`` collects each layer's rotated K and V, ``[B, T, kv_heads, D]``.
        ``attend`` takes the place of dense causal attention.
        """
        c, attend = self.config, attend or dense_attention
        batch, length = ids.shape
        cos, sin = tables or rope_tables(c, length, ids.device)
        cos, sin = (t[:length].to(dtype).repeat(batch, 1) for t in (cos, sin))
        x = self.embed(ids.reshape(-1), dtype)
        for index in range(c.layers):
            layer = self.layer(index)
            q, k, v = layer.project(x, cos, sin)
            if keep is not None:
                keep.append(
                    (k.view(batch, length, *k.shape[1:]), v.view(batch, length, *v.shape[1:]))
                )
            q, k, v = (t.view(batch, length, -1, c.head_dim).transpose(1, 2) for t in (q, k, v))
            out = attend(index, q, k, v)
            x = layer.finish(x, out.transpose(1, 2).reshape(batch * length, -1))
        return x.view(batch, length, -1)
