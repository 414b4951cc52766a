# SPDX-License-Identifier: Apache-2.0
"""The tree under EAGLE, whose keys are pairs of tokens: it shares what a tree of tokens shares, but
for a page whose last token is followed by another one."""

import random

import pytest
from invariants import tree_nodes
from radix_harness import MemorySide
from schedule_machine import Schedules, run_until_seen
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_sparse_radix.branches import DENSE, Branch, SparseFrom
from sglang_sparse_radix.planes import PageBounds
from sglang_sparse_radix.planes_spec import PlaneSpec

P = 16
SPEC = PlaneSpec((PageBounds(),))
SPARSE = SparseFrom(decode=-1, budget=256)
OTHER_BUDGET = SparseFrom(decode=-1, budget=128)
PAIRS = {"is_eagle": True}


@pytest.fixture
def side(model_config):
    return MemorySide(model_config, SPEC, page_size=P, num_pages=64, build=PAIRS)


def tokens(start, count):
    return [(start + 7 * i) % 61 for i in range(count)]


def turn(side, prompt, sparse=DENSE, *, steps=2 * P, chunk=10_000):
    """One request from arrival to finish.

    Returns:
        How many of its tokens were cached, and those whose KV was computed.
    """
    before = side.tree.plane_reuse.tokens
    req = side.submit(prompt, sparse=sparse)
    while req in side.waiting or req is side.chunked:
        assert side.prefill(chunk)
        side.check()
    reused = side.tree.plane_reuse.tokens - before
    for _ in range(steps):
        side.decode()
        side.check()
    computed = [*req.origin_input_ids, *req.output_ids]
    side.decode(finish=side.running.reqs.index(req))
    check_keys(side)
    side.check()
    return reused, computed


def check_keys(side):
    """Each node has a slot a pair, whole pages of them, and begins where its parent ended."""
    for node in tree_nodes(side.tree):
        pairs = side.tree.is_eagle
        assert node.key.is_bigram == pairs
        assert len(node.key) == len(node.value) == len(node.key.token_ids) - pairs
        assert len(node.key) % P == 0
        if pairs and node.parent is not side.tree.root_node:
            assert node.parent.key.token_ids[-1] == node.key.token_ids[0]
        assert node.parent.children[node.key.child_key(P)] is node


def shared(prompt, computed, pairs):
    """Tokens that a tree of one sequence gives a prompt: whole pages, never its last token."""
    equal = [a == b for a, b in zip(prompt[:-1], computed, strict=False)]
    return max(0, [*equal, False].index(False) - pairs) // P * P


@pytest.mark.parametrize("pairs", [False, True], ids=["tokens", "pairs"])
@pytest.mark.parametrize("seed", range(2))
def test_each_prompt_takes_over_what_lists_of_tokens_have_in_common(model_config, seed, pairs):
    drawn = random.Random(seed)
    side = MemorySide(model_config, SPEC, page_size=P, num_pages=400, build={"is_eagle": pairs})
    known: list[list[int]] = []
    different = 0
    for _ in range(24):
        prompt = [drawn.randrange(60) for _ in range(drawn.choice((1, 5, P, P + 1, 3 * P - 1)))]
        if known and drawn.random() < 0.8:
            earlier = drawn.choice(known)
            # At the end of a page, where pairs and tokens differ, as often as elsewhere.
            cut = drawn.choice((drawn.randint(0, len(earlier)), len(earlier) // P * P))
            prompt = earlier[:cut] + prompt
        expected = [max((shared(prompt, k, p) for k in known), default=0) for p in (False, True)]
        different += expected[0] != expected[1]
        reused, computed = turn(
            side, prompt, steps=drawn.randrange(2 * P), chunk=drawn.choice((9, P, 400))
        )
        assert reused == expected[pairs]
        known.append(computed)
    assert different, "no prompt parted from another at the end of a page"


@pytest.mark.parametrize("length", [3 * P - 1, 3 * P, 3 * P + 1])
def test_a_page_is_shared_when_the_token_behind_it_is_the_same(side, length):
    _, computed = turn(side, tokens(0, length), steps=P)
    for cut in range(2 * P, len(computed)):
        reused, _ = turn(side, [*computed[:cut], 60, 59, 58], steps=0)
        assert reused == (cut - 1) // P * P


@pytest.mark.parametrize("second", [DENSE, OTHER_BUDGET], ids=["dense", "other budget"])
def test_another_kind_of_turn_takes_over_dense_pairs_alone(side, second):
    _, conversation = turn(side, tokens(0, 3 * P + 5), SPARSE)
    conversation += tokens(3, 5)
    assert turn(side, conversation, SPARSE)[0] == 5 * P
    branches = {node.key.extra_key for node in tree_nodes(side.tree)}
    assert branches == {None, Branch(None, ("decode", 256))}
    assert turn(side, conversation, second)[0] == 3 * P


def test_a_prompt_that_fills_its_pages_is_dense_to_its_last_token(side):
    _, conversation = turn(side, tokens(0, 3 * P), SPARSE)
    # Its last pair holds a decoded token, but the KV is the prompt's.
    assert turn(side, [*conversation, 1], DENSE)[0] == 3 * P


def test_a_split_branch_keeps_its_pairs(side):
    _, conversation = turn(side, tokens(0, P + 5), SPARSE, steps=5 * P)
    before = len(tree_nodes(side.tree))
    # Two branches of the answer, which part inside of a page.
    cut = 3 * P + 7
    assert turn(side, [*conversation[:cut], 60, 59], SPARSE, steps=P)[0] == 3 * P
    assert len(tree_nodes(side.tree)) > before
    assert turn(side, [*conversation, 1], SPARSE)[0] == (len(conversation) - 1) // P * P


def test_evicted_pairs_give_their_pages_back(side):
    _, conversation = turn(side, tokens(0, 3 * P + 5), SPARSE)
    turn(side, conversation, DENSE)
    for start in range(20):  # far more than the pool holds
        turn(side, tokens(start, 6 * P))
    assert side.seen["_delete_leaf"]
    side.tree.evict(EvictParams(num_tokens=side.pool.size))
    side.check()
    assert tree_nodes(side.tree) == []
    assert side.allocator.available_size() == side.pool.size


def test_random_schedules_keep_planes_and_branches_of_pairs(model_config):
    def make_side(self, *arguments, **sizes):
        return MemorySide(*arguments, **sizes, build=PAIRS)

    members = {"model_config": model_config, "make_side": make_side}
    machine = type("Machine", (Schedules,), members)
    hard = ("_split_node", "_delete_leaf", "branch", "dense prefix", "sparse prefix")
    run_until_seen(machine, hard, examples=15)
