# SPDX-License-Identifier: Apache-2.0
"""Random requests of the cascading cache, and how tests feed them to the operators."""

from __future__ import annotations

import torch
from kernel_cases import DEVICE, NAN

from sglang_sparse_kernels import Softmax
from sglang_sparse_kernels.cascade import (
    AttentionAverage,
    CascadeBatch,
    CascadeShape,
    CascadeState,
    append_tokens,
    cascade_attention,
    close_strides,
    make_cascade_state,
    make_cascade_workspace,
)


def rotation_table(positions: int, dim: int) -> torch.Tensor:
    """Cosines and sines of every position, as SGLang keeps them: float32 [positions, dim]."""
    speed = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * speed
    return torch.cat((angle.cos(), angle.sin()), -1).float().to(DEVICE)


def empty_state(
    shape: CascadeShape, *, layers: int = 1, slots: int, heads: int, dim: int, dtype: torch.dtype
) -> CascadeState:
    """A state full of NaN: no operator may read a row that its request did not write."""
    state = make_cascade_state(
        shape, layers=layers, slots=slots, kv_heads=heads, dim=dim, dtype=dtype, device=DEVICE
    )
    for tensor in (state.k, state.v, state.scores):
        tensor.fill_(NAN)
    if dtype == torch.float64:
        return CascadeState(shape, state.k, state.v, state.scores.double())
    return state


def batch_of(slots: list[int], seq_lens: list[int], new: list[int]) -> CascadeBatch:
    """A batch of rows with so many new tokens each."""
    first = torch.tensor([0, *new]).cumsum(0)
    columns = (torch.tensor(slots), torch.tensor(seq_lens), first)
    return CascadeBatch(*(c.to(DEVICE, torch.int32) for c in columns), most_new=max(new))


class Request:
    """Queries, keys and values of one request, and an operator run over any part of it."""

    def __init__(
        self, tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        made = [
            torch.randn(tokens, count, dim, generator=generator)
            for count in (heads * group, heads, heads)
        ]
        self.q, self.k, self.v = (x.to(DEVICE, dtype) for x in made)
        self.tokens, self.dim = tokens, dim

    def double(self) -> Request:
        """The same numbers in float64."""
        other = object.__new__(Request)
        other.__dict__ = vars(self) | {n: getattr(self, n).double() for n in ("q", "k", "v")}
        return other

    @property
    def softmax(self) -> Softmax:
        return Softmax(self.dim**-0.5)

    def run(
        self, state: CascadeState, slot: int, cuts: list[int], *, average: AttentionAverage,
        impl: str, softmax: Softmax | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Outputs [tokens, H * G, D] of the request, given in chunks that end at ``cuts``."""
        out = torch.full_like(self.q, NAN)
        table = rotation_table(state.shape.rows, self.dim)
        workspace = make_cascade_workspace(state, max_rows=1, num_heads=self.q.shape[1])
        start = 0
        for cut in cuts:
            for begin, end in state.shape.cut(start, cut):
                slots = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
                close_strides(
                    state, slots, torch.full_like(slots, begin), workspace=workspace, impl=impl
                )
                batch, new = batch_of([slot], [end], [end - begin]), slice(begin, end)
                append_tokens(self.k[new], self.v[new], state, batch, impl=impl)
                cascade_attention(
                    self.q[new], state, batch, table, softmax=softmax or self.softmax,
                    average=average, out=out[new], workspace=workspace, impl=impl,
                )  # fmt: skip
            start = cut
        return out


def positions_held(state: CascadeState, slot: int, request: Request) -> list[list[int]]:
    """Which tokens each KV head holds, told by their keys, in the order of the cache."""
    held, found = state.shape.held(request.tokens), []
    for head in range(state.num_heads):
        rows = state.k[0, slot, head, :held]
        same = (rows[:, None] == request.k[None, :, head]).all(-1)
        assert (same.sum(1) == 1).all()
        found.append(same.int().argmax(1).tolist())
    return found
