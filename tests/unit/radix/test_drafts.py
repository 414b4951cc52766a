# SPDX-License-Identifier: Apache-2.0
"""Draft tokens that are rejected leave no trace in the planes, whatever is accepted."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from invariants import check_branches, reachable_pages
from radix_harness import VOCAB, MemorySide, scheduler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_sparse.compat.cpu_speculation import assign_rows
from sglang_sparse_radix.branches import SparseFrom
from sglang_sparse_radix.planes import PageBounds, PageDigest, SketchPlane
from sglang_sparse_radix.planes_spec import PlaneSpec

DRAFTS = 8  # tokens of a verification: the last accepted one and seven drafts
ACCEPTED = 10_000
SPECS = (
    PlaneSpec((PageBounds(), SketchPlane("fp8"))),
    PlaneSpec((PageDigest(), SketchPlane("int8"))),
)


@pytest.fixture(autouse=True)
def speculation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flags of a server that speculates, and the one helper of SGLang that a CPU needs."""
    original = allocation.assign_req_to_token_pool_func
    monkeypatch.setattr(allocation, original.__name__, partial(assign_rows, original))
    with get_context().override_server_args(
        device="cpu",
        attention_backend="torch_native",
        radix_cache_backend="sparse",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=DRAFTS,
        speculative_num_steps=DRAFTS,
        speculative_eagle_topk=1,
        page_size=16,
    ):
        yield


class Speculating(MemorySide):
    """`MemorySide` whose decode steps verify chains of drafts."""

    def verify(self, accepted: list[int]) -> set[int]:
        """One verification; returns the pages that it wrote."""
        batch = self.running
        assert batch is not None
        batch.spec_algorithm = SpeculativeAlgorithm.NGRAM
        batch.prepare_for_decode()
        start = batch.seq_lens_cpu.clone()
        rows = self.requests.req_to_token[batch.req_pool_indices]
        slots = torch.cat(
            [row[at : at + DRAFTS] for row, at in zip(rows, start.tolist(), strict=True)]
        ).long()
        for layer in self.layers:
            keys, values = self._random_rows(slots), self._random_rows(slots)
            self.pool.set_kv_buffer(layer, KVWriteLoc(slots), keys, values)
        first = start.to(torch.int32)
        page_table = (rows[:, :: self.page_size] // self.page_size).contiguous()
        self.update_planes(page_table, first, first + DRAFTS, DRAFTS)
        for req, slot_row, at, count in zip(
            batch.reqs, rows, start.tolist(), accepted, strict=True
        ):
            self._note(slot_row[: at + count].tolist(), at, self.sparse_of(req), prefill=False)
            scheduler.commit(req, count)
            req.output_ids.extend(torch.randint(VOCAB, (count,), generator=self.random).tolist())
        counts = torch.tensor(accepted)
        batch.seq_lens += counts
        batch.seq_lens_cpu += counts
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        return set((slots // self.page_size).tolist())

    @staticmethod
    def sparse_of(req: Req) -> SparseFrom:
        sparse: SparseFrom = req.sampling_params.custom_params["sparse_from"]
        return sparse

    def check_complete(self, logical: int, only: set[int] | None = None) -> int:
        """Planes of every complete logical page equal recomputation; returns how many pages."""
        found = reachable_pages(self)
        kept = {
            page: rows // logical * logical
            for page, rows in found.items()
            if rows >= logical and (only is None or page in only)
        }
        pages = torch.tensor(list(kept), dtype=torch.int64)
        wrong = self.pool.verify_planes(pages, torch.tensor(list(kept.values())))
        assert not wrong, f"planes differ from recomputation: {wrong[:4]}"
        return len(kept)


def run_accept_lengths(side: Speculating, accepted: int, logical: int) -> int:
    """Verify until so many accept lengths were drawn; requests end, branch off, and are retracted.

    Returns how many pages were compared.
    """
    random, done, compared, step = side.random, 0, 0, 0
    conversations: list[list[int]] = []

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=random))

    while done < accepted:
        step += 1
        while len(side.live_requests()) + len(side.waiting) < 3:
            prompt = torch.randint(VOCAB, (draw(40) + 3,), generator=random).tolist()
            if conversations and draw(2):
                earlier = conversations[draw(len(conversations))]
                prompt = earlier[: draw(len(earlier)) + 1] + prompt
            budget = 128 * (1 + draw(2))
            side.submit(prompt, 4096, sparse=SparseFrom(None, 40, budget))
            side.prefill(400)
        batch = side.running
        assert batch is not None
        counts = [1 + draw(DRAFTS) for _ in batch.reqs]
        written = side.verify(counts)
        done += len(counts)
        compared += side.check_complete(logical, written)
        for req in list(batch.reqs):
            if scheduler.committed(req) > 150:
                ids = [*req.origin_input_ids, *req.output_ids]
                conversations = [*conversations[-4:], ids]
                side.release(req)
                side._leave_running(req)
        if step % 200 == 0:
            side.retract(draw(8)) if side.running is not None else None
            compared += side.check_complete(logical)
            check_branches(side)
    assert side.seen["sparse prefix"], "nothing was shared"
    return compared


@pytest.mark.parametrize(
    ("spec", "page_size", "logical", "accepted", "is_eagle"),
    [
        (SPECS[0], 16, 16, ACCEPTED, False),
        (SPECS[0], 64, 16, 2000, False),
        (SPECS[1], 32, 32, 2000, False),
        # A tree of pairs, which takes a page one token later.
        (SPECS[0], 16, 16, 2000, True),
    ],
)
def test_planes_of_complete_pages_are_exact_after_any_accept_lengths(
    model_config, spec, page_size, logical, accepted, is_eagle
):
    side = Speculating(
        model_config,
        spec,
        page_size=page_size,
        num_pages=1280 // page_size,
        seed=page_size,
        build={"is_eagle": is_eagle},
    )
    compared = run_accept_lengths(side, accepted, logical)
    assert compared > accepted // 10
    side.flush()
    assert side.allocator.available_size() == (side.pool.num_pages - 1) * page_size


def forgets_the_drafts(update):
    """Plane updates of one token a step, as if nothing had been drafted."""

    def mutant(page_table, start, end, most):
        drafted = most == DRAFTS
        update(page_table, start, start + 1 if drafted else end, 1 if drafted else most)

    return mutant


def begins_behind_the_first_token(update):
    def mutant(page_table, start, end, most):
        update(page_table, start + (most == DRAFTS), end, most)

    return mutant


@pytest.mark.parametrize("mutation", [forgets_the_drafts, begins_behind_the_first_token])
def test_a_wrong_range_of_the_plane_update_is_caught(model_config, mutation):
    side = Speculating(model_config, SPECS[0], page_size=16, num_pages=80, seed=3)
    side.update_planes = mutation(side.update_planes)
    with pytest.raises(AssertionError, match="planes differ from recomputation"):
        run_accept_lengths(side, 2000, 16)
