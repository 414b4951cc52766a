# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of the reference model over a dense prefill, under a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sglang_sparse.research.model import Attend, ReferenceModel, rope_tables
from sglang_sparse.research.policies import (
    PLANES,
    WINDOW,
    Cache,
    Kind,
    Policy,
    attend,
    kept_share,
    layer_mask,
    window_mask,
)

PAGE = 64  # no policy's page is larger

Planes = tuple[Tensor, Tensor]
Watch = Callable[[int, Tensor, Cache, Tensor], None]


class Decoder:
    """Prompts that are prefilled once, and decoded from there any number of times.

    Attributes:
        row_tokens: ``[layers, rows]``, the KV tokens that each layer attended to in each row's last
            reply: mean over KV heads and steps.
        window: What cut heads see: its sinks and recent tokens.
        shares: A list to fill with the true share of the attention that each sparse step of a
            layer reached, ``[rows, kv_heads, group]``; None for not at all.
        masks: What each sparse layer attended to in the last step, bool ``[rows, kv_heads,
            tokens]``; None for not kept.
        watch: Called in each sparse layer before it selects, with its number, queries, cache and
            the rows' lengths; None for not at all.
    """

    window: Policy = WINDOW
    shares: list[Tensor] | None = None
    masks: dict[int, Tensor] | None = None
    watch: Watch | None = None

    def __init__(
        self,
        model: ReferenceModel,
        prompts: Sequence[Sequence[int]],
        room: int,
        rows: int = 16,
        prefill: Attend | None = None,
    ) -> None:
        """Prefill ``prompts`` (``rows`` at a time) and leave ``room`` for new tokens.

        The last prompt token is prefilled like the others, as a server does. Layers that
        ``prefill`` does not change are dense.
        """
        self.model = model
        self.attend_prompt = prefill
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        c = model.config
        self.prompt_lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        self.room = room
        length = -(-(int(self.prompt_lengths.max()) + room) // PAGE) * PAGE
        shape = (c.layers, len(prompts), c.kv_heads, length, c.head_dim)
        self.k = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.v = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.tables = rope_tables(c, length, self.device)
        firsts = []
        with torch.no_grad():
            for start in range(0, len(prompts), rows):
                firsts.append(self._prefill(prompts[start : start + rows], start))
            self.first = torch.cat(firsts)
        self.k8 = self.k.to(torch.float8_e4m3fn).to(self.dtype)
        self._prefix_planes: dict[tuple[Kind, int], list[Planes]] = {}

    def _prefill(self, prompts: Sequence[Sequence[int]], start: int) -> Tensor:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        kept: list[tuple[Tensor, Tensor]] = []
        hidden = self.model(
            ids.to(self.device), self.dtype, self.tables, kept, attend=self.attend_prompt
        )
        stop = start + len(prompts)
        for layer, (k, v) in enumerate(kept):
            self.k[layer, start:stop, :, :longest] = k.transpose(1, 2)
            self.v[layer, start:stop, :, :longest] = v.transpose(1, 2)
        rows = torch.arange(len(prompts), device=self.device)
        return self.model.logits(hidden[rows, self.prompt_lengths[start:stop] - 1]).argmax(-1)

    @torch.no_grad()
    def generate(self, policy: Policy, end: int, cut: Tensor | None = None) -> list[list[int]]:
        """Greedy replies without the end token.

        Args:
            policy: What each step attends to.
            end: Token that ends a reply.
            cut: ``[layers, kv_heads]`` bool; these heads alone see the window, whatever the policy.
        """
        tokens, lengths = self.first.clone(), self.prompt_lengths.clone()
        out = [tokens]
        self.planes = [(low.clone(), high.clone()) for low, high in self._planes_of(policy)]
        over = tokens == end
        layers = self.model.config.layers
        sums = torch.zeros(layers, len(tokens), dtype=torch.float64, device=self.device)
        steps = torch.zeros(len(tokens), dtype=torch.float64, device=self.device)
        for _ in range(self.room - 1):
            if bool(over.all()):
                break
            kept: list[Tensor] = []
            tokens = self._step(tokens, lengths, policy, cut, kept)
            sums += torch.stack(kept) * ~over
            steps += ~over
            lengths = lengths + 1
            over |= tokens == end
            out.append(tokens)
        self.row_tokens = sums / steps.clamp_min(1)
        replies = []
        for row in torch.stack(out, dim=1).tolist():
            replies.append(row[: row.index(end)] if end in row else row)
        return replies

    @torch.no_grad()
    def replay(self, policy: Policy, given: Tensor) -> Iterator[dict[int, Tensor]]:
        """Decode ``given`` tokens, ``[rows, steps]``; yields the masks of each step, by layer.

        A layer that attends to everything and selects for others alone is left out.
        """
        lengths = self.prompt_lengths.clone()
        self.planes = [(low.clone(), high.clone()) for low, high in self._planes_of(policy)]
        for tokens in given.to(self.device).T:
            self.masks = {}
            self._step(tokens, lengths, policy, None, [])
            if policy.anchors:
                self.masks.pop(0)
            yield self.masks
            lengths = lengths + 1
        self.masks = None

    def _planes_of(self, policy: Policy) -> list[Planes]:
        """Planes of the prompts that ``policy`` scores with, one pair a layer; made once."""
        if policy.kind not in PLANES:
            return []
        key = (policy.kind, policy.page)
        if key not in self._prefix_planes:
            make = PLANES[policy.kind]
            planes = [make(k, self.prompt_lengths, policy.page) for k in self.k]
            self._prefix_planes[key] = planes
        return self._prefix_planes[key]

    def _step(
        self,
        tokens: Tensor,
        lengths: Tensor,
        policy: Policy,
        cut: Tensor | None,
        kept: list[Tensor],
    ) -> Tensor:
        model, c = self.model, self.model.config
        cos, sin = (t[lengths].to(self.dtype) for t in self.tables)
        x = model.embed(tokens, self.dtype)
        rows = torch.arange(len(tokens), device=self.device)
        now = lengths + 1
        window = window_mask(self.k.shape[3], now, self.window.sink, self.window.recent)
        chosen: Tensor | None = None
        for index in range(c.layers):
            layer = model.layer(index)
            q, k, v = layer.project(x, cos, sin)
            self._write(index, rows, lengths, k, v)
            planes = self.planes[index] if self.planes else None
            if planes is not None:
                self._update(planes, policy, index, rows, lengths)
            cache = Cache(self.k[index], self.v[index], self.k8[index], planes)
            sparse = policy.kind != "dense" and index >= policy.dense_layers
            if self.watch is not None and sparse:
                self.watch(index, q, cache, now)
            mask, chosen = layer_mask(policy, index, q, cache, now, chosen)
            if cut is not None:
                mask = mask & (window[:, None] | ~cut[index][None, :, None])
            kept.append(mask.sum(-1).double().mean(1))
            if self.shares is not None and sparse:
                self.shares.append(kept_share(q, cache.k, now, mask))
            if self.masks is not None and sparse:
                self.masks[index] = mask
            x = layer.finish(x, attend(q, cache, mask))
        return model.logits(x).argmax(-1)

    def _write(self, index: int, rows: Tensor, at: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[index, rows, :, at], self.v[index, rows, :, at] = k, v
        self.k8[index, rows, :, at] = k.to(torch.float8_e4m3fn).to(self.dtype)

    def _update(self, planes: Planes, policy: Policy, index: int, rows: Tensor, at: Tensor) -> None:
        """Make the page of position ``at`` of each row anew."""
        page = at // policy.page
        slots = (page * policy.page)[:, None] + torch.arange(policy.page, device=self.device)
        keys = self.k[index][rows[:, None], :, slots].transpose(1, 2)  # [B, G, page, D]
        ends = PLANES[policy.kind](keys, at % policy.page + 1, policy.page)
        for plane, end in zip(planes, ends, strict=True):
            plane[rows, :, page] = end[:, :, 0]
