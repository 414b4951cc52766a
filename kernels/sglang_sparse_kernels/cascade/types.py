# SPDX-License-Identifier: Apache-2.0
"""The records of the cascading cache: its shape, what requests hold, and a batch of new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from ..attend.types import make_workspace
from ..common import Device, check_choice, check_contiguous, check_dtype, check_shape, group_size
from ..records import HEAD_DIMS, MAX_GROUP

Reduction = Literal["mean", "max"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class CascadeShape:
    """How many tokens a request holds, and when it evicts.

    A request's first ``sinks`` tokens stay. Behind them lie ``levels`` sub-caches of equal size,
    the last one with the oldest tokens first, then the open stride. In this order tokens ascend by
    position. A token's place in it is its *cache position*: what its key is rotated for.

    Attributes:
        window: tokens of all sub-caches together (W).
        sinks: first tokens, never evicted.
        levels: sub-caches (N). Level i takes every 2^i-th token.
        stride: tokens between two evictions (S).
    """

    window: int
    sinks: int
    levels: int
    stride: int

    def __post_init__(self) -> None:
        if min(self.window, self.levels, self.stride) < 1 or self.sinks < 0:
            raise ValueError(f"{self} must have positive window, levels and stride")
        if self.window % self.stride:
            raise ValueError(f"stride={self.stride} does not divide window={self.window}")
        if self.window % self.levels:
            raise ValueError(f"levels={self.levels} does not divide window={self.window}")
        if self.stride % (1 << (self.levels - 1)):
            raise ValueError(
                f"stride={self.stride} is no multiple of 2^(levels - 1), levels={self.levels}"
            )

    @property
    def level(self) -> int:
        """Tokens of one sub-cache."""
        return self.window // self.levels

    @property
    def full(self) -> int:
        """Tokens held when the window is full and the stride empty."""
        return self.sinks + self.window

    @property
    def rows(self) -> int:
        """The most tokens that a request holds; up to so many nothing is evicted."""
        return self.full + self.stride

    def held(self, tokens: int) -> int:
        """How many of its first ``tokens`` tokens a request holds once it has attended to them."""
        beyond = tokens - self.full
        return tokens if beyond <= 0 else self.full + (beyond - 1) % self.stride + 1

    def closes(self, tokens: int) -> bool:
        """Whether the stride must be closed before token number ``tokens``, from 0, is added."""
        beyond = tokens - self.full
        return beyond > 0 and beyond % self.stride == 0

    def cut(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut positions [start, end) where strides close, so that no part crosses a close."""
        parts = []
        while start < end:
            beyond = max(start - self.full, 0)
            stop = min(end, self.full + (beyond // self.stride + 1) * self.stride)
            parts.append((start, stop))
            start = stop
        return parts


@dataclass(frozen=True)
class AttentionAverage:
    """The moving average of attention by which tokens compete (section 3.2, equation 3).

    Each query multiplies a token's score by ``beta`` and adds ``(1 - beta)`` times the probability
    that it gives the token, reduced over the query heads of the KV head (appendix B).

    Attributes:
        beta: share of the old score, in (0, 1).
        reduce: "mean" or "max" over the group.
    """

    beta: float
    reduce: Reduction = "mean"

    def __post_init__(self) -> None:
        check_choice("reduce", self.reduce, REDUCTIONS)
        if not 0 < self.beta < 1:
            raise ValueError(f"beta={self.beta} must lie between 0 and 1")

    @property
    def gain(self) -> float:
        """Share of the new probability; float32 would lose digits of 1 - beta."""
        return 1 - self.beta


@dataclass(frozen=True)
class CascadeState:
    """What requests hold, of some layers. A token lies in the row of its cache position.

    Attributes:
        shape: the cache's.
        k: [layers, slots, H, rows, D], keys before rotation, contiguous within a layer.
        v: the same shape and dtype.
        scores: float32 [layers, slots, H, rows], moving averages of attention.
    """

    shape: CascadeShape
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor

    @cached_property
    def by_layer(self) -> tuple[CascadeState, ...]:
        """The state of each layer."""
        return tuple(
            CascadeState(self.shape, self.k[i : i + 1], self.v[i : i + 1], self.scores[i : i + 1])
            for i in range(self.k.shape[0])
        )

    @property
    def num_heads(self) -> int:
        """KV heads (H)."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.k.nbytes + self.v.nbytes + self.scores.nbytes

    def check(self) -> None:
        """Raise ValueError unless shapes and dtypes fit together."""
        check_shape("k", self.k, (-1, -1, -1, self.shape.rows, -1))
        check_shape("v", self.v, tuple(self.k.shape))
        check_shape("scores", self.scores, tuple(self.k.shape[:4]))
        check_dtype("v", self.v, self.k.dtype)
        check_dtype("scores", self.scores, torch.float32, torch.float64)
        for name, tensor in {"k": self.k, "v": self.v, "scores": self.scores}.items():
            check_contiguous(name, tensor)


def state_bytes(
    shape: CascadeShape, *, layers: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> int:
    """Device bytes of one slot of a :class:`CascadeState`."""
    return layers * kv_heads * shape.rows * (2 * dim * dtype.itemsize + 4)


def make_cascade_state(
    shape: CascadeShape,
    *,
    layers: int,
    slots: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: Device,
) -> CascadeState:
    """An empty state; a slot needs no reset when another request takes it."""
    size = (layers, slots, kv_heads, shape.rows)
    return CascadeState(
        shape,
        torch.zeros((*size, dim), dtype=dtype, device=device),
        torch.zeros((*size, dim), dtype=dtype, device=device),
        torch.zeros(size, device=device),
    )


@dataclass(frozen=True)
class CascadeBatch:
    """New tokens of some requests, none of which adds tokens across a close of its stride.

    Attributes:
        slots: int32 [R], the slot of each row's request; a row below 0 is padding: nothing is
            stored for it and its output is 0.
        seq_lens: int32 [R], tokens of each request, the new ones included.
        first: int32 [R + 1], where the new tokens of each row begin among those of the batch.
        most_new: the most new tokens of a row, on the host.
    """

    slots: torch.Tensor
    seq_lens: torch.Tensor
    first: torch.Tensor
    most_new: int

    @property
    def num_rows(self) -> int:
        """Rows (R)."""
        return self.slots.shape[0]

    def part(self, start: int, count: int) -> CascadeBatch:
        """Up to ``count`` rows from row ``start`` on; their tokens lie where they lay."""
        rows = slice(start, start + count)
        first = self.first[start : start + count + 1]
        return CascadeBatch(self.slots[rows], self.seq_lens[rows], first, self.most_new)

    def check(self) -> None:
        """Raise ValueError unless shapes and dtypes fit together."""
        check_shape("seq_lens", self.seq_lens, (self.num_rows,))
        check_shape("first", self.first, (self.num_rows + 1,))
        columns = {"slots": self.slots, "seq_lens": self.seq_lens, "first": self.first}
        for name, tensor in columns.items():
            check_dtype(name, tensor, torch.int32)
            check_contiguous(name, tensor)


@dataclass(frozen=True)
class CascadeWorkspace:
    """Scratch of the kernels.

    Attributes:
        attention: float32, flat: partial outputs of decoding and their log-sum-exp.
        logits: float32 [max_rows, heads, rows], of decoding.
        winners: int32 [close_rows, layers * H, S], of closing strides.
    """

    attention: torch.Tensor
    logits: torch.Tensor
    winners: torch.Tensor


def make_cascade_workspace(
    state: CascadeState, *, max_rows: int, num_heads: int, close_rows: int = 1
) -> CascadeWorkspace:
    """Scratch for batches of up to ``max_rows`` decoding rows.

    Args:
        state: all layers.
        max_rows: rows that are decoded together.
        num_heads: query heads of this rank.
        close_rows: rows whose strides are closed in one launch; more rows take more launches.
    """
    layers, _, heads, rows, dim = state.k.shape
    device = state.k.device
    return CascadeWorkspace(
        make_workspace(max_rows, num_heads, heads, dim, device),
        torch.zeros((max_rows, num_heads, rows), device=device),
        torch.zeros(
            (close_rows, layers * heads, state.shape.stride), dtype=torch.int32, device=device
        ),
    )


def check_queries(q: torch.Tensor, state: CascadeState) -> int:
    """Query heads a KV head of ``q``; raises ValueError unless kernels can read both."""
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_dtype("k", state.k, q.dtype)
    group = group_size(q.shape[1], state.num_heads)
    if q.shape[2] not in HEAD_DIMS or group > MAX_GROUP:
        raise ValueError(
            f"head_dim={q.shape[2]} must be one of {HEAD_DIMS}, and {group} query heads a KV head "
            f"at most {MAX_GROUP}"
        )
    return group
