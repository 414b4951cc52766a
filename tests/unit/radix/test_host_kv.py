# SPDX-License-Identifier: Apache-2.0
"""KV in host memory beside resident KV: the same requests, the same bits, step by step."""

from collections import Counter
from random import Random
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from host_kv_harness import BUDGETS, CONTEXT, Prefix, Prompt, Twins, make_config
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from schedule_machine import run_until_seen


class Schedules(RuleBasedStateMachine):
    """Prompts in chunks, steps, shared prefixes, ends, aborts and evictions, in any order."""

    twins: Twins | None = None
    seen: ClassVar[Counter[str]]

    @initialize(
        page=st.sampled_from((16, 32)),
        every=st.sampled_from((1, 3)),
        budget=st.sampled_from(list(BUDGETS)),
        seed=st.integers(0, 99),
    )
    def start(self, page: int, every: int, budget: str, seed: int) -> None:
        """Few frames, few pages."""
        # Bounds are of the step that selects.
        every = 1 if budget in ("bounds", "scores") else every
        config = make_config(page, cadence={"kind": "steps", "every": every}, **BUDGETS[budget])
        pages = 3 * CONTEXT // page + 2
        self.twins = Twins(config, pages=pages, seed=seed, prompts=2)

    @precondition(lambda self: self.twins is not None and self.twins.can_begin())
    @rule(tokens=st.integers(1, CONTEXT), chunk=st.integers(1, 4), which=st.integers(0, 9))
    def begin(self, tokens: int, chunk: int, which: int) -> None:
        """A request, cold or behind a prefix."""
        self._begin(Prompt(tokens, chunk, self._prefix(which)))

    @precondition(lambda self: self.twins is not None and self.twins.can_begin(2))
    @rule(
        tokens=st.tuples(*[st.integers(1, CONTEXT)] * 2),
        chunks=st.tuples(*[st.integers(1, 4)] * 2),
        which=st.tuples(*[st.integers(0, 9)] * 2),
        same=st.booleans(),
    )
    def begin_two(
        self,
        tokens: tuple[int, int],
        chunks: tuple[int, int],
        which: tuple[int, int],
        same: bool,
    ) -> None:
        """Two requests in one batch, maybe behind the same prefix; one of them may go on alone."""
        first, second = which
        prefixes = map(self._prefix, (first, first if same else second))
        self._begin(*map(Prompt, tokens, chunks, prefixes))

    def _begin(self, *prompts: Prompt) -> None:
        running, page = self.twins.running, self.twins.page
        self.twins.begin(*prompts)
        shared = [id(one.prefix) for one in prompts if one.prefix is not None]
        self.seen["behind a prefix"] += len(shared)
        self.seen["two behind a prefix"] += len(set(shared)) < len(shared)
        begun = running[-len(prompts) :]
        self.seen["a page left open"] += any(one.length % page for one in begun)
        self.seen["several chunks"] += any(
            one.length - one.shared * page > prompt.chunk_pages * page
            for one, prompt in zip(begun, prompts, strict=True)
        )

    def _prefix(self, which: int) -> Prefix | None:
        prefixes = self.twins.prefixes
        prefix = prefixes[which % len(prefixes)] if prefixes and which % 3 else None
        long = prefix is not None and (len(prefix.pages) + 1) * self.twins.page >= CONTEXT
        return None if long else prefix

    @precondition(lambda self: self.twins is not None and self.twins.running)
    @rule(steps=st.integers(1, 8), padding=st.sampled_from((0, 0, 2)), graph=st.booleans())
    def decode(self, steps: int, padding: int, graph: bool) -> None:
        """Some tokens of every request."""
        self._decode(steps, padding, graph=graph)

    def _decode(self, steps: int, padding: int, *, graph: bool) -> None:
        page = self.twins.page
        for _ in range(steps):
            before = [request.length for request in self.twins.running]
            self.twins.step(padding, graph=graph)
            after = [request.length for request in self.twins.running]
            stepped = [new for new, old in zip(after, before, strict=True) if new > old]
            self.seen["a page filled by a step"] += any(new % page == 0 for new in stepped)
            self.seen["replayed"] += bool(graph and stepped)

    @precondition(lambda self: self.twins is not None and self.twins.running)
    @rule(which=st.integers(0, 9), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        """A request ends, or is aborted or retracted."""
        running = self.twins.running
        self.twins.end(running[which % len(running)], keep=keep)
        self.seen["aborted"] += not keep

    @precondition(lambda self: self.twins is not None and self.twins.running)
    @rule(which=st.integers(0, 9), tokens=st.integers(1, 32), steps=st.integers(1, 8))
    def come_back(self, which: int, tokens: int, steps: int) -> None:
        """A request ends and at once goes on behind its own pages, as one that was retracted."""
        twins = self.twins
        request = twins.running[which % len(twins.running)]
        twins.end(request, keep=True)
        full = request.length // twins.page
        kept = [one for one in twins.prefixes if one.pages == request.pages[:full]]
        if kept and (full + 1) * twins.page < CONTEXT and twins.can_begin():
            self._begin(Prompt(tokens, 4, kept[-1]))
            self._decode(steps, 0, graph=bool(steps % 2))
            self.seen["came back"] += 1

    @precondition(lambda self: self.twins is not None and self.twins.prefixes)
    @rule(which=st.integers(0, 9))
    def evict(self, which: int) -> None:
        """Pages of a prefix change hands."""
        prefixes = self.twins.prefixes
        free = len(self.twins.free_pages)
        self.twins.evict(prefixes[which % len(prefixes)])
        self.seen["evicted"] += len(self.twins.free_pages) > free

    def teardown(self) -> None:
        """Note what frames did."""
        if self.twins is not None:
            self.seen["loads"] += self.twins.frames.counts(wait=True)["loads"]

    @invariant()
    def holds(self) -> None:
        """Host, planes and frames are right."""
        if self.twins is not None:
            self.twins.check()


# Half a minute alone; beside servers of other tests it has less than a core.
@pytest.mark.timeout(900)
def test_any_schedule_has_the_bits_of_resident_kv() -> None:
    cases = (
        "behind a prefix", "two behind a prefix", "a page left open", "several chunks",
        "a page filled by a step", "replayed", "aborted", "came back", "evicted", "loads",
    )  # fmt: skip
    run_until_seen(Schedules, cases, examples=10)


@pytest.mark.parametrize(
    ("budget", "page", "steps"),
    [
        ("tokens", 16, 1000), ("tokens", 64, 200), ("mass", 16, 1000), ("mass", 64, 200),
        ("bounds", 32, 200), ("scores", 16, 200), ("reuse", 16, 200), ("reuse-mass", 32, 200),
    ],
)  # fmt: skip
def test_many_steps_have_the_bits_of_resident_kv(budget: str, page: int, steps: int) -> None:
    config, rng = make_config(page, **BUDGETS[budget]), Random(page)
    twins = Twins(config, pages=6 * CONTEXT // page, seed=page, prompts=2)
    for number in range(steps):
        while twins.can_begin() and rng.random() < 0.5:
            prompts = []
            for _ in range(rng.randrange(1, 3) if twins.can_begin(2) else 1):
                prefix = rng.choice([None, *twins.prefixes])
                if prefix is not None and (len(prefix.pages) + 1) * page >= CONTEXT:
                    prefix = None
                prompts.append(Prompt(rng.randrange(1, CONTEXT), rng.randrange(1, 4), prefix))
            twins.begin(*prompts)
        twins.step(number % 2, graph=number % 3 > 0)
        for request in [one for one in twins.running if one.length == CONTEXT]:
            twins.end(request, keep=rng.random() < 0.5)
        if twins.prefixes and not twins.can_begin():
            twins.evict(rng.choice(twins.prefixes))
        if number % 100 == 0:
            twins.check()
    counts = twins.frames.counts(wait=True)
    assert counts["hits"] > counts["loads"] > 0
    assert counts["unserved"] == 0
    assert counts["loaded_bytes"] == counts["loads"] * twins.frames.block_bytes
    if config.budget.kind == "mass":
        stops = [side.budget.counters.read() for side in (twins.resident, twins.hosted)]
        assert stops[0] == stops[1]
        assert all(layer["blocks"] < layer["domain_blocks"] for layer in stops[0].values())
