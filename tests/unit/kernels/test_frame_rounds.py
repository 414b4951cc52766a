# SPDX-License-Identifier: Apache-2.0
"""Attention over frames until a share is reached: bits, stops, and what is loaded for it."""

from dataclasses import replace

import pytest
import torch
from frame_cases import same_bytes, steps_of
from kernel_cases import DEVICE, NAN
from tier import LAYERS, Tier

from sglang_sparse_kernels import (
    COUNTERS,
    Always,
    AttendFramesUntil,
    AttendUntil,
    HeadWindows,
    Lists,
    MassStop,
    make_progressive_workspace,
    num_chunks,
    num_stop_checks,
)
from sglang_sparse_kernels.progressive import (
    ROUNDS,
    Rounds,
    StopState,
    attend_round,
    kernel,
    rounds_kernel,
    rounds_reference,
)
from sglang_sparse_kernels.progressive.reference import forced_units, prologue_units

LENGTHS = [520, 1, 333, 96]
MORE = 32  # tokens, so that short lists have a second round
CAPACITY_TOKENS = 352
ALWAYS = Always(4, 8)
EPSILONS = (0.5, 0.8, 0.9, 1.0)

# page size, unit, heads, group, dim, queries' dtype, dtype of KV; microbatch, share, bounds
CASES = {
    "pages": ((16, 16, 2, 2, 64, torch.bfloat16, None), 16, "min", False),
    "half pages, fp8": ((32, 16, 1, 4, 64, torch.bfloat16, torch.float8_e4m3fn), 32, "mean", False),
    "tokens, bounds": ((32, 1, 3, 1, 128, torch.float16, None), 16, "min", True),
}


class MassTier(Tier):
    """Two servers that attend until a share is reached, with what each expects and counts."""

    def __init__(self, case: tuple, impl: str) -> None:
        shape, self.microbatch, self.share, self.bounds = case
        unit = shape[1]
        super().__init__(shape, impl, 7, LENGTHS, CAPACITY_TOKENS // unit)
        batch, self.rows = self.batch, len(LENGTHS)
        sizes = (batch.capacity, unit, self.microbatch)
        self.checks = num_stop_checks(*sizes)
        heads = (batch.heads * batch.group, batch.heads, batch.dim)
        self.workspaces = [
            make_progressive_workspace(self.rows + 1, *heads, num_chunks(*sizes), DEVICE)
            for _ in range(2)
        ]
        for space in self.workspaces:
            for tensor in (space.partial, space.lse, space.min_block):
                tensor.fill_(NAN)
        state = (batch.list_rows, batch.heads)
        expected = torch.zeros(state, dtype=torch.int32, device=DEVICE)
        self.expected = [expected, expected.clone()]
        self.reached = [torch.full_like(expected, -7) for _ in range(2)]
        self.counters = torch.zeros((2, len(COUNTERS)), dtype=torch.int64, device=DEVICE)
        self.rounds = Rounds.allocate(self.rows + 2, batch.heads, DEVICE, None)
        self.rounds.span.last.fill_(2**20)

    def ranking(self, rng: torch.Generator) -> Lists:
        """Units in any order."""
        indices, counts = self.batch.random_lists()
        for row in range(self.rows):
            target, kept = (
                int(self.batch.plan.request_slots[row]),
                int(self.batch.plan.k_units[row]),
            )
            for head in range(self.batch.heads if kept else 0):
                order = torch.randperm(kept, generator=rng).to(DEVICE)
                indices[target, head, :kept] = indices[target, head, :kept][order]
        return self.batch.lists(indices, counts)

    def stages(
        self, layer: int, ranking: Lists, rng: torch.Generator,
        shares: tuple[float, ...] = EPSILONS,
    ) -> tuple:  # fmt: skip
        """(over frames, over resident KV)"""
        batch, residual = self.batch, None
        if self.bounds:
            shape = (self.rows, batch.heads, batch.group, self.checks)
            residual = torch.randn(shape, generator=rng).to(DEVICE).mul(6).sort(-1, True).values
        which = torch.randint(len(shares), (self.rows,), generator=rng)
        epsilons = torch.tensor(shares)[which].to(DEVICE)
        stop = MassStop(ALWAYS, self.microbatch, self.share, epsilons, residual)
        hosted, resident = (
            AttendUntil(stop, ranking.counts, self.expected[i], self.counters[i], space)
            for i, space in enumerate(self.workspaces)
        )
        rounds = replace(self.rounds, workspace=hosted.workspace)
        return AttendFramesUntil(self.fetch(layer), hosted, rounds), resident

    def blocks(self, layer: int, ranking: Lists, ends: list[list[int]]) -> set[int]:
        """Blocks of the tails and of the first ``ends[row][head]`` units of the lists."""
        batch, found = self.batch, set()
        plan, size = batch.plan, batch.page_size
        for row in range(self.rows):
            tail, target = int(plan.tail_start[row]), int(plan.request_slots[row])
            for head in range(batch.heads):
                units = ranking.indices[target, head, : ends[row][head]].tolist()
                pages = {u * batch.unit // size for u in units if u * batch.unit < tail}
                pages |= set(range(tail // size, -(-int(plan.seq_lens[row]) // size)))
                physical = plan.page_table[row, sorted(pages)].tolist()
                found |= {(layer * batch.num_pages + p) * batch.heads + head for p in physical}
        return found - self.pinned()

    def pinned(self) -> set[int]:
        """Blocks that lie in pinned frames."""
        frames = self.pool.frame_of.flatten()
        return set((frames >= self.pool.cached).nonzero().flatten().tolist())

    def used(self, layer: int) -> set[int]:
        """Blocks of a layer that this step looked up."""
        pool, size = self.pool, self.pool.frame_of[0].numel()
        owners = set(pool.owner[pool.stamp == pool.clock].tolist())
        return {block for block in owners if block // size == layer}

    def ends(self, taken: list[list[int]]) -> list[list[int]]:
        """Units up to so many microbatches of each row and KV head."""
        batch, plan, step = self.batch, self.batch.plan, self.microbatch // self.batch.unit
        ends = []
        for row, of_heads in enumerate(taken):
            kept = int(plan.k_units[row])
            first = prologue_units(
                forced_units(int(plan.tail_start[row]), batch.unit, ALWAYS), step
            )
            ends.append([min(first + some * step, kept) for some in of_heads])
        return ends


def allowed(begin: int, stop: int, microbatch: int) -> int:
    """Microbatches that may be looked up: a few more than a row began with, or any."""
    first = max(begin, 1) + MORE // microbatch
    return first if stop <= first else 1000


def assert_same_counts(one: torch.Tensor, other: torch.Tensor, impl: str, pairs: int) -> None:
    """Counts of a step; a compiled kernel may round the share of each pair the other way.

    The share is rounded to a millionth; two programs whose exponentials differ by a bit of fp32
    lie at most one apart.
    """
    change = (one - other).abs()
    share = COUNTERS.index("share_millionths")
    most = pairs if impl == "triton" and DEVICE.type == "cuda" else 0
    assert int(change[share]) <= most
    change[share] = 0
    assert not change.any()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few parts of what is attended to in any case, so that dense rows' hold several tiles."""
    monkeypatch.setattr(kernel, "MAX_PROLOGUE_CHUNKS", 3)
    for module in (rounds_kernel, rounds_reference):
        monkeypatch.setattr(module, "MORE_TOKENS", MORE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("impl", "steps"), steps_of(cpu=120, triton=2))
def test_output_stops_and_loads_are_those_of_algorithm_1(
    impl: str, steps: int, case: tuple
) -> None:
    tier = MassTier(case, impl)
    batch, seen = tier.batch, set()
    for number in range(steps):
        rng = tier.begin_step(number)
        slots = batch.plan.request_slots.long()
        for layer in range(LAYERS):
            ranking = tier.ranking(rng)
            loud = torch.tensor([0.1, 1.0, 4.0])[torch.randint(3, (tier.rows, 1, 1), generator=rng)]
            q = (torch.randn(batch.q.shape, generator=rng) * loud).to(DEVICE, batch.dtype)
            if impl == "cpu" and number % 2:  # what was expected is forgotten, as by a new request
                tier.expected[0].copy_(torch.randint(9, tier.expected[0].shape, generator=rng))
            before = tier.expected[0][slots].tolist()
            outputs, counted = [], tier.pool.counters[:2].sum()
            for i, stage in enumerate(tier.stages(layer, ranking, rng)):
                lists = replace(ranking, counts=tier.reached[i])
                outputs.append(tier.attend(stage, q, lists, layer if i else None))
            got, want = outputs
            assert not want.isnan().any()
            assert same_bytes(got, want), f"step {number}"
            assert torch.equal(*tier.reached)
            assert_same_counts(*tier.counters, impl, tier.rows * batch.heads)
            tier.counters[1] = tier.counters[0]
            after = tier.expected[0][slots].tolist()
            if impl == "triton":  # the definition over resident KV expects nothing
                assert tier.expected[1][slots].tolist() == after
            pairs = [list(zip(*both, strict=True)) for both in zip(before, after, strict=True)]
            most = tier.ends([[allowed(*pair, tier.microbatch) for pair in row] for row in pairs])
            read = tier.reached[0][slots].tolist()
            used = tier.used(layer)
            assert tier.blocks(layer, ranking, read) <= used
            assert tier.pool.counters[:2].sum() - counted == len(used)
            assert used <= tier.blocks(layer, ranking, most)
            seen |= {allowed(*pair, tier.microbatch) == 1000 for row in pairs for pair in row}
    assert seen == {False, True}
    hits, loads, unserved, *_ = tier.pool.counters.tolist()
    assert hits > 0
    assert loads > 0
    assert unserved == 0


@pytest.mark.parametrize("impl", [impl for impl, _ in steps_of(cpu=1, triton=1)])
def test_nothing_more_is_loaded_for_rows_that_stop_in_the_first_round(impl: str) -> None:
    tier = MassTier(CASES["pages"], impl)
    there: set[int] = set()
    # All stop behind the first microbatch.
    for taken in (1, 2):
        rng, before = tier.begin_step(0), tier.pool.counters.tolist()
        tier.expected[0].fill_(taken)
        ranking = tier.ranking(rng)
        q = torch.randn(tier.batch.q.shape, generator=rng).to(DEVICE, tier.batch.dtype)
        stage, _ = tier.stages(0, ranking, rng, shares=(1e-6,))
        tier.attend(stage, q, replace(ranking, counts=tier.reached[0]))
        after = tier.pool.counters.tolist()
        hits, loads, unserved, stall, _ = (n - b for n, b in zip(after, before, strict=True))
        ends = tier.ends([[taken + MORE // tier.microbatch] * tier.batch.heads] * tier.rows)
        used = tier.blocks(0, ranking, ends)
        assert tier.used(0) == used
        assert (hits, loads, unserved) == (len(used & there), len(used - there), 0)
        assert loads > 0
        there = used
    assert hits > 0
    if impl == "cpu":
        assert stall > 0


def test_both_implementations_look_up_the_same_blocks() -> None:
    tiers = [MassTier(CASES["pages"], impl) for impl in ("cpu", "triton")]
    for number in range(2):
        for tier in tiers:
            rng = tier.begin_step(number)
            ranking = tier.ranking(rng)
            q = torch.randn(tier.batch.q.shape, generator=rng).mul(2).to(DEVICE, tier.batch.dtype)
            stage, _ = tier.stages(0, ranking, rng)
            tier.attend(stage, q, replace(ranking, counts=tier.reached[0]))
        one, other = tiers
        assert torch.equal(one.reached[0], other.reached[0])
        assert torch.equal(one.expected[0], other.expected[0])
        assert torch.equal(one.pool.counters[:3], other.pool.counters[:3])
        for name in ("frame_of", "owner", "stamp"):
            assert torch.equal(getattr(one.pool, name), getattr(other.pool, name)), name


def test_what_rounds_cannot_do_is_refused() -> None:
    tier = MassTier(CASES["pages"], "cpu")
    rng = tier.begin_step(0)
    ranking, batch = tier.ranking(rng), tier.batch
    heads = torch.ones(batch.heads, dtype=torch.int32, device=DEVICE)
    windows = replace(ranking, windows=HeadWindows(heads, 16, 32))
    stop = MassStop(ALWAYS, 16, "min", torch.ones(tier.rows, device=DEVICE))
    rounds = tier.rounds.rows(tier.rows)
    out = torch.empty_like(batch.q)

    def attend(lists: Lists, number: int, expected: torch.Tensor | None) -> None:
        state = StopState(tier.reached[0], expected)
        attend_round(
            batch.q, batch.kv, batch.plan, lists, stop, state, rounds.round(number),
            softmax=batch.softmax(), out=out, impl="cpu",
        )  # fmt: skip

    with pytest.raises(ValueError, match="windows"):
        attend(windows, 0, tier.expected[0])
    with pytest.raises(ValueError, match=f"round {ROUNDS} is none"):
        attend(ranking, ROUNDS, tier.expected[0])
    with pytest.raises(ValueError, match="expected"):
        attend(ranking, 0, None)
    with pytest.raises(ValueError, match="epsilons"):
        replace(rounds, epsilons=rounds.epsilons.double()).check(tier.rows, batch.heads)
