# SPDX-License-Identifier: Apache-2.0
"""Each tree operation on its own: planes stay right, reuse is counted."""

import pytest
import torch
from invariants import tree_nodes
from radix_harness import MemorySide
from radix_parts import scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_sparse_kernels.planes import by_page
from sglang_sparse_radix.planes import PageBounds, SketchPlane
from sglang_sparse_radix.planes_spec import PlaneSpec

P = 16
SPEC = PlaneSpec((PageBounds(), SketchPlane("int8")))


@pytest.fixture
def side(model_config):
    return MemorySide(model_config, SPEC, page_size=P, num_pages=24)


def tokens(start, count):
    return [(start + 7 * i) % 61 for i in range(count)]


def serve(side, prompt, chunk=10_000, steps=2):
    """One request from arrival to finish, checked after each step; returns it."""
    req = side.submit(prompt)
    while req in side.waiting or req is side.chunked:
        assert side.prefill(chunk)
        side.check()
    for _ in range(steps):
        side.decode()
        side.check()
    side.decode(finish=side.running.reqs.index(req))
    side.check()
    return req


def test_a_shared_prefix_reuses_pages_and_planes_and_is_counted_once(side):
    prompt = tokens(0, 3 * P + 5)
    serve(side, prompt)
    before = {name: plane.clone() for name, plane in side.pool.planes.tensors().items()}
    (node,) = tree_nodes(side.tree)
    shared = node.value[::P][:3] // P
    serve(side, prompt[: 3 * P] + tokens(5, 20), chunk=9)
    assert vars_of(side) == (2, 1, 3 * P, 3)
    for name, plane in side.pool.planes.tensors().items():
        was = before[name]
        if name == "key_sketch":
            plane, was = (by_page(each, P).flatten(1, 2) for each in (plane, was))
        units = plane.shape[1] // side.pool.num_pages
        index = (shared[:, None] * units + torch.arange(units)).flatten()
        same = plane[:, index].view(torch.uint8) == was[:, index].view(torch.uint8)
        assert same.all(), f"{name} of a shared page was rewritten"


def vars_of(side):
    reuse = side.tree.plane_reuse
    return reuse.prefills, reuse.prefills_with_reuse, reuse.tokens, reuse.pages


def test_looking_a_prefix_up_does_not_count_as_reuse(side):
    serve(side, tokens(0, 2 * P + 1))
    waiting = side.submit(tokens(0, 2 * P + 1))
    for _ in range(5):
        waiting.init_next_round_input(side.tree)
    assert vars_of(side) == (1, 0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 23, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_any_chunking_of_a_prompt_keeps_planes_right(side, chunk, overlap):
    req = side.submit(tokens(3, 3 * P + 9))
    while req in side.waiting or req is side.chunked:
        side.prefill(chunk, overlap=overlap)
        side.check()
    assert vars_of(side) == (1, 0, 0, 0)


def test_two_requests_that_computed_one_prefix_end_on_the_same_pages(side):
    prompt = tokens(0, 2 * P + 3)
    first, second = side.submit(prompt), side.submit(prompt)
    side.prefill(10_000)
    side.check()
    rows = side.requests.req_to_token
    assert torch.equal(rows[scheduler.row(first), : 2 * P], rows[scheduler.row(second), : 2 * P])
    assert len(tree_nodes(side.tree)) == 1
    side.decode(finish=0)
    side.check()
    side.decode(finish=0)
    side.check()


def test_a_request_that_ends_while_its_extra_step_is_in_flight_keeps_planes_right(side):
    side.submit(tokens(0, 2 * P - 2))
    side.submit(tokens(40, 20))
    side.prefill(10_000)
    side.decode()
    side.decode(finish=0, overlap=True)
    side.check()
    serve(side, tokens(0, 2 * P - 2) + tokens(9, 8), steps=1)


def test_evicted_pages_are_reused_with_fresh_planes(side):
    for start in range(0, 60, 4):  # far more tokens than the pool holds
        serve(side, tokens(start, 4 * P), steps=1)
    assert side.tree.evictable_size() < side.pool.size
    side.tree.evict(EvictParams(num_tokens=side.pool.size))
    side.check()
    serve(side, tokens(1, 5 * P))


def test_retraction_recomputes_and_counts_a_second_prefill(side):
    serve(side, tokens(0, P + 1))
    req = side.submit(tokens(0, 2 * P + 5))
    side.prefill(10_000)
    side.decode()
    side.retract(0)
    side.check()
    assert scheduler.row(req) is None
    side.prefill(10_000)
    side.check()
    # Twice its own first page and what its first prefill had already put into the tree.
    assert vars_of(side)[:3] == (3, 2, P + 2 * P)


def test_memory_pressure_retracts_and_every_request_ends_with_right_planes(model_config):
    side = MemorySide(model_config, SPEC, page_size=P, num_pages=8)
    for start in (0, 20, 40):
        side.submit(tokens(start, P + 3))
        side.prefill(10_000)
    retracted = 0
    for _ in range(60):
        retracted += len(side.decode())
        side.check()
    assert retracted > 0


def test_aborting_a_half_prefilled_prompt_gives_its_pages_back(side):
    side.submit(tokens(0, 5 * P))
    side.prefill(2 * P + 3)
    side.check()
    side.abort_chunked()
    side.check()
    assert side.tree.evictable_size() == 2 * P


def test_flush_empties_tree_and_pages_but_keeps_counts(side):
    serve(side, tokens(0, 2 * P + 1))
    serve(side, tokens(0, 2 * P + 1))
    side.flush()
    side.check()
    assert tree_nodes(side.tree) == []
    assert side.allocator.available_size() == side.pool.size
    serve(side, tokens(0, 2 * P + 1))
    assert vars_of(side) == (3, 1, 2 * P, 2)


def test_without_a_radix_cache_planes_stay_right(model_config):
    side = MemorySide(model_config, SPEC, page_size=P, num_pages=24, disable_radix_cache=True)
    assert type(side.tree).__name__ == scheduler.DISABLED_TREE
    serve(side, tokens(0, 3 * P + 2), chunk=20)
    serve(side, tokens(0, 3 * P + 2), chunk=7)


def test_the_tree_can_compare_the_planes_of_all_its_pages(side):
    assert side.tree.check_planes() == {"pages": 0, "wrong": 0}
    serve(side, tokens(0, 3 * P + 5))
    serve(side, tokens(0, 2 * P) + tokens(5, 2 * P))
    found = side.tree.check_planes()
    pages = {int(page) for node in tree_nodes(side.tree) for page in node.value[::P] // P}
    assert found == {"pages": len(pages), "wrong": 0}
    side.pool.planes.page_max[0, next(iter(pages))] += 1
    assert side.tree.check_planes() == {"pages": len(pages), "wrong": 1}
