# SPDX-License-Identifier: Apache-2.0
"""The reference model over a cascading cache: prompts and decoding, as a server computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_sparse.research.model import ReferenceModel, rope_tables
from sglang_sparse_kernels.cascade import (
    AttentionAverage,
    CascadeBatch,
    CascadeShape,
    append_tokens,
    cascade_attention,
    close_strides,
    make_cascade_state,
)
from sglang_sparse_kernels.records import Softmax


class CascadeDecoder:
    """One request after another, each over the same slot.

    Attributes:
        tokens: how many of the request's tokens were fed.
    """

    def __init__(
        self,
        model: ReferenceModel,
        shape: CascadeShape,
        average: AttentionAverage,
        *,
        scored: bool = True,
    ) -> None:
        """An empty slot; up to ``shape.rows`` tokens a request attends to everything.

        Without ``scored`` tokens do not compete: a level keeps the later one of each two.
        """
        self._scored = scored
        c, device = model.config, next(model.parameters()).device
        self.model, self.shape, self.average = model, shape, average
        self.state = make_cascade_state(
            shape,
            layers=c.layers,
            slots=1,
            kv_heads=c.kv_heads,
            dim=c.head_dim,
            dtype=torch.float32,
            device=device,
        )
        cos, sin = rope_tables(c, shape.rows, device)
        half = c.head_dim // 2
        self._cos_sin = torch.cat((cos[:, :half], sin[:, :half]), -1)
        self.tokens = 0

    def reset(self) -> None:
        """Begin another request."""
        self.tokens = 0

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Final hidden states ``[tokens, hidden]``, before the norm, of the next tokens."""
        device = self.state.k.device
        parts = self.shape.cut(self.tokens, self.tokens + len(ids))
        # At position 0 the model leaves queries and keys as they are.
        still = torch.ones(len(ids), self.model.config.head_dim, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for begin, end in parts:
                self._attend(layer, q, k, v, out, slice(begin, end))
            return out.transpose(0, 1)[None]

        batch = torch.tensor([list(ids)], device=device)
        hidden = self.model(batch, tables=(still, still * 0), attend=attend)[0]
        self.tokens += len(ids)
        return hidden

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: slice
    ) -> None:
        state, device = self.state.by_layer[layer], q.device
        count = positions.stop - positions.start
        at = slice(positions.start - self.tokens, positions.stop - self.tokens)
        ends = torch.tensor([[positions.start], [positions.stop]], dtype=torch.int32, device=device)
        first = torch.tensor([0, count], dtype=torch.int32, device=device)
        rows = CascadeBatch(torch.zeros_like(ends[0]), ends[1], first, count)
        if not self._scored:
            state.scores.zero_()
        close_strides(state, rows.slots, ends[0], impl="torch")
        append_tokens(k[at], v[at], state, rows, impl="torch")
        cascade_attention(
            q[at],
            state,
            rows,
            self._cos_sin,
            softmax=Softmax(q.shape[-1] ** -0.5),
            average=self.average,
            out=out[at],
            impl="torch",
        )

    def reply(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy tokens after ``prompt``."""
        self.reset()
        hidden, said = self.feed(prompt), []
        for _ in range(tokens):
            said.append(int(self.model.logits(hidden[-1]).argmax()))
            if len(said) < tokens:
                hidden = self.feed(said[-1:])
        return said
