# SPDX-License-Identifier: Apache-2.0
"""The paper's algorithms one token at a time: what everything else is tested against.

Algorithm 2 of arXiv:2406.17808 inserts a token, algorithm 1 attends in strides. Nothing here is
fast, and nothing here shares code with the implementations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..records import Softmax
from .types import AttentionAverage, CascadeShape


@dataclass
class Token:
    """A token that one KV head holds: position, key before rotation, value, score."""

    position: int
    key: torch.Tensor
    value: torch.Tensor
    score: float = 0.0


@dataclass
class SequentialCascade:
    """The cache of one KV head. Levels hold their oldest token first."""

    shape: CascadeShape
    seen: int = 0
    sinks: list[Token] = field(default_factory=list)
    levels: list[list[Token]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels = [[] for _ in range(self.shape.levels)]

    def insert(self, token: Token) -> None:
        """Algorithm 2. Until the window is full every level accepts, so that nothing is lost."""
        tick = self.seen - self.shape.sinks
        self.seen += 1
        if tick < 0:
            self.sinks.append(token)
            return
        for i, level in enumerate(self.levels):
            if len(level) < self.shape.level:
                level.append(token)
                return
            if tick < self.shape.window or tick % 2**i == 0:
                level.append(token)
                token = level.pop(0)
            else:
                if token.score >= level[-1].score:
                    level[-1] = token
                return

    def tokens(self) -> list[Token]:
        """All tokens in the order of the cache: sinks, then the levels from the last one on."""
        return self.sinks + [token for level in reversed(self.levels) for token in level]


def rotate_one(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """``x`` [D] rotated by one row of a cos-sin table [D], halves against each other."""
    half = x.shape[0] // 2
    cos, sin = cos_sin[:half].to(x.dtype), cos_sin[half:].to(x.dtype)
    return torch.cat((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin))


def sequential_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: CascadeShape,
    cos_sin: torch.Tensor,
    *,
    softmax: Softmax,
    average: AttentionAverage,
) -> tuple[torch.Tensor, list[list[Token]]]:
    """Algorithm 1: a whole request, in strides counted from its sinks on.

    Args:
        q: [T, H * G, D] before rotation, and k, v [T, H, D].
        shape: the cache's.
        cos_sin: [positions, D], a row of cosines and sines for each cache position.
        softmax, average: of the attention.

    Returns:
        Outputs [T, H * G, D], and the tokens that each KV head holds at the end, in order.
    """
    tokens, heads, _ = k.shape
    group = q.shape[1] // heads
    out, held = torch.zeros_like(q), []
    for head in range(heads):
        cache = SequentialCascade(shape)
        stride: list[Token] = []
        for t in range(tokens):
            if t >= shape.sinks and (t - shape.sinks) % shape.stride == 0:
                for token in stride:
                    cache.insert(token)
                stride = []
            stride.append(Token(t, k[t, head], v[t, head]))
            visible = cache.tokens() + stride
            keys = torch.stack([rotate_one(x.key, cos_sin[p]) for p, x in enumerate(visible)])
            values = torch.stack([x.value for x in visible])
            given = torch.zeros(group, len(visible), dtype=q.dtype)
            for g in range(group):
                query = rotate_one(q[t, head * group + g], cos_sin[len(visible) - 1])
                given[g] = softmax.logits(keys @ query).softmax(0)
                out[t, head * group + g] = given[g] @ values
            reduced = given.mean(0) if average.reduce == "mean" else given.amax(0)
            for x, p in zip(visible, reduced.tolist(), strict=True):
                x.score = average.beta * x.score + (1 - average.beta) * p
        held.append(cache.tokens() + stride)
    return out, held
