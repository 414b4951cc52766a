# SPDX-License-Identifier: Apache-2.0
"""The first curriculum: random symbols that repeat, and key-value needles among random symbols.

Retrieval appears abruptly once repeating text is copied; both kinds share every batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SymbolTask:
    """What needles look like: ``KEY k.. VAL v..`` with symbols from ``[first, first + vocab)``."""

    vocab: int = 250
    first: int = 6
    key_length: int = 2
    value_length: int = 3
    value_vocab: int = 250
    queries: int = 2

    @property
    def slot(self) -> int:
        """Tokens of one needle, with a spare one."""
        return self.key_length + self.value_length + 3


@dataclass(frozen=True)
class SymbolBatch:
    """``ids``, and per position what its successor is: 0 unknowable, 2 to be learnt."""

    ids: Tensor
    kinds: Tensor
    copy_rows: int


KEY_MARK, VALUE_MARK = 0, 1


def symbol_batch(
    task: SymbolTask, batch: int, length: int, generator: torch.Generator, device: torch.device
) -> SymbolBatch:
    """Draw ``[batch, length]``: half of the rows repeat themselves, the rest ask for needles."""

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    ids = task.first + draw(task.vocab, batch, length)
    kinds = torch.zeros(batch, length, dtype=torch.long, device=device)
    copies = batch // 2
    position = torch.arange(length, device=device)
    period = length // 8 + draw(max(length // 2 - length // 8, 1), copies, 1)
    ids[:copies] = torch.gather(ids[:copies], 1, position[None] % period)
    kinds[:copies] = 2 * (position[None] + 1 >= period).long()
    kinds[:copies, -1] = 0

    rows, slot = batch - copies, task.slot
    asked = min(task.queries, max(length // slot // 4, 1))
    context = length - asked * slot
    slots = context // slot
    count = min(max(slots // 2, asked), 64, slots)
    places = torch.rand(rows, slots, generator=generator, device=device).argsort(1)[:, :count]
    keys = task.first + draw(task.vocab, rows, count, task.key_length)
    values = task.first + draw(task.value_vocab, rows, count, task.value_length)
    marks = [torch.full((rows, count, 1), m, device=device) for m in (KEY_MARK, VALUE_MARK)]
    filler = task.first + draw(task.vocab, rows, count, 1)
    needles = torch.cat((marks[0], keys, marks[1], values, filler), dim=-1)
    offsets = torch.arange(slot, device=device)
    target = (places[..., None] * slot + offsets).view(rows, -1)
    ids[copies:].scatter_(1, target, needles.view(rows, -1))
    ids[copies:, context:] = needles[:, :asked].reshape(rows, -1)
    start = context + torch.arange(asked, device=device)[:, None] * slot + task.key_length + 1
    answer = (start + torch.arange(task.value_length, device=device)).view(-1)
    kinds[copies:, answer] = 2
    return SymbolBatch(ids, kinds, copies)
