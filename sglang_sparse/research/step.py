# SPDX-License-Identifier: Apache-2.0
"""The gradients of one step at a fixed shape, replayed as a CUDA graph where there is a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sparse.research.model import Layer, ReferenceModel, rope_tables
from sglang_sparse.research.ranks import Ranks

MAX_SPANS = 8192
MAX_TASKS = 24
_WARMUPS = 3


def token_losses(normed: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and whether the most likely token is the target, for each of ``[N]`` tokens."""
    logits = F.linear(normed, embedding.to(normed.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def flat_gradients(model: ReferenceModel) -> Tensor:
    """One tensor that the gradients of all parameters are parts of."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    return flat


class Losses:
    """The loss function, kept in one place so that it can be swapped for its compiled form."""

    tokens = staticmethod(token_losses)


def compile_pieces() -> None:
    """Compile the element-wise heavy parts of every layer, and the loss."""
    Layer.project = torch.compile(Layer.project, dynamic=False)  # type: ignore[method-assign]
    Layer.finish = torch.compile(Layer.finish, dynamic=False)  # type: ignore[method-assign]
    Losses.tokens = staticmethod(torch.compile(token_losses, dynamic=False))


class Stepper:
    """Trains on batches of one shape ``[batch, length]``.

    Attributes:
        stats: ``[3]`` sums since the last read: answer loss, text loss, steps.
        exact: ``[MAX_TASKS, 2]`` answers wholly right and answers seen, by task.
        halves: ``[2, 2]`` answer tokens right and seen, in the upper and lower half of the rows.
    """

    def __init__(
        self,
        model: ReferenceModel,
        gradients: Tensor,
        ranks: Ranks,
        batch: int,
        length: int,
        text_weight: float = 0.5,
        pool: Any = None,
    ) -> None:
        """Allocate the static inputs; the graph is captured at the first step.

        ``gradients`` is of :func:`flat_gradients`; it holds their mean over ``ranks``.
        """
        self.model, self.gradients, self.ranks = model, gradients, ranks
        self.batch, self.length, self.text_weight = batch, length, text_weight
        device = next(model.parameters()).device
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        shape = (batch, length)
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.kinds = torch.zeros(shape, dtype=torch.long, device=device)
        self.spans = torch.zeros(shape, dtype=torch.long, device=device)
        self.tasks = torch.full((MAX_SPANS,), -1, dtype=torch.long, device=device)
        self.stats = torch.zeros(3, device=device)
        self.exact = torch.zeros(MAX_TASKS, 2, device=device)
        self.halves = torch.zeros(2, 2, device=device)
        self.tables = rope_tables(model.config, length, device)
        self.pool = pool
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, ids: Tensor, kinds: Tensor, spans: Tensor | None, tasks: Tensor | None) -> None:
        """Copy one batch into the static inputs."""
        self.ids.copy_(ids, non_blocking=True)
        self.kinds.copy_(kinds, non_blocking=True)
        if spans is None or tasks is None:
            self.spans.zero_()
            self.tasks.fill_(-1)
            return
        self.spans.copy_(spans, non_blocking=True)
        self.tasks.fill_(-1)
        self.tasks[1 : 1 + len(tasks)].copy_(tasks, non_blocking=True)

    def step(self) -> None:
        """Gradients of what was loaded, clipped."""
        if not self.cuda:
            self._compute()
            return
        if self.graph is None:
            self._capture()
            return
        self.graph.replay()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=self.pool):
            self._compute()

    def _compute(self) -> None:
        model = self.model
        self.gradients.zero_()
        hidden = model(self.ids, self.dtype, self.tables)
        normed = model.model.norm(hidden.view(-1, hidden.shape[-1]))
        targets = torch.roll(self.ids, -1, dims=1).view(-1)
        losses, right = Losses.tokens(normed, model.model.embed_tokens.weight, targets)
        answer = (self.kinds.view(-1) >= 2).float()
        weight = answer * (self.kinds.view(-1) - 1)
        text = (self.kinds.view(-1) == 1).float()
        answer_loss = (losses * weight).sum() / weight.sum().clamp_min(1)
        text_loss = (losses * text).sum() / text.sum().clamp_min(1)
        (answer_loss + self.text_weight * text_loss).backward()
        self.ranks.mean(self.gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        with torch.no_grad():
            ones = torch.ones_like(text_loss)
            self.stats += torch.stack((answer_loss, text_loss, ones))
            self._measure(right.float(), answer)

    def _measure(self, right: Tensor, answer: Tensor) -> None:
        whole = torch.ones(MAX_SPANS, device=right.device)
        whole = whole.scatter_reduce(0, self.spans.view(-1), right, "amin")
        seen = (self.tasks >= 0).float()
        pairs = torch.stack((whole * seen, seen), dim=-1)
        self.exact.index_add_(0, self.tasks.clamp_min(0), pairs)
        rows = torch.stack((right * answer, answer)).view(2, self.batch, self.length).sum(-1)
        half = self.batch // 2
        self.halves += torch.stack((rows[:, :half].sum(1), rows[:, half:].sum(1)))

    def read(self) -> tuple[list[float], list[list[float]], list[list[float]]]:
        """The three sums over all ranks, which start again from zero."""
        for t in (self.stats, self.exact, self.halves):
            self.ranks.add(t)
        result = (self.stats.tolist(), self.exact.tolist(), self.halves.tolist())
        for t in (self.stats, self.exact, self.halves):
            t.zero_()
        return result
