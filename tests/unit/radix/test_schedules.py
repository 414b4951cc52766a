# SPDX-License-Identifier: Apache-2.0
"""Planes equal recomputation after every step of random schedules over the real memory side."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from radix_harness import VOCAB, MemorySide, tree_nodes
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_sparse_radix.planes_spec import PlaneSpec

SPECS = (
    PlaneSpec(page_minmax=True),
    PlaneSpec(key_sketch="int8"),
    PlaneSpec(page_minmax=True, key_sketch="fp8"),
    PlaneSpec(page_minmax=True, key_sketch="bf16"),
)
RARELY = st.sampled_from((False, False, False, True))
CHUNKS = (5, 33, 64, 200, 400)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Schedules(RuleBasedStateMachine):
    """Any order of what a scheduler does to requests, pages and tree."""

    model_config: ClassVar[object]
    forgets_update_at: ClassVar[int | None] = None
    max_prompt_pages = 5

    side: MemorySide
    history: list[list[int]]

    @initialize(
        page_size=st.sampled_from((16, 32)),
        num_pages=st.integers(9, 20),
        spec=st.sampled_from(SPECS),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**16),
    )
    def start(self, page_size, num_pages, spec, dtype, seed):
        self.side = MemorySide(
            self.model_config,
            spec,
            page_size=page_size,
            num_pages=num_pages,
            dtype=dtype,
            seed=seed,
        )
        self.history = []
        self.forwards = 0
        self.side.before_update = self.count_forward

    def count_forward(self) -> bool:
        self.forwards += 1
        return self.forwards != self.forgets_update_at

    def random_tokens(self, count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=self.side.random).tolist()

    @property
    def can_submit(self) -> bool:
        return len(self.side.waiting) < 3

    @precondition(lambda self: self.can_submit)
    @rule(
        earlier=st.integers(0, 100),
        shared_eighths=st.integers(0, 8),
        fresh=st.sampled_from((3, 16, 35, 90)),
        chunk=st.sampled_from(CHUNKS),
        overlap=st.booleans(),
    )
    def arrive(self, earlier, shared_eighths, fresh, chunk, overlap):
        limit = self.max_prompt_pages * self.side.page_size
        prefix: list[int] = []
        if self.history:
            known = self.history[earlier % len(self.history)]
            prefix = known[: max(0, min(shared_eighths * len(known) // 8, limit - fresh))]
        prompt = prefix + self.random_tokens(fresh)
        self.side.submit(prompt)
        self.history.append(prompt)
        self.side.prefill(chunk, overlap=overlap)

    @precondition(lambda self: self.side.waiting or self.side.chunked is not None)
    @rule(chunk=st.sampled_from(CHUNKS), overlap=st.booleans())
    def prefill(self, chunk, overlap):
        self.side.prefill(chunk, overlap=overlap)

    @precondition(lambda self: self.side.running is not None)
    @rule(steps=st.integers(1, 40))
    def decode(self, steps):
        for _ in range(steps):
            self.side.decode()
            self.side.check()

    @precondition(lambda self: self.side.running is not None)
    @rule(index=st.integers(0, 9), overlap=st.booleans())
    def finish(self, index, overlap):
        if self.side.running is not None:
            req = self.side.running.reqs[index % len(self.side.running.reqs)]
            self.history.append([*req.origin_input_ids, *req.output_ids])
        self.side.decode(finish=index, overlap=overlap)

    @precondition(lambda self: self.side.chunked is not None)
    @rule(really=RARELY)
    def abort_chunked(self, really):
        if really:
            self.side.abort_chunked()

    @precondition(lambda self: self.side.running is not None and self.can_submit)
    @rule(index=st.integers(0, 9))
    def retract(self, index):
        self.side.retract(index)

    @precondition(lambda self: self.side.tree.evictable_size() > 0)
    @rule(tokens=st.integers(1, 200), really=RARELY)
    def evict(self, tokens, really):
        if really:
            self.side.tree.evict(EvictParams(num_tokens=tokens))

    @precondition(lambda self: len(tree_nodes(self.side.tree)) > 0)
    @rule(node=st.integers(0, 99), units=st.lists(st.integers(0, 30), max_size=6))
    def annotate(self, node, units):
        nodes = tree_nodes(self.side.tree)
        self.side.tree.annotate(nodes[node % len(nodes)], units, unit=16)

    @precondition(lambda self: self.forwards > 8)
    @rule(really=RARELY)
    def flush(self, really):
        if really:
            self.side.flush()

    @invariant()
    def planes_tree_and_allocator_agree(self):
        if hasattr(self, "side"):
            self.side.check()


def run_schedules(machine: type[Schedules], *, examples: int, shrink: bool = True) -> None:
    phases = set(Phase) - {Phase.explain} if shrink else {Phase.generate}
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            phases=phases,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_planes_equal_recomputation_after_every_step_of_random_schedules(model_config):
    machine = type("Machine", (Schedules,), {"model_config": model_config})
    run_schedules(machine, examples=40)


def test_random_schedules_catch_a_forward_pass_that_forgets_the_planes(model_config):
    broken = type("Broken", (Schedules,), {"model_config": model_config, "forgets_update_at": 2})
    with pytest.raises(AssertionError, match="planes differ from recomputation"):
        run_schedules(broken, examples=20, shrink=False)
