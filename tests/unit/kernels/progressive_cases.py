# SPDX-License-Identifier: Apache-2.0
"""Batches for progressive attention, and its definition spelled out in float64."""

from dataclasses import dataclass, replace

import torch
from error_budget import assert_within_budget
from kernel_cases import DEVICE, FAR, NAN, Batch
from test_attend import naive_attention, rounding

from sglang_sparse_kernels import (
    COUNTERS,
    Always,
    AttendUntil,
    BoundResidual,
    FindStop,
    HeadWindows,
    Lists,
    MassStop,
    Scores,
    Stage,
    StepContext,
    decode_step,
    make_progressive_workspace,
    num_chunks,
    num_stop_checks,
    padded_blocks,
    rank_units,
    select_topk,
)
from sglang_sparse_kernels.common import computable, put, take

SINK, RECENT = 4, 8
ALWAYS = Always(SINK, RECENT)
POISON = FAR


@dataclass
class Setting:
    """What a progressive step is asked for."""

    epsilon: float | tuple[float, ...] = 0.9  # of all rows, or of each
    microbatch: int = 32
    share: str = "min"
    upper: bool = False
    margin: float = 0.0
    logit_cap: float = 0.0
    output: bool = True

    def of(self, row: int) -> float:
        """What a row is asked for."""
        return self.epsilon[row] if isinstance(self.epsilon, tuple) else self.epsilon

    def shares(self, rows: int) -> torch.Tensor:
        """The same for the kernels."""
        return torch.tensor([self.of(row) for row in range(rows)], device=DEVICE)


def shape_keys(batch: Batch, kind: str) -> torch.Tensor:
    """Give the keys a distribution of attention; returns scores [R, H, units] to rank by.

    uniform: all keys alike in size, scores right. peaked: a few keys hold most of the mass.
    adversarial: the scores rank worst first, so that the heaviest units come last.
    """
    if kind == "peaked":
        for keys in batch.k:
            loud = torch.rand(keys.shape[0], generator=batch.rng).to(DEVICE) < 0.02
            put(keys, loud, computable(take(keys, loud)) * 6)
    units = -(-max(batch.lengths) // batch.unit)
    scores = torch.full((len(batch.lengths), batch.heads, units + 3), NAN, device=DEVICE)
    for row in range(len(batch.lengths)):
        mass = unit_masses(batch, row)
        if mass.shape[-1]:
            best = mass.amax(1).log().float()
            scores[row, :, : mass.shape[-1]] = -best if kind == "adversarial" else best
    return scores


def unit_logits(batch: Batch, row: int, logit_cap: float = 0.0) -> torch.Tensor:
    """float64 logits [H, G, tokens] of the row's domain."""
    tokens, size = int(batch.plan.tail_start[row]), batch.page_size
    at = torch.arange(tokens, device=DEVICE)
    slots = batch.plan.page_table[row].long()[at // size] * size + at % size
    query = batch.q[row].double().view(batch.heads, batch.group, -1)
    keys = take(batch.k[0], slots).double()
    logits = torch.einsum("hgd,nhd->hgn", query, keys) * batch.logit_scale
    return logit_cap * torch.tanh(logits / logit_cap) if logit_cap else logits


def unit_products(batch: Batch, row: int) -> torch.Tensor:
    """float64 [H, G, units]: bounds of the absolute sums of a logit's products, by page bounds."""
    tokens, size = int(batch.plan.tail_start[row]), batch.page_size
    at = torch.arange(tokens, device=DEVICE)
    slots = batch.plan.page_table[row].long()[at // size] * size + at % size
    query = batch.q[row].double().view(batch.heads, batch.group, -1).abs()
    largest = take(batch.k[0], slots).double().abs().amax(0)  # [H, D]
    products = torch.einsum("hgd,hd->hg", query, largest) * batch.logit_scale
    return products[..., None].expand(-1, -1, -(-tokens // batch.unit))


def unit_masses(batch: Batch, row: int, logit_cap: float = 0.0) -> torch.Tensor:
    """float64 [H, G, units] sums of exp(logit)."""
    weights = unit_logits(batch, row, logit_cap).exp()
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % batch.unit))
    return padded.unflatten(-1, (-1, batch.unit)).sum(-1)


def tail_mass(batch: Batch, row: int, logit_cap: float = 0.0) -> torch.Tensor:
    """float64 [H, G] sums of exp(logit) over the tail."""
    plan = batch.plan
    whole = replace(plan, tail_start=plan.seq_lens)
    shorter = plan.tail_start
    batch.plan = whole
    logits = unit_logits(batch, row, logit_cap)
    batch.plan = plan
    return logits[..., int(shorter[row]) :].exp().sum(-1)


def run(
    batch: Batch,
    scores: torch.Tensor,
    ask: Setting,
    impl: str,
    expected: int = 1,
    windows: HeadWindows | None = None,
) -> dict:
    """Select, rank, bound and attend; returns everything that was written.

    ``expected`` is how many microbatches each row is thought to take. Streaming heads have no list.
    """
    rows, dtype = len(batch.lengths), batch.q.dtype
    lists = (batch.list_rows, batch.heads)
    work = torch.float32 if impl == "triton" else torch.float64
    own = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    picked = torch.full((rows, batch.heads, batch.capacity), POISON, dtype=torch.int32)
    picked = picked.to(DEVICE)
    got = {
        "indices": torch.full((*lists, batch.capacity), POISON, dtype=torch.int32, device=DEVICE),
        "ranked": torch.full(lists, POISON, dtype=torch.int32, device=DEVICE),
        "reached": torch.full(lists, POISON, dtype=torch.int32, device=DEVICE),
        "counters": torch.zeros(len(COUNTERS), dtype=torch.int64, device=DEVICE),
        "out": torch.full(batch.q.shape, NAN, dtype=dtype, device=DEVICE),
        "bounds": None,
        "expected": torch.full(lists, expected, dtype=torch.int32, device=DEVICE),
    }
    heads = batch.heads * batch.group
    sizes = (batch.capacity, batch.unit, ask.microbatch)
    workspace = make_progressive_workspace(
        rows + 1, heads, batch.heads, batch.dim, num_chunks(*sizes), DEVICE
    )
    for tensor in (workspace.partial, workspace.lse, workspace.min_block):
        tensor.fill_(77.0)  # of the step before
    workspace.attended.fill_(5)
    blocks = torch.full((*scores.shape[:2], padded_blocks(scores.shape[2])), NAN, device=DEVICE)
    unread = None if windows is None else windows.streams
    scored = Scores(scores.to(work), blocks, unread)
    counts = torch.zeros(rows, batch.heads, dtype=torch.int32, device=DEVICE)
    select_topk(  # its own tests hold its kernel to this
        scored, batch.plan, Lists(picked, counts, own, batch.unit), always=ALWAYS, impl="torch"
    )
    ranking = batch.lists(got["indices"], got["ranked"])
    rank_units(scored, batch.plan, picked, ranking, always=ALWAYS, impl=impl)
    stages: list[Stage] = []
    if ask.upper:
        heads_of = (rows, batch.heads, batch.group)
        shape = (*heads_of, num_stop_checks(*sizes))
        got["bounds"] = torch.full(shape, NAN, dtype=work, device=DEVICE)
    stop = MassStop(ALWAYS, ask.microbatch, ask.share, ask.shares(rows), got["bounds"])
    if ask.upper:
        cuboids = batch.cuboids(batch.make_planes(None, True))
        limits = torch.full((*heads_of, scores.shape[2]), NAN, dtype=work, device=DEVICE)
        stages = [BoundResidual(cuboids, scored, ask.margin, got["ranked"], limits, stop)]
    last_stage = AttendUntil if ask.output else FindStop
    stages.append(last_stage(stop, got["ranked"], got["expected"], got["counters"], workspace))
    step = StepContext(
        batch.q, batch.kv, batch.plan,
        replace(batch.lists(got["indices"], got["reached"]), windows=windows),
        batch.softmax(ask.logit_cap), got["out"], impl,
    )  # fmt: skip
    decode_step(stages, step)
    got["expected"] = got["expected"][batch.plan.request_slots.long()]
    return got


def naive_order(batch: Batch, scores: torch.Tensor, row: int, head: int) -> tuple[list[int], int]:
    """The ranking of a row and head by Python's sort, and how many of it come first in any case."""
    tokens, kept = int(batch.plan.tail_start[row]), int(batch.plan.k_units[row])
    units = -(-tokens // batch.unit)
    below, start = -(-SINK // batch.unit), max(0, tokens - RECENT) // batch.unit
    forced = [u for u in range(units) if u < below or u >= start]
    values = scores[row, head].tolist()
    others = sorted(set(range(units)) - set(forced), key=lambda u: (-values[u], u))
    return (forced + others)[:kept], min(len(forced), kept)


def naive_stop(
    batch: Batch, order: list[int], first: int, row: int, head: int, ask: Setting, bounds: object
) -> tuple[int, float, float]:
    """(units attended to, estimated share there, distance of the nearest share from epsilon).

    The ``first`` units are forced; what is more than whole microbatches of them, but for a unit's
    room for the tail, goes with the first ranked ones.
    """
    epsilon, step = ask.of(row), ask.microbatch // batch.unit
    mass = unit_masses(batch, row, ask.logit_cap)[head]
    acc = tail_mass(batch, row, ask.logit_cap)[head].clone()
    begin = first
    while begin >= step and (begin + 1) % step:
        begin -= 1
    for unit in order[:begin]:
        acc += mass[:, unit]
    smallest = torch.full_like(acc, float("inf"))
    units, at, check, nearest = mass.shape[-1], begin, 0, float("inf")
    share = 1.0 if units == first else 0.0
    while at < len(order):
        for rank in range(at, min(at + step, len(order))):
            acc += mass[:, order[rank]]
            smallest = torch.minimum(smallest, mass[:, order[rank]]) if rank >= first else smallest
        at, check = min(at + step, len(order)), check + 1
        left = units - at
        residual = (
            smallest * left if bounds is None else 2.0 ** bounds[row, head, :, check].double()
        )
        shares = acc / (acc + residual) if left else torch.ones_like(acc)
        share = float(shares.min() if ask.share == "min" else shares.mean())
        nearest = min(nearest, abs(share - epsilon)) if left else nearest
        if share >= epsilon and epsilon < 1:
            break
    return at, share, nearest


# lengths, page size, heads, group, dim, dtype, unit, cadence, microbatch, capacity in units
CASES = [
    ([300, 1, 130, 30], 64, 1, 4, 64, torch.bfloat16, 16, 1, 32, 64),
    ([1, 500, 222], 32, 1, 2, 128, torch.float16, 32, 1, 32, 12),
    ([311, 157], 16, 2, 1, 64, torch.bfloat16, 16, 3, 64, 64),
    ([170, 90], 32, 1, 3, 64, torch.float16, 1, 1, 16, 96),
    ([700], 64, 1, 16, 64, torch.bfloat16, 32, 1, 128, 64),
]
KINDS = ("uniform", "peaked", "adversarial")
# The interpreter is slow: every case and every kind, but not each with each.
PAIRS = [("torch", kind, case) for kind in KINDS for case in CASES]
PAIRS += [
    ("triton", kind, CASES[i])
    for i, kind in enumerate(("peaked", "adversarial", "uniform", "uniform", "peaked"))
]


def make_batch(case: tuple, **options: object) -> Batch:
    lengths, page_size, heads, group, dim, dtype, unit, cadence, _, capacity = case
    settings = {
        "page_size": page_size, "heads": heads, "group": group, "dim": dim, "dtype": dtype,
        "unit": unit, "reselect_every": cadence, "capacity": capacity, "budget": capacity * unit,
        "shared_pages": 1, "seed": sum(lengths) + dim,
    }  # fmt: skip
    batch = Batch(lengths, **settings | options)
    if cadence > 1:  # lists are of this step, tails are not
        batch.plan.reselect.copy_(batch.plan.k_units > 0)
    return batch


def check(batch: Batch, scores: torch.Tensor, got: dict, ask: Setting) -> list[int]:
    """Same order, stop, counters and output as the definition; returns where lists stopped."""
    plan, want = batch.plan, dict.fromkeys(COUNTERS, 0)
    stops, lists = [], (got["indices"].clone(), got["reached"].clone())
    for row in range(len(batch.lengths)):
        target = int(plan.request_slots[row])
        for head in range(batch.heads):
            if plan.k_units[row] == 0:
                continue
            order, first = naive_order(batch, scores, row, head)
            assert int(got["ranked"][target, head]) == len(order)
            assert got["indices"][target, head, : len(order)].tolist() == order
            bounds = got["bounds"]
            stop, share, nearest = naive_stop(batch, order, first, row, head, ask, bounds)
            assert nearest > 1e-5, "the case is undecidable in float32: take another seed"
            assert int(got["reached"][target, head]) == stop
            stops.append(stop)
            units = -(-int(plan.tail_start[row]) // batch.unit)
            want["pairs"] += 1
            want["blocks"] += stop
            want["domain_blocks"] += units
            want["share_millionths"] += round(share * 1e6)
            want["cap_hits"] += share < ask.of(row) and stop < units
    counters = dict(zip(COUNTERS, got["counters"].tolist(), strict=True))
    for name in COUNTERS:
        slack = want["pairs"] * 3 if name == "share_millionths" else 0
        assert abs(counters[name] - want[name]) <= slack, name
    exact = naive_attention(batch, lists, torch.float64, ask.logit_cap)
    if got["out"].dtype == torch.float64:
        torch.testing.assert_close(got["out"], exact)
    else:
        eager = naive_attention(batch, lists, batch.dtype, ask.logit_cap)
        for row in range(len(batch.lengths)):
            assert_within_budget(got["out"][row], exact[row], eager[row], rounding(batch.dtype))
    return stops


def in_double(batch: Batch) -> Batch:
    batch.q, batch.dtype = batch.q.double(), torch.float64
    if batch.kv_dtype is None:
        batch.k, batch.v = [k.double() for k in batch.k], [v.double() for v in batch.v]
    return batch
