# SPDX-License-Identifier: Apache-2.0
"""Random schedules over the real memory side.

After every step the planes are compared with recomputation, and each prefix that a request took
over with what the request could have computed itself.
"""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import hypothesis.strategies as st
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
from radix_harness import MemorySide, UpdatePlanes
from radix_parts import VOCAB
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_sparse_kernels.common import FP8
from sglang_sparse_radix.branches import (
    DENSE,
    SparseFrom,
)
from sglang_sparse_radix.planes import PageBounds, PageDigest, SketchPlane
from sglang_sparse_radix.planes_spec import PlaneSpec

SPECS = (
    PlaneSpec((PageBounds(),)),
    PlaneSpec((SketchPlane("int8"),)),
    PlaneSpec((PageBounds(), SketchPlane("fp8"))),
    PlaneSpec((PageBounds(), SketchPlane("bf16"))),
    PlaneSpec((PageDigest(),)),
)
TENANTS = st.sampled_from((None, None, None, "tenant"))
RARELY = st.sampled_from((False, False, False, True))
CHUNKS = (5, 33, 64, 200, 400)
Mutation = Callable[[MemorySide, UpdatePlanes], UpdatePlanes]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)


class Schedules(RuleBasedStateMachine):
    """Any order of what a scheduler does to requests, pages and tree."""

    model_config: ClassVar[object]
    mutate: ClassVar[Mutation | None] = None
    max_prompt_pages = 5
    seen: ClassVar[Counter[str]]

    side: MemorySide
    history: list[list[int]]

    @initialize(
        page_size=st.sampled_from((16, 32)),
        num_pages=st.integers(9, 18),
        spec=st.sampled_from(SPECS),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**16),
        sparse_prefill=st.sampled_from((None, 0, 37, 64)),
        sparse_decode=st.sampled_from((-1, 40, 90)),
    )
    def start(self, **drawn):
        self.begin(**drawn)

    def make_side(self, *arguments, **sizes) -> MemorySide:
        return MemorySide(*arguments, **sizes)

    def begin(self, page_size, num_pages, spec, dtype, seed, sparse_prefill, sparse_decode):
        self.side = self.make_side(
            self.model_config,
            spec,
            page_size=page_size,
            num_pages=num_pages,
            dtype=dtype,
            seed=seed,
        )
        # What a server's config sets; requests differ in their budgets, or are dense.
        self.modes = [
            DENSE,
            *(SparseFrom(sparse_prefill, sparse_decode, budget) for budget in (128, 256)),
        ]
        self.history = []
        self.forwards = 0
        update = self.side.update_planes
        if self.mutate is not None:
            update = type(self).mutate(self.side, update)

        def counted(*arguments):
            self.forwards += 1
            update(*arguments)

        self.side.update_planes = counted

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
        mode=st.integers(0, 2),
        extra_key=TENANTS,
    )
    def arrive(self, earlier, shared_eighths, fresh, chunk, overlap, mode, extra_key):
        limit = self.max_prompt_pages * self.side.page_size
        prefix: list[int] = []
        if self.history:
            known = self.history[earlier % len(self.history)]
            prefix = known[: max(0, min(shared_eighths * len(known) // 8, limit - fresh))]
        prompt = prefix + self.random_tokens(fresh)
        self.side.submit(prompt, sparse=self.modes[mode], extra_key=extra_key)
        self.history.append(prompt)
        self.side.prefill(chunk, overlap=overlap)

    @precondition(lambda self: self.can_submit)
    @rule(
        fresh=st.sampled_from((16, 35, 90)),
        modes=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        kept_eighths=st.sampled_from((4, 8, 8)),
        steps=st.sampled_from((20, 34)),
        chunk=st.sampled_from(CHUNKS),
        really=RARELY,
    )
    def converse(self, fresh, modes, kept_eighths, steps, chunk, really):
        """Two turns, one after the other, beside whatever else runs, each in a mode of its own."""
        conversation: list[int] = []
        for mode in modes if really else ():
            limit = 2 * self.max_prompt_pages * self.side.page_size
            prompt = [*conversation, *self.random_tokens(3 if conversation else fresh)]
            if len(prompt) > limit or not self.can_submit:
                return
            req = self.side.submit(prompt, sparse=self.modes[mode])
            while (req in self.side.waiting or req is self.side.chunked) and self.side.prefill(
                chunk
            ):
                self.side.check()
            for _ in range(steps):
                if req in self.running_reqs:
                    self.side.decode()
            self.side.check()
            if req not in self.running_reqs:  # no memory for it
                return
            conversation = [*req.origin_input_ids, *req.output_ids]
            conversation = conversation[: kept_eighths * len(conversation) // 8]
            self.side.decode(finish=self.running_reqs.index(req))
            self.side.check()

    @property
    def running_reqs(self) -> list[Req]:
        return [] if self.side.running is None else self.side.running.reqs

    @precondition(lambda self: self.side.waiting or self.side.chunked is not None)
    @rule(chunk=st.sampled_from(CHUNKS), overlap=st.booleans())
    def prefill(self, chunk, overlap):
        self.side.prefill(chunk, overlap=overlap)

    @precondition(lambda self: self.side.running is not None)
    @rule(steps=st.sampled_from((1, 5, 17, 40)))
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

    @precondition(lambda self: self.forwards > 8)
    @rule(really=RARELY)
    def flush(self, really):
        if really:
            self.side.flush()

    def teardown(self):
        if hasattr(self, "side"):
            self.seen.update(self.side.seen)
            self.seen["reused tokens"] += self.side.tree.plane_reuse.tokens

    @invariant()
    def planes_tree_and_allocator_agree(self):
        if hasattr(self, "side"):
            self.side.check()


def run_until_seen(
    machine: type[Schedules], cases: tuple[str, ...], *, examples: int, rounds: int = 4
) -> None:
    """Run random schedules until each of `cases` came up; without them they would prove little.

    Now and then one case or another is missing by chance: each round draws twice as many.
    """
    seen: Counter[str] = Counter()
    for doubled in range(rounds):
        run_schedules(machine, examples=examples << doubled)
        seen += machine.seen
        if all(seen[case] for case in cases):
            return
    raise AssertionError(f"a case of {cases} never came up: {seen}")


def run_schedules(machine: type[Schedules], *, examples: int, shrink: bool = True) -> None:
    machine.seen = Counter()
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
