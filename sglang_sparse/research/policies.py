# SPDX-License-Identifier: Apache-2.0
"""The tokens that a decode step attends to, in simple code: no page table, one boolean mask.

This is a second implementation, independent of the kernels' references, on contiguous caches.
Shapes: B rows, L cached tokens, H query heads, G KV heads, D channels; a group is H / G heads.
Caches are ``[B, G, L, D]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["dense", "window", "oracle", "sparcas", "page_minmax", "page_mean"]
KINDS: tuple[Kind, ...] = ("dense", "window", "oracle", "sparcas", "page_minmax", "page_mean")
Reduce = Literal["max", "sum"]
Pool = Literal["group", "heads"]
Storage = Literal["bf16", "fp8", "int8", "int4"]


@dataclass(frozen=True)
class Policy:
    """One way to choose tokens.

    Attributes:
        kind: ``dense``, ``window`` (sinks and recent tokens), ``oracle`` (exact top-k), ``sparcas``
            (pruned query channels over a rounded copy of K), ``page_minmax`` (Quest's bound) or
            ``page_mean`` (ArkVale's cuboid-mean).
        budget: Tokens kept for each KV head, sinks and recent ones included; with ``epsilon`` the
            most that are kept, beside a page that the current token begins.
        sink, recent: Always kept.
        channels: Channels that SparCas scores with, for each KV head.
        page: With a page kind, tokens that are chosen together.
        logical: Tokens of the logical pages whose largest score is a page's (LServe, section
            3.5.2); 0 for the page itself.
        reduce: How a group's scores become one: the largest logit or the sum of logits.
        storage: Format of SparCas' copy of K; integers have a scale for each token and head.
        refresh: For each layer, steps from one choice of SparCas' channels to the next, beginning
            with the first step. If it is empty, channels are chosen at every step.
        dense_layers: First layers that stay dense.
        anchors: Layers that select, for themselves and for the layers after them. If it is empty,
            all layers select. The first anchor selects and attends to everything.
        head_maps: For each layer, the anchor's head whose tokens each KV head takes. Without a map
            each takes its own.
        pool: With ``oracle``, the heads whose attention is added up to one score: a group, or all.
        epsilon: With ``sparcas`` or a page kind, keep units in the order of their scores until
            their estimated share of the attention reaches this (PSA, algorithm 1); 0 for a fixed
            budget.
        microbatch: Tokens between two stop checks.
        share: Share of a group: the smallest of its heads, or their mean.
        margin: Nats by which a score exceeds the logit of a unit's mass. Each unit that is left is
            then taken to hold the mass that its score says, less this. With None each is taken to
            hold the smallest mass seen so far, as in algorithm 1.
    """

    kind: Kind = "dense"
    budget: int = 256
    sink: int = 16
    recent: int = 32
    channels: int = 16
    page: int = 16
    logical: int = 0
    reduce: Reduce = "max"
    storage: Storage = "fp8"
    refresh: tuple[int, ...] = ()
    dense_layers: int = 0
    anchors: tuple[int, ...] = ()
    head_maps: tuple[tuple[int, ...], ...] = ()
    pool: Pool = "group"
    epsilon: float = 0.0
    microbatch: int = 32
    share: Literal["min", "mean"] = "min"
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown policy {self.kind!r}; allowed: {', '.join(KINDS)}")
        if self.budget < self.sink + self.recent and self.kind not in ("dense", "window"):
            raise ValueError(
                f"budget {self.budget} is under sink + recent = {self.sink + self.recent}"
            )
        if self.epsilon and self.kind not in ("sparcas", *PLANES):
            raise ValueError(f"policy {self.kind!r} has no scores to reach a share by")
        if self.page % self.logical_page or (self.logical and self.kind not in PLANES):
            raise ValueError(f"no {self.kind!r} page of {self.page} is of pages of {self.logical}")

    @property
    def unit(self) -> int:
        """Tokens that are chosen together."""
        return self.page if self.kind in PLANES else 1

    @property
    def logical_page(self) -> int:
        """Tokens that planes have one entry for."""
        return self.logical or self.page


WINDOW = Policy("window", budget=260, sink=4, recent=256)


def window_mask(length: int, lengths: Tensor, sink: int, recent: int) -> Tensor:
    """``[B, L]``: the first ``sink`` and the last ``recent`` of each row's ``lengths`` tokens."""
    position = torch.arange(length, device=lengths.device)[None]
    last = lengths[:, None]
    return (position < last) & ((position < sink) | (position >= last - recent))


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` over ``[B, G, ., .]`` with an fp32 result, whatever the inputs' dtype."""
    if a.is_cuda and b.dtype == torch.bfloat16:
        flat = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return flat.view(*a.shape[:2], *flat.shape[1:])
    return a.float() @ b.float()


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """``q [B, H, D]`` as ``[B, G, group, D]``."""
    return q.view(q.shape[0], k.shape[1], -1, q.shape[-1])


def logits(q: Tensor, k: Tensor) -> Tensor:
    """``[B, G, group, L]`` unscaled fp32 products of ``q [B, H, D]`` and ``k [B, G, L, D]``."""
    return product(grouped(q, k), k.transpose(2, 3))


def oracle_scores(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
    """``[B, G, L]``: attention probability, mean over the group."""
    scores = logits(q, k) * q.shape[-1] ** -0.5
    valid = torch.arange(k.shape[2], device=k.device)[None] < lengths[:, None]
    return scores.masked_fill(~valid[:, None, None], -torch.inf).softmax(-1).mean(2)


def stored(k: Tensor, storage: Storage) -> Tensor:
    """``k [..., D]`` after a round trip through the sketch's storage, in its own dtype."""
    if storage == "fp8":
        return k.to(torch.float8_e4m3fn).to(k.dtype)
    if storage == "bf16":
        return k.bfloat16().to(k.dtype)
    most = 127 if storage == "int8" else 7
    scale = (k.float().abs().amax(-1, keepdim=True) / most).half().float().clamp_min(1e-30)
    return ((k.float() / scale).round().clamp(-most, most) * scale).to(k.dtype)


def sparcas_channels(q: Tensor, sketch: Tensor, count: int) -> Tensor:
    """``[B, G, count]``: the channels with a group's largest sums of ``|q|``, by their numbers."""
    return grouped(q, sketch).float().abs().sum(2).topk(count, dim=-1).indices


def sparcas_scores(q: Tensor, sketch: Tensor, chosen: Tensor) -> Tensor:
    """``[B, G, group, L]``: products over the channels ``chosen [B, G, count]``."""
    heads = grouped(q, sketch)
    kept = torch.zeros_like(heads[:, :, 0]).scatter_(-1, chosen, 1.0)
    return product(heads * kept[:, :, None], sketch.transpose(2, 3))


def page_planes(k: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Channel-wise minimum and maximum of each page, ``[B, G, pages, D]``; infinite where empty."""
    batch, groups, length, dim = k.shape
    pages = -(-length // page)
    padded = torch.nn.functional.pad(k, (0, 0, 0, pages * page - length))
    valid = torch.arange(pages * page, device=k.device)[None] < lengths[:, None]
    empty = ~valid[:, None, :, None]
    low = padded.masked_fill(empty, torch.inf).view(batch, groups, pages, page, dim).amin(3)
    high = padded.masked_fill(empty, -torch.inf).view(batch, groups, pages, page, dim).amax(3)
    return low, high


def page_means(k: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Ends of each page's cuboid-mean digest (ArkVale), ``[B, G, pages, D]``; infinite if empty."""
    batch, groups, length, dim = k.shape
    low, high = page_planes(k, lengths, page)
    pages = low.shape[2]
    padded = torch.nn.functional.pad(k, (0, 0, 0, pages * page - length))
    valid = torch.arange(pages * page, device=k.device)[None] < lengths[:, None]
    centre = (low.float() + high.float()) / 2
    distance = (padded.view(batch, groups, pages, page, dim).float() - centre[:, :, :, None]).abs()
    shown = valid.view(batch, 1, pages, page, 1)
    mean = distance.where(shown, 0).sum(3) / shown.sum(3).clamp_min(1)
    live = shown.any(3)
    ends = (centre - mean).to(k.dtype), (centre + mean).to(k.dtype)
    return low.where(~live, ends[0]), high.where(~live, ends[1])


PLANES: dict[Kind, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {
    "page_minmax": page_planes,
    "page_mean": page_means,
}


def page_scores(q: Tensor, planes: tuple[Tensor, Tensor]) -> Tensor:
    """``[B, G, group, pages]``: largest product with a point of the cuboid (Quest, ArkVale)."""
    low, high = planes
    live = torch.isfinite(low[..., 0])
    low, high = low.masked_fill(~live[..., None], 0), high.masked_fill(~live[..., None], 0)
    heads = grouped(q, low)
    bound = product(heads.clamp_min(0), high.transpose(2, 3))
    bound += product(heads.clamp_max(0), low.transpose(2, 3))
    return bound.masked_fill(~live[:, :, None], -torch.inf)


def keep_best(scores: Tensor, always: Tensor, valid: Tensor, count: int) -> Tensor:
    """``[B, G, N]``: the ``count`` best valid entries, with those in ``always [B, N]`` first."""
    ranked = scores.masked_fill(always[:, None], torch.inf).masked_fill(~valid[:, None], -torch.inf)
    best = ranked.topk(min(count, scores.shape[-1]), dim=-1).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return mask & valid[:, None]


@dataclass
class Cache:
    """One layer's keys and values, and what policies score with.

    ``sketch`` (K after a round trip through the policy's storage) and ``planes`` are made on demand
    when ``None``. ``channels`` are those that SparCas chose before, ``[B, G, count]``; it chooses
    now when ``None``.
    """

    k: Tensor
    v: Tensor
    sketch: Tensor | None = None
    planes: tuple[Tensor, Tensor] | None = None
    channels: Tensor | None = None


def attend_mask(policy: Policy, q: Tensor, cache: Cache, lengths: Tensor) -> Tensor:
    """Tokens each KV head attends to, ``[B, G, L]`` bool.

    Args:
        q: Queries of one step, ``[B, H, D]``, rotated.
        cache: Keys of ``[B, G, L, D]``, rotated, the current token's included.
        lengths: Valid tokens in each row, ``[B]``.
    """
    k = cache.k
    groups, length = k.shape[1], k.shape[2]
    valid = torch.arange(length, device=k.device)[None] < lengths[:, None]
    if policy.kind == "dense":
        return valid[:, None].expand(-1, groups, -1)
    always = window_mask(length, lengths, policy.sink, policy.recent)
    if policy.kind == "window":
        return always[:, None].expand(-1, groups, -1)
    if policy.kind == "oracle":
        scores = pooled_scores(policy, q, cache, lengths)
        return keep_best(scores, always, valid, policy.budget)
    by_head, unit = _head_scores(policy, q, cache, lengths), policy.unit
    scores = _reduced(policy, by_head)
    if policy.epsilon:
        bounds = _joined(policy, by_head)
        mass, held = unit_masses(q, k, valid, unit, bounds, policy.margin or 0.0)
        chosen = progressive(policy, scores, mass, held, always, valid)
    else:
        forced, live = _by_unit(always, unit), _by_unit(valid, unit)
        chosen = keep_best(scores, forced, live, policy.budget // unit)
    return _spread(chosen, unit, valid)


def pooled_scores(policy: Policy, q: Tensor, cache: Cache, lengths: Tensor) -> Tensor:
    """``[B, G, units]``: the scores that a list of each KV head follows from."""
    if policy.kind != "oracle":
        return _reduced(policy, _head_scores(policy, q, cache, lengths))
    scores = oracle_scores(q, cache.k, lengths)
    return scores.mean(1, keepdim=True).expand_as(scores) if policy.pool == "heads" else scores


def _reduced(policy: Policy, by_head: Tensor) -> Tensor:
    """A group's scores, of :func:`_head_scores`, as one of each unit, ``[B, G, units]``."""
    return _joined(policy, by_head.amax(2) if policy.reduce == "max" else by_head.sum(2))


def _joined(policy: Policy, scores: Tensor) -> Tensor:
    """``[..., units]``: the largest of each unit's ``scores [..., logical pages]``."""
    if not policy.logical:
        return scores
    pages = policy.page // policy.logical
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % pages), value=-torch.inf)
    return padded.unflatten(-1, (-1, pages)).amax(-1)


def _head_scores(policy: Policy, q: Tensor, cache: Cache, lengths: Tensor) -> Tensor:
    """``[B, G, group, n]``: each query head's scores of all tokens, or of all logical pages."""
    if policy.kind in PLANES:
        planes = cache.planes or PLANES[policy.kind](cache.k, lengths, policy.logical_page)
        return page_scores(q, planes)
    sketch = stored(cache.k, policy.storage) if cache.sketch is None else cache.sketch
    chosen = cache.channels
    if chosen is None:
        chosen = sparcas_channels(q, sketch, policy.channels)
    return sparcas_scores(q, sketch, chosen)


def layer_mask(
    policy: Policy, layer: int, q: Tensor, cache: Cache, lengths: Tensor, chosen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(what ``layer`` attends to, what the layers after it may take), both ``[B, G, L]`` bool.

    Args:
        chosen: What the last anchor chose.
    """
    if policy.kind == "dense" or layer < policy.dense_layers:
        return attend_mask(Policy(), q, cache, lengths), chosen
    if policy.anchors and layer not in policy.anchors:
        assert chosen is not None
        taken = policy.head_maps[layer] if policy.head_maps else ()
        return (chosen[:, list(taken)] if taken else chosen), chosen
    chosen = attend_mask(policy, q, cache, lengths)
    if policy.anchors and layer == 0:
        return attend_mask(Policy(), q, cache, lengths), chosen
    return chosen, chosen


def _by_unit(mask: Tensor, unit: int) -> Tensor:
    """``[B, units]``: units with a token in ``mask [B, L]``."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % unit))
    return padded.view(len(mask), -1, unit).any(-1)


def _spread(units: Tensor, unit: int, valid: Tensor) -> Tensor:
    """``[B, G, L]``: the valid tokens of the units in ``[B, G, units]``."""
    return units.repeat_interleave(unit, dim=-1)[..., : valid.shape[1]] & valid[:, None]


def unit_masses(
    q: Tensor, k: Tensor, valid: Tensor, unit: int, by_head: Tensor, margin: float
) -> tuple[Tensor, Tensor]:
    """Each unit's sum of ``exp(q.k)``, over that of the largest token: (true, by its score).

    Both ``[B, G, group, units]``, as ``by_head``. By its score a unit holds as many tokens as it
    has, each of the score less ``margin``.
    """
    scale = q.shape[-1] ** -0.5
    scores = (logits(q, k) * scale).masked_fill(~valid[:, None, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights, pad = (scores - largest).exp(), (0, -scores.shape[-1] % unit)
    mass = torch.nn.functional.pad(weights, pad).unflatten(-1, (-1, unit)).sum(-1)
    tokens = torch.nn.functional.pad(valid, pad).unflatten(-1, (-1, unit)).sum(-1)
    return mass, (by_head * scale - largest - margin).exp() * tokens[:, None, None]


def progressive(
    policy: Policy, scores: Tensor, mass: Tensor, held: Tensor, always: Tensor, valid: Tensor
) -> Tensor:
    """``[B, G, units]``: the units that PSA's algorithm 1 reaches.

    ``mass`` and ``held`` are from :func:`unit_masses`.

    Units that hold an always kept token come first and are not in the estimate's smallest mass;
    the others follow by score, a microbatch at a time, until the estimate reaches epsilon. Looks
    fall where the kernels' do.
    """
    unit = policy.unit
    forced, live = _by_unit(always, unit)[:, None], _by_unit(valid, unit)[:, None]
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(~live, -torch.inf)
    # A page that the current token begins is in no list of the kernels, so it is above the budget.
    begun = (valid.sum(-1) % unit == 1)[:, None, None]
    most = min(policy.budget // unit + 1, ranked.shape[-1])
    order = ranked.topk(most, dim=-1).indices
    by_head = order[:, :, None].expand(*mass.shape[:3], most)
    masses = mass.gather(-1, by_head)
    place = torch.arange(most, device=order.device)
    first, count = forced.sum(-1, keepdim=True), live.sum(-1, keepdim=True)
    reached = masses.cumsum(-1)
    if policy.margin is None:
        smallest = masses.masked_fill((place < first)[:, :, None], torch.inf).cummin(-1).values
        unranked = smallest * (count - place - 1).clamp_min(0)[:, :, None]
    else:
        outside = held.scatter(-1, by_head, 0).sum(-1, keepdim=True)
        after = held.gather(-1, by_head).flip(-1).cumsum(-1).flip(-1)[..., 1:]
        unranked = torch.nn.functional.pad(after, (0, 1)) + outside
    missing = (unranked / (reached + unranked)).nan_to_num(1.0)
    pooled = missing.amax(2) if policy.share == "min" else missing.mean(2)
    # The kernels' always kept units are without the current token. Those of them that are left over
    # beside whole microbatches, with one unit for the current token, go with the first ranked ones.
    step = policy.microbatch // unit
    not_last = torch.nn.functional.pad(valid[:, 1:], (0, 1))
    earlier = _by_unit(always & not_last, unit)[:, None].sum(-1, keepdim=True)
    left_over = torch.where(earlier + 1 >= step, (earlier + 1) % step, 0)
    looks = (place >= first) & ((place + 1 - first + left_over) % step == 0)
    done = looks & (pooled <= 1 - policy.epsilon) & (policy.epsilon < 1)
    stop = torch.where(done.any(-1, keepdim=True), done.int().argmax(-1, keepdim=True) + 1, most)
    kept = place < stop.minimum(policy.budget // unit + begun).minimum(count)
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, order, kept)


def kept_share(q: Tensor, k: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """``[B, G, group]``: share of each query head's attention that lies in ``mask [B, G, L]``."""
    scores = logits(q, k) * q.shape[-1] ** -0.5
    valid = torch.arange(k.shape[2], device=k.device)[None] < lengths[:, None]
    weights = scores.masked_fill(~valid[:, None, None], -torch.inf).softmax(-1)
    return (weights * mask[:, :, None]).sum(-1)


def attend(q: Tensor, cache: Cache, mask: Tensor) -> Tensor:
    """Softmax attention ``[B, H * D]`` of one step over the tokens in ``mask [B, G, L]``."""
    scores = logits(q, cache.k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1)
    return product(weights, cache.v).reshape(q.shape[0], -1).to(q.dtype)
