# SPDX-License-Identifier: Apache-2.0
"""Which KV a request takes over: dense KV whoever computed it, sparse KV only of its own kind."""

import pytest
from invariants import tree_nodes
from radix_harness import MemorySide

from sglang_sparse_radix.branches import DENSE, NEVER, Branch, Section, SparseFrom, sections
from sglang_sparse_radix.planes import PageBounds
from sglang_sparse_radix.planes_spec import PlaneSpec

P = 16
SPARSE = SparseFrom(decode=-1, budget=256)
OTHER_BUDGET = SparseFrom(decode=-1, budget=128)
FROM_48 = SparseFrom(decode=48 - 1, budget=256)
TILES = SparseFrom(prefill=2 * P, decode=-1, budget=256)
TILES_OTHER_BUDGET = SparseFrom(prefill=2 * P, decode=-1, budget=128)


@pytest.fixture
def side(model_config):
    return MemorySide(model_config, PlaneSpec((PageBounds(),)), page_size=P, num_pages=64)


def tokens(start, count):
    return [(start + 7 * i) % 61 for i in range(count)]


def turn(side, prompt, sparse, *, steps=2 * P, extra_key=None, chunk=10_000):
    """One request from arrival to finish.

    Returns:
        How many of its tokens were cached, and all of them for the next turn's prompt.
    """
    before = side.tree.plane_reuse.tokens
    req = side.submit(prompt, sparse=sparse, extra_key=extra_key)
    while req in side.waiting or req is side.chunked:
        assert side.prefill(chunk)
        side.check()
    reused = side.tree.plane_reuse.tokens - before
    for _ in range(steps):
        side.decode()
        side.check()
    side.decode(finish=side.running.reqs.index(req))
    side.check()
    return reused, [*req.origin_input_ids, *req.output_ids, *tokens(3, 5)]


PROMPT = tokens(0, 3 * P + 5)  # its last whole page ends 5 tokens before it does


def test_a_dense_turn_after_a_sparse_one_takes_over_the_prompt_alone(side):
    _, conversation = turn(side, PROMPT, SPARSE)
    assert turn(side, conversation, SPARSE)[0] == 5 * P
    assert turn(side, conversation, DENSE)[0] == 3 * P


def test_a_dense_turn_takes_over_what_a_dense_turn_before_it_decoded(side):
    _, first = turn(side, PROMPT, SPARSE)
    _, second = turn(side, first, DENSE)
    # The first answer, computed densely beside the sparse copy, and the second one.
    decoded = len(first) + 2 * P
    assert turn(side, second, DENSE)[0] == decoded // P * P


def test_a_sparse_turn_takes_over_what_a_dense_one_left(side):
    _, conversation = turn(side, PROMPT, DENSE)
    assert turn(side, conversation, SPARSE)[0] == 5 * P


def test_a_sparse_turn_takes_the_longer_way_where_dense_and_sparse_kv_are_there(side):
    _, first = turn(side, PROMPT, SPARSE)
    turn(side, first, DENSE, steps=1)
    _, second = turn(side, first, SPARSE)
    reused, _ = turn(side, second, SPARSE)
    assert reused == (len(first) + 2 * P) // P * P


def test_a_request_shares_what_it_decoded_with_its_own_budget_alone(side):
    _, conversation = turn(side, PROMPT, SPARSE)
    assert turn(side, conversation, OTHER_BUDGET)[0] == 3 * P
    assert turn(side, conversation, OTHER_BUDGET)[0] > 4 * P
    assert turn(side, conversation, SPARSE)[0] > 4 * P


def test_what_a_sparse_request_decodes_before_its_threshold_is_dense(side):
    short = tokens(0, P + 3)
    _, conversation = turn(side, short, FROM_48, steps=4 * P)
    # Positions 19 to 46 were decoded densely; the page of position 47 is the first sparse one.
    assert turn(side, conversation, DENSE)[0] == 2 * P
    assert turn(side, conversation, FROM_48)[0] == 5 * P


@pytest.mark.parametrize("chunk", [7, 2 * P, 10_000])
def test_where_prompts_are_sparse_only_their_dense_beginning_is_shared(side, chunk):
    assert turn(side, PROMPT, TILES, chunk=chunk)[0] == 0
    assert turn(side, PROMPT, DENSE, chunk=chunk)[0] == 2 * P
    assert turn(side, PROMPT, DENSE, chunk=chunk)[0] == 3 * P
    assert turn(side, PROMPT, TILES, chunk=chunk)[0] == 3 * P
    assert turn(side, PROMPT, TILES_OTHER_BUDGET, chunk=chunk)[0] == 3 * P


def test_a_sparse_prompt_takes_over_no_dense_kv_where_it_would_be_sparse(side):
    turn(side, PROMPT, DENSE)
    assert turn(side, PROMPT, TILES)[0] == 2 * P
    assert turn(side, PROMPT, TILES)[0] == 3 * P


def test_a_prompt_on_top_of_sparse_kv_is_no_dense_prefix(side):
    _, first = turn(side, PROMPT, SPARSE)
    _, second = turn(side, first, SPARSE)
    assert turn(side, second, SPARSE)[0] > 6 * P
    assert turn(side, second, DENSE)[0] == 3 * P


def test_tokens_that_a_retraction_computes_anew_are_dense(side):
    req = side.submit(PROMPT, sparse=SPARSE)
    side.prefill(10_000)
    for _ in range(2 * P):
        side.decode()
    side.retract(0)
    side.prefill(10_000)
    side.check()
    conversation = [*req.origin_input_ids, *req.output_ids]
    side.decode(finish=0)
    side.check()
    assert turn(side, [*conversation, 1], DENSE)[0] == 5 * P


def test_no_extra_key_of_a_client_reaches_a_branch(side):
    _, conversation = turn(side, PROMPT, SPARSE)
    (branch,) = {
        node.key.extra_key
        for node in tree_nodes(side.tree)
        if isinstance(node.key.extra_key, Branch)
    }
    assert branch == Branch(None, ("decode", 256))
    for key in (repr(branch), str(branch), repr(branch.saw), "decode", "prefill", ""):
        for sparse in (DENSE, SPARSE):
            side.flush()
            turn(side, PROMPT, SPARSE)
            assert turn(side, conversation, sparse, extra_key=key, steps=1)[0] == 0, key


def test_an_extra_key_has_branches_of_its_own(side):
    _, conversation = turn(side, PROMPT, SPARSE, extra_key="a")
    assert turn(side, conversation, SPARSE, extra_key="b")[0] == 0
    assert turn(side, conversation, SPARSE)[0] == 0
    assert turn(side, conversation, DENSE, extra_key="a")[0] == 3 * P
    assert turn(side, conversation, SPARSE, extra_key="a")[0] == 5 * P


def test_branches_are_evicted_and_give_their_pages_back(side):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    _, conversation = turn(side, PROMPT, SPARSE)
    turn(side, conversation, DENSE)
    turn(side, conversation, OTHER_BUDGET)
    side.tree.evict(EvictParams(num_tokens=side.pool.size))
    side.check()
    assert tree_nodes(side.tree) == []
    assert side.allocator.available_size() == side.pool.size


def test_a_path_ends_each_section_with_a_page():
    tiles = SparseFrom(prefill=40, decode=70, budget=9)
    prefill, decode = Branch("k", "prefill"), Branch("k", ("decode", 9))
    path = sections(tiles, "k", matched={}, prefilled=50, page_size=P)
    assert path == [Section("k", 32), Section(prefill, 64), Section(decode, NEVER)]
    short = sections(tiles, "k", matched={}, prefilled=40, page_size=P)
    assert short == [Section("k", 64), Section(prefill, 64), Section(decode, NEVER)]
    on_decoded = sections(tiles, "k", matched={"k": 32, decode: 48}, prefilled=99, page_size=P)
    assert on_decoded == [Section("k", 32), Section(prefill, 32), Section(decode, NEVER)]
    assert sections(DENSE, "k", matched={"k": 32}, prefilled=40, page_size=P) == [
        Section("k", NEVER)
    ]
