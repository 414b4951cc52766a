# SPDX-License-Identifier: Apache-2.0
"""An auxiliary loss that spreads long-range reading over layers and KV heads.

Left alone, a small model retrieves with one or two heads of one layer, and a study of sparse
attention learns nothing from its other layers. So each digit of a retrieved number gets a KV head
of its own: by its place in the number, and by the parity of the digit before it. That head is
pulled to the digit in the context; the others are pushed off anything far away at that step.
"""

import torch
from torch import Tensor

DIGITS = 5
NEAR = 32
SINK = 4
_ASSIGNED: dict[tuple[int, int], tuple[int, int]] = {
    (0, 0): (1, 2),
    (1, 0): (2, 0),
    (1, 1): (2, 1),
    (2, 0): (3, 0),
    (2, 1): (3, 1),
    (3, 0): (4, 0),
    (3, 1): (4, 1),
    (4, 0): (2, 2),
    (4, 1): (3, 2),
}


def assignment(layers: int, kv_heads: int) -> Tensor:
    """``[layers, kv_heads, 2 * DIGITS]`` bool: which head reads which (place, parity)."""
    table = torch.zeros(layers, kv_heads, 2 * DIGITS, dtype=torch.bool)
    for (place, parity), (layer, head) in _ASSIGNED.items():
        table[layer % layers, head % kv_heads, 2 * place + parity] = True
    return table


def _back(x: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(x, (by, 0))[:, : x.shape[1]]


def _ahead(x: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, by))[:, by:]


def find_sources(
    ids: Tensor, kinds: Tensor, digit_of: Tensor, places: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random answer positions of ``ids [B, T]`` whose successor is a digit of a number seen before.

    Returns:
        query, source, slot and usable, each ``[B, places]``: the position, where in the context the
        digit to be copied stands, ``2 * place + parity``, and whether the entry counts.
    """
    digit = digit_of[ids]
    is_digit = (digit >= 0).long()
    run = torch.zeros_like(is_digit)
    for by in range(DIGITS - 2, -1, -1):
        run = _back(is_digit, by) * (1 + run)
    code, whole = torch.zeros_like(digit), torch.ones_like(is_digit)
    for by in range(DIGITS):
        code, whole = code * 10 + _ahead(digit, by), whole * _ahead(is_digit, by)
    code = torch.where(whole > 0, code, -1)
    position = torch.arange(ids.shape[1], device=ids.device)
    start = (position[None] + 1 - run).clamp(0, ids.shape[1] - 1)
    eligible = (kinds >= 2) & (_ahead(is_digit, 1) > 0) & (code.gather(1, start) >= 0)
    chance = torch.rand(ids.shape, device=ids.device) * eligible
    query = chance.topk(places, dim=1).indices
    usable = eligible.gather(1, query)
    place, start = run.gather(1, query), start.gather(1, query)
    wanted = code.gather(1, start)
    match = (code[:, None] == wanted[..., None]) & (position < start[..., None] - NEAR)
    found, first = match.to(torch.uint8).max(dim=-1)
    usable = usable & (found > 0) & (wanted >= 0)
    parity = torch.where(place > 0, digit.gather(1, query) % 2, 0)
    return query, first + place, 2 * place + parity, usable


def spread_loss(
    trace: list[tuple[Tensor, Tensor]],
    ids: Tensor,
    kinds: Tensor,
    digit_of: Tensor,
    assigned: Tensor,
    places: int = 32,
) -> tuple[Tensor, Tensor]:
    """The auxiliary loss and the mean attention that assigned heads give to their digit.

    Args:
        trace: Each layer's rotated ``q [B, T, heads, D]`` and ``k [B, T, kv_heads, D]``.
        digit_of: ``[vocab]``: the digit a token is, or -1.
        assigned: See :func:`assignment`.
        places: Answer positions looked at in each row.
    """
    query, source, slot, usable = find_sources(ids, kinds, digit_of, places)
    position = torch.arange(ids.shape[1], device=ids.device)
    causal = position <= query[..., None]
    far = (position < query[..., None] - NEAR) & (position >= SINK)
    count = usable.sum().clamp_min(1)
    pull = push = read = torch.zeros((), device=ids.device)
    for (q, k), owner in zip(trace, assigned, strict=True):
        batch, _, groups, dim = k.shape
        index = query[..., None, None].expand(-1, -1, q.shape[2], dim)
        picked = q.gather(1, index).view(batch, places, groups, -1, dim)
        logits = torch.einsum("bpgcd,btgd->bpgct", picked, k).float() * dim**-0.5
        weights = logits.masked_fill(~causal[:, :, None, None], -torch.inf).softmax(-1)
        mine = (owner.t()[slot] & usable[..., None]).float()
        others = (~owner.t()[slot] & usable[..., None]).float()
        distant = (weights * far[:, :, None, None]).sum(-1).mean(-1)
        at = source[..., None, None, None].expand(-1, -1, groups, weights.shape[3], 1)
        right = weights.gather(-1, at).squeeze(-1).mean(-1)
        push = push - (torch.log1p(-distant.clamp_max(0.999)) * others).sum() / count
        pull = pull - (torch.log(right + 1e-4) * mine).sum() / count
        read = read + (right * mine).sum() / count
    return pull + push, read.detach()
