# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of the reference model over a dense prefill, under a policy."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sglang_sparse.research.model import Attend, ReferenceModel, dense_attention, rope_tables
from sglang_sparse.research.policies import (
    PLANES,
    WINDOW,
    Cache,
    Policy,
    Storage,
    attend,
    kept_share,
    layer_mask,
    sparcas_channels,
    stored,
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
        prompt_logits: ``[rows, vocabulary]``, of the prompts' last tokens.
        logits: The same of the last step.
        plane_dtype: What the ends of pages are rounded to; at first that of the rows.
        masks: What each sparse layer attended to in the last step, bool ``[rows, kv_heads,
            tokens]``; None for not kept.
        imposed: What each sparse layer attends to in the next step, as ``masks``; None for what it
            selects.
        watch: Called in each sparse layer before it selects, with its number, queries, cache and
            the rows' lengths; None for not at all.
    """

    window: Policy = WINDOW
    shares: list[Tensor] | None = None
    masks: dict[int, Tensor] | None = None
    watch: Watch | None = None
    planes: list[Planes]
    sketch: list[Tensor]
    channels: dict[int, Tensor]
    imposed: dict[int, Tensor] | None = None

    def __init__(
        self,
        model: ReferenceModel,
        prompts: Sequence[Sequence[int]],
        room: int,
        rows: int = 16,
        prefill: Attend | None = None,
        kv_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Prefill ``prompts`` (``rows`` at a time) and leave ``room`` for new tokens.

        The last prompt token is prefilled like the others, as a server does. Layers that
        ``prefill`` does not change are dense. All attention reads K and V as rows of ``kv_dtype``
        hold them; by default they are those that the model computes. It computes in ``dtype``, by
        default bf16 on a GPU and fp32 elsewhere.
        """
        self.model = model
        self.attend_prompt = prefill
        self.kv_dtype = self.plane_dtype = kv_dtype
        parameter = next(model.parameters())
        self.device = parameter.device
        usual = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = dtype or usual
        c = model.config
        self.prompt_lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        self.room = room
        length = -(-(int(self.prompt_lengths.max()) + room) // PAGE) * PAGE
        shape = (c.layers, len(prompts), c.kv_heads, length, c.head_dim)
        self.k = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.v = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.tables = rope_tables(c, length, self.device)
        logits = []
        with torch.no_grad():
            for start in range(0, len(prompts), rows):
                logits.append(self._prefill(prompts[start : start + rows], start))
        self.prompt_logits = self.logits = torch.cat(logits)
        self.first = self.logits.argmax(-1)
        self._prefix_planes: dict[tuple[str, int, torch.dtype | None], list[Planes]] = {}
        self._sketches: dict[Storage, list[Tensor]] = {}

    def _prefill(self, prompts: Sequence[Sequence[int]], start: int) -> Tensor:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        kept: list[tuple[Tensor, Tensor]] = []
        hidden = self.model(
            ids.to(self.device), self.dtype, self.tables, kept, attend=self._attend_rows
        )
        stop = start + len(prompts)
        for layer, (k, v) in enumerate(kept):
            self.k[layer, start:stop, :, :longest] = self._row(k.transpose(1, 2))
            self.v[layer, start:stop, :, :longest] = self._row(v.transpose(1, 2))
        rows = torch.arange(len(prompts), device=self.device)
        return self.model.logits(hidden[rows, self.prompt_lengths[start:stop] - 1])

    def _attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.attend_prompt or dense_attention)(layer, q, self._row(k), self._row(v))

    def _row(self, computed: Tensor) -> Tensor:
        """Keys or values as rows of the pool hold them."""
        return computed if self.kv_dtype is None else computed.to(self.kv_dtype).to(self.dtype)

    def _ends(self, policy: Policy, keys: Tensor, lengths: Tensor) -> Planes:
        """Planes ``[B, G, logical pages, D]`` of ``keys [B, G, L, D]``, as they are kept."""
        low, high = PLANES[policy.kind](keys, lengths, policy.logical_page)
        if self.plane_dtype is None:
            return low, high
        # No fp8 number is infinite, as the ends of empty pages are.
        low, high = (
            end.to(self.plane_dtype).to(self.dtype).where(end.isfinite(), end)
            for end in (low, high)
        )
        return low, high

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
        self._start(policy)
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
    def replay(
        self, policy: Policy, given: Tensor, masks: Sequence[dict[int, Tensor]] = ()
    ) -> Iterator[dict[int, Tensor]]:
        """Decode ``given`` tokens, ``[rows, steps]``; yields the masks of each step, by layer.

        A layer that attends to everything and selects for others alone is left out. With ``masks``
        of an earlier replay, layers attend to these, whatever they select.
        """
        lengths = self.prompt_lengths.clone()
        self._start(policy)
        for step, tokens in enumerate(given.to(self.device).T):
            self.masks, self.imposed = {}, masks[step] if masks else None
            self._step(tokens, lengths, policy, None, [])
            if policy.anchors:
                self.masks.pop(0)
            yield self.masks
            lengths = lengths + 1
        self.masks = self.imposed = None

    def _start(self, policy: Policy) -> None:
        """Take what ``policy`` scores the prompts with, for each layer; it is made once."""
        self.planes, self.sketch, self.channels, self.steps = [], [], {}, 0
        if policy.kind in PLANES:
            key = (policy.kind, policy.logical_page, self.plane_dtype)
            if key not in self._prefix_planes:
                made = [self._ends(policy, k, self.prompt_lengths) for k in self.k]
                self._prefix_planes[key] = made
            self.planes = [(low.clone(), high.clone()) for low, high in self._prefix_planes[key]]
        if policy.kind == "sparcas":
            if policy.storage not in self._sketches:
                self._sketches[policy.storage] = [stored(k, policy.storage) for k in self.k]
            self.sketch = self._sketches[policy.storage]  # rows after the prompt are written anew

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
            k, v = self._row(k), self._row(v)
            self.k[index, rows, :, lengths], self.v[index, rows, :, lengths] = k, v
            planes = self.planes[index] if self.planes else None
            if planes is not None:
                self._update(planes, policy, index, rows, lengths)
            sketch = self.sketch[index] if self.sketch else None
            if sketch is not None:
                sketch[rows, :, lengths] = stored(k, policy.storage)
            channels = self._channels(policy, index, q, sketch)
            cache = Cache(self.k[index], self.v[index], sketch, planes, channels)
            sparse = policy.kind != "dense" and index >= policy.dense_layers
            if self.watch is not None and sparse:
                self.watch(index, q, cache, now)
            mask, chosen = layer_mask(policy, index, q, cache, now, chosen)
            if self.imposed is not None:
                mask = self.imposed.get(index, mask)
            if cut is not None:
                mask = torch.where(cut[index][None, :, None], window[:, None], mask)
            kept.append(mask.sum(-1).double().mean(1))
            if self.shares is not None and sparse:
                self.shares.append(kept_share(q, cache.k, now, mask))
            if self.masks is not None and sparse:
                self.masks[index] = mask
            x = layer.finish(x, attend(q, cache, mask))
        self.steps += 1
        self.logits = model.logits(x)
        return self.logits.argmax(-1)

    def _channels(
        self, policy: Policy, layer: int, q: Tensor, sketch: Tensor | None
    ) -> Tensor | None:
        """The channels that a layer has kept, or chooses now to keep; None if it keeps none."""
        if sketch is None or not policy.refresh:
            return None
        if self.steps % policy.refresh[layer] == 0:
            self.channels[layer] = sparcas_channels(q, sketch, policy.channels)
        return self.channels[layer]

    def _update(self, planes: Planes, policy: Policy, index: int, rows: Tensor, at: Tensor) -> None:
        """Make the logical page of position ``at`` of each row anew."""
        size = policy.logical_page
        page = at // size
        slots = (page * size)[:, None] + torch.arange(size, device=self.device)
        keys = self.k[index][rows[:, None], :, slots].transpose(1, 2)  # [B, G, page, D]
        ends = self._ends(policy, keys, at % size + 1)
        for plane, end in zip(planes, ends, strict=True):
            plane[rows, :, page] = end[:, :, 0]
