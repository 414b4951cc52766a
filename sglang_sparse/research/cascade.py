# SPDX-License-Identifier: Apache-2.0
"""The reference model over a cascading cache: prompts and decoding, as a server computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    make_cascade_workspace,
)
from sglang_sparse_kernels.cascade.reference import kept_rows
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.records import Softmax


@dataclass(frozen=True)
class _Part:
    """New tokens of some requests, none of which crosses the end of a stride.

    Attributes:
        tokens: which tokens of the batch they are.
        rows: the requests.
        before: int32, tokens of each of them before.
        spans: (slot, tokens before, tokens after) of each, on the host.
    """

    tokens: slice
    rows: CascadeBatch
    before: Tensor
    spans: list[tuple[int, int, int]]


class CascadeDecoder:
    """Requests side by side, each over a slot of its own.

    On a CPU the definition runs, in float32. On a GPU the kernels do, over a bf16 cache.

    Attributes:
        lengths: how many tokens of each request were fed.
        positions: int64 [layers, slots, H, rows], where the tokens that are held stood in their
            request; None unless asked for.
    """

    def __init__(
        self,
        model: ReferenceModel,
        shape: CascadeShape,
        average: AttentionAverage,
        *,
        scored: bool = True,
        slots: int = 1,
        positions: bool = False,
    ) -> None:
        """Empty slots; up to ``shape.rows`` tokens a request attends to everything.

        Without ``scored`` tokens do not compete: a level keeps the later one of each two. With
        ``positions`` it is noted which tokens are held.
        """
        self._scored = scored
        c, device = model.config, next(model.parameters()).device
        self.model, self.shape, self.average = model, shape, average
        self._impl: Impl = "triton" if device.type == "cuda" else "torch"
        self.state = make_cascade_state(
            shape,
            layers=c.layers,
            slots=slots,
            kv_heads=c.kv_heads,
            dim=c.head_dim,
            dtype=torch.bfloat16 if self._impl == "triton" else torch.float32,
            device=device,
        )
        self._workspace = make_cascade_workspace(self.state, max_rows=slots, num_heads=c.heads)
        cos, sin = rope_tables(c, shape.rows, device)
        half = c.head_dim // 2
        self._cos_sin = torch.cat((cos[:, :half], sin[:, :half]), -1).contiguous()
        self.lengths = [0] * slots
        like = self.state.scores
        self.positions = torch.full_like(like, -1, dtype=torch.int64) if positions else None

    def reset(self) -> None:
        """Begin other requests."""
        self.lengths = [0] * len(self.lengths)

    def feed(self, ids: Sequence[int]) -> Tensor:
        """:meth:`feed_all` of the first request."""
        return self.feed_all([ids])[0]

    @torch.no_grad()
    def feed_all(self, ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Final hidden states ``[tokens, hidden]``, before the norm, of each request's next tokens.

        Args:
            ids: tokens of the first requests, at least one each.
        """
        device = self.state.k.device
        order, parts = self._plan([len(one) for one in ids])
        tokens = torch.tensor([t for one in ids for t in one], device=device)
        # At position 0 the model leaves queries and keys as they are.
        still = torch.ones(len(tokens), self.model.config.head_dim, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dtype = self.state.k.dtype
            q, k, v = (x[0].transpose(0, 1).to(dtype).contiguous() for x in (q, k, v))
            out = torch.empty_like(q)
            for part in parts:
                self._attend(layer, q, k, v, out, part)
            return out.transpose(0, 1)[None].to(torch.float32)

        hidden = self.model(tokens[order][None], tables=(still, still * 0), attend=attend)[0]
        given = torch.empty_like(hidden)
        given[order] = hidden
        for i, one in enumerate(ids):
            self.lengths[i] += len(one)
        return list(given.split([len(one) for one in ids]))

    def _plan(self, counts: list[int]) -> tuple[Tensor, list[_Part]]:
        """The order in which the model sees tokens, part by part, and the parts."""
        device = self.state.k.device
        cuts = [self.shape.cut(n, n + new) for n, new in zip(self.lengths, counts, strict=False)]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        order: list[Tensor] = []
        parts, at = [], 0
        for step in range(max(map(len, cuts))):
            rows = [(i, *cut[step]) for i, cut in enumerate(cuts) if step < len(cut)]
            new = [end - begin for _, begin, end in rows]
            order += [
                starts[i] - self.lengths[i] + torch.arange(begin, end) for i, begin, end in rows
            ]
            columns = torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)
            first = torch.tensor([0, *new]).cumsum(0).to(device, torch.int32)
            batch = CascadeBatch(columns[0], columns[2], first, max(new))
            parts.append(_Part(slice(at, at + sum(new)), batch, columns[1], rows))
            at += sum(new)
        return torch.cat(order).to(device), parts

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, part: _Part
    ) -> None:
        state, at = self.state.by_layer[layer], part.tokens
        if not self._scored:
            state.scores.zero_()
        if self.positions is not None:
            self._note(self.positions[layer], state.scores[0], part)
        close_strides(
            state, part.rows.slots, part.before, workspace=self._workspace, impl=self._impl
        )
        append_tokens(k[at], v[at], state, part.rows, impl=self._impl)
        cascade_attention(
            q[at],
            state,
            part.rows,
            self._cos_sin,
            softmax=Softmax(q.shape[-1] ** -0.5),
            average=self.average,
            out=out[at],
            workspace=self._workspace,
            impl=self._impl,
        )

    def _note(self, positions: Tensor, scores: Tensor, part: _Part) -> None:
        """Bring one layer's positions [slots, H, rows] up to date, before a stride is closed."""
        shape = self.shape
        alike: dict[tuple[int, int], list[int]] = {}
        for slot, before, after in part.spans:
            alike.setdefault((before, after), []).append(slot)
        for (before, after), slots in alike.items():
            mine = positions[slots]
            if shape.closes(before):
                kept = kept_rows(scores[slots][..., shape.sinks :], shape) + shape.sinks
                mine[..., shape.sinks : shape.full] = mine.gather(-1, kept)
            held = shape.held(after)
            rows = slice(held - (after - before), held)
            mine[..., rows] = torch.arange(before, after, device=mine.device)
            positions[slots] = mine

    def held(self, slot: int, begin: int, end: int) -> tuple[float, float]:
        """Shares of tokens [begin, end) that a KV head holds, and that some head of a layer does.

        Both are means over layers; the first is one over heads, too. It needs ``positions``.
        """
        assert self.positions is not None
        mine = self.positions[:, slot, :, : self.shape.held(self.lengths[slot])]
        wanted = torch.arange(begin, end, device=mine.device)
        # [layers, H, end - begin]
        found = (mine[..., None] == wanted).any(-2)
        return float(found.float().mean()), float(found.any(1).float().mean())

    def reply(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy tokens after ``prompt``."""
        return self.replies([prompt], tokens)[0]

    @torch.no_grad()
    def replies(
        self, prompts: Sequence[Sequence[int]], tokens: int, end: int | None = None
    ) -> list[list[int]]:
        """Greedy tokens after each of up to as many prompts as there are slots.

        With ``end`` a reply stops before that token, and decoding where all have stopped.
        """
        self.reset()
        hidden = self.feed_all(prompts)
        said: list[list[int]] = [[] for _ in prompts]
        for step in range(tokens):
            last = self.model.logits(torch.stack([one[-1] for one in hidden])).argmax(-1).tolist()
            for one, token in zip(said, last, strict=True):
                one.append(token)
            if step + 1 == tokens or all(end in one for one in said):
                break
            hidden = self.feed_all([[token] for token in last])
        return [one[: one.index(end)] if end in one else one for one in said]
