# SPDX-License-Identifier: Apache-2.0
"""KV that goes to the host and comes back: its planes, its branch, nothing lost on the way."""

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from host_tier_harness import FORWARD_STREAM, HostTierSide
from hypothesis.stateful import initialize, precondition, rule
from invariants import tree_nodes
from radix_harness import MemorySide
from radix_parts import DIM, HEADS, LAYERS, VOCAB
from schedule_machine import DTYPES, SPECS, Schedules, run_schedules, run_until_seen
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_sparse_kernels.common import FP8
from sglang_sparse_radix import radix_cache
from sglang_sparse_radix.branches import NEVER, Section
from sglang_sparse_radix.host_loads import HostLoads

LAYOUTS = ("page_first", "layer_first", "page_first_direct")
P = 16
POLICIES = ("write_through", "write_through_selective", "write_back")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The process group of one rank, which the tree asks for its size."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class HostSchedules(Schedules):
    """The same schedules over a small pool, with a host tier beside."""

    @initialize(
        page_size=st.sampled_from((16, 32)),
        num_pages=st.integers(9, 14),
        spec=st.sampled_from(SPECS),
        dtype=st.sampled_from([dtype for dtype in DTYPES if dtype != FP8]),
        seed=st.integers(0, 2**16),
        sparse_prefill=st.sampled_from((None, 0, 37, 64)),
        sparse_decode=st.sampled_from((-1, 40, 90)),
        ratio=st.sampled_from((0.5, 1.0, 4.0)),
        layout=st.sampled_from(LAYOUTS),
        policy=st.sampled_from(POLICIES),
    )
    def start(self, ratio, layout, policy, **drawn):
        self.flags = {
            "hicache_ratio": ratio,
            "hicache_mem_layout": layout,
            "hicache_io_backend": "direct" if layout == "page_first_direct" else "kernel",
            "hicache_write_policy": policy,
        }
        self.begin(**drawn)

    def make_side(self, *arguments, **sizes):
        return HostTierSide(*arguments, flags=self.flags, **sizes)

    @precondition(lambda self: self.history and self.can_submit)
    @rule(
        earlier=st.integers(0, 100),
        fresh=st.sampled_from((0, 0, 3, 35)),
        chunk=st.sampled_from((5, 33, 400, 400)),
        mode=st.integers(0, 2),
        waits=st.booleans(),
    )
    def come_back(self, earlier, fresh, chunk, mode, waits):
        """Ask again what was evicted; what just ended may ask behind others that wait."""
        known = self.history[earlier % len(self.history)]
        send_to_host(self.side)
        limit = self.max_prompt_pages * self.side.page_size
        prompt = [*known[: limit - fresh], *self.random_tokens(fresh)]
        self.side.submit(prompt, sparse=self.modes[mode])
        self.history.append(prompt)
        if not waits:
            self.side.prefill(chunk)

    @precondition(lambda self: self.side.waiting)
    @rule()
    def give_up_waiting(self):
        """Abort a request that waits, whether or not its load was asked for."""
        self.side.waiting.pop()


def host_machine(model_config, **members):
    return type("Machine", (HostSchedules,), {"model_config": model_config} | members)


def test_planes_and_branches_survive_the_host_under_random_schedules(model_config):
    hard = (
        "load_back",
        "_evict_backuped",
        "evict_host",
        "branch on the host",
        "sparse prefix",
        "dense prefix",
        "_split_node",
        "finish with a step in flight",
    )
    run_until_seen(host_machine(model_config), hard, examples=40)


def forgets_what_came_back(machine, monkeypatch):
    monkeypatch.setattr(HostLoads, "update_planes", lambda loads: None)


def knows_the_last_load_alone(machine, monkeypatch):
    expect = HostLoads.expect

    def mutant(loads, consumer, slots):
        expect(loads, consumer, slots[-loads._pool.page_size :])

    monkeypatch.setattr(HostLoads, "expect", mutant)


def takes_the_planes_of_a_stale_load(machine, monkeypatch):
    expect = HostLoads.expect
    monkeypatch.setattr(
        HostLoads, "expect", lambda loads, consumer, slots: expect(loads, consumer + 1, slots)
    )


@pytest.mark.parametrize(
    "mutation",
    [
        forgets_what_came_back,
        knows_the_last_load_alone,
        takes_the_planes_of_a_stale_load,
    ],
)
def test_random_schedules_catch_planes_that_did_not_come_back(model_config, monkeypatch, mutation):
    machine = host_machine(model_config)
    mutation(machine, monkeypatch)
    with pytest.raises(AssertionError, match="planes differ from recomputation"):
        run_schedules(machine, examples=200, shrink=False)


def looks_on_the_trunk_for_everything(sparse, client_key, **_):
    return [Section(client_key, NEVER)]


def test_random_schedules_catch_sparse_kv_that_comes_back_as_dense(model_config, monkeypatch):
    monkeypatch.setattr(radix_cache, "sections", looks_on_the_trunk_for_everything)
    with pytest.raises(AssertionError, match=r"saw|out of reach|pages lost"):
        run_schedules(host_machine(model_config), examples=200, shrink=False)


@pytest.fixture
def side(model_config) -> HostTierSide:
    """A pool of twelve pages, and a host that holds everything."""
    flags = {"hicache_ratio": 8.0, "hicache_mem_layout": "page_first"}
    flags |= {"hicache_io_backend": "kernel", "hicache_write_policy": "write_through"}
    return HostTierSide(model_config, SPECS[2], flags=flags, page_size=P, num_pages=12)


def side_tokens(side: HostTierSide, count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=side.random).tolist()


def finish_all(side: HostTierSide) -> None:
    while side.running is not None:
        side.decode(finish=0)


def send_to_host(side: HostTierSide) -> None:
    """Evict everything that nobody uses."""
    side.take_acknowledged()
    side.tree.evict(EvictParams(num_tokens=side.tree.evictable_size()))


def poison(side: HostTierSide) -> None:
    """Fill keys and planes with NaN, but for the padding page."""
    for keys in side.pool.k_buffer:
        keys[P:].view(torch.uint8).fill_(255)
    for plane in side.pool.planes.tensors().values():
        plane.view(torch.uint8).fill_(255)
    nothing = torch.zeros(1, dtype=torch.int32)
    side.pool.update_planes(nothing[None], nothing, nothing + P, P)


def test_a_host_page_holds_k_and_v_and_nothing_else(side):
    k_and_v = 2 * LAYERS * HEADS * DIM * side.pool.dtype.itemsize
    assert side.host.size_per_token == k_and_v
    assert side.host.kv_buffer.nbytes == side.host.size * k_and_v


def test_what_comes_back_is_what_went(side):
    tokens = side_tokens(side, 5 * P + 3)
    side.submit(tokens)
    side.prefill(400)
    finish_all(side)
    slots = side.tree._slots_on_device()
    keys = [keys[slots].clone() for keys in side.pool.k_buffer]
    send_to_host(side)
    assert not len(side.tree._slots_on_device())
    poison(side)
    # Others take its pages, so that it comes back elsewhere.
    side.submit(side_tokens(side, 3 * P))
    side.prefill(400)
    req = side.submit([*tokens, 1, 2, 3])
    side.prefill(400)
    assert req.cached_tokens_host == 5 * P
    back = req.prefix_indices[: 5 * P]
    assert not torch.equal(back, slots)
    for layer, expected in enumerate(keys):
        assert torch.equal(side.pool.k_buffer[layer][back], expected)
    side.check()
    assert side.tree.plane_reuse.recomputed_pages == 5


def test_a_page_that_a_step_in_flight_completes_goes_to_the_host_behind_it(side):
    tokens = side_tokens(side, 2 * P - 1)
    req = side.submit(tokens)
    side.prefill(400)
    side.decode(finish=0, overlap=True)
    slots = side.tree._slots_on_device()
    assert len(slots) == 2 * P
    keys = [keys[slots].clone() for keys in side.pool.k_buffer]
    send_to_host(side)
    poison(side)
    again = side.submit([*tokens, *req.output_ids, 1])
    side.prefill(400)
    assert again.cached_tokens_host == 2 * P
    assert side.tree.cache_controller.load_stream.waits_for is FORWARD_STREAM
    for layer, expected in enumerate(keys):
        assert torch.equal(side.pool.k_buffer[layer][again.prefix_indices[: 2 * P]], expected)
    side.check()


def load_for_nobody(side: HostTierSide) -> list[int]:
    """Ask for a load, do not admit its request, and let a batch without a prefix start it."""
    tokens = side_tokens(side, 4 * P)
    side.submit(tokens)
    side.prefill(400)
    finish_all(side)
    send_to_host(side)
    poison(side)  # the load may get the same pages, which still hold everything
    req = side.submit([*tokens, 1])
    req.init_next_round_input(side.tree)
    assert not side.load_back(req, [], budget=0)
    side.check()  # the tree has its pages, and nobody takes them for loaded
    side.waiting.remove(req)
    other = side.submit(side_tokens(side, 20))
    side.prefill(400)
    assert other.cached_tokens_host == 0
    return tokens


def test_a_load_whose_request_was_not_admitted_has_its_planes(side):
    tokens = load_for_nobody(side)
    side.check()
    assert side.tree.plane_reuse.recomputed_pages == 4
    again = side.submit([*tokens, 1])
    side.prefill(400)
    assert again.cached_tokens_device == 4 * P
    side.check()


def test_planes_of_a_load_that_was_not_waited_for_are_caught(side, monkeypatch):
    monkeypatch.setattr(HostLoads, "wait", lambda loads, layer: None)
    load_for_nobody(side)
    with pytest.raises(AssertionError, match="planes differ from recomputation"):
        side.check()


def test_a_page_that_was_computed_anew_takes_its_place_in_the_node_on_the_host(side):
    tokens = side_tokens(side, 4 * P)
    side.submit(tokens)
    side.prefill(400)
    finish_all(side)
    send_to_host(side)
    # The last token is always computed, and with it its page.
    req = side.submit(tokens)
    side.prefill(400)
    assert req.cached_tokens_host == 3 * P
    assert side.seen["_put_on_device"] == 1
    side.check()
    finish_all(side)
    side.check()


@pytest.mark.parametrize("tier", [False, True], ids=["one tier", "behind a device"])
def test_prefixes_leave_host_memory_in_the_order_of_their_last_use(side, model_config, tier):
    # With `placement.kind` `host` the one tier of the tree is host memory.
    side = side if tier else MemorySide(model_config, SPECS[2], page_size=P, num_pages=12)
    evict = side.tree.evict_host if tier else lambda n: side.tree.evict(EvictParams(num_tokens=n))
    prompts = [side_tokens(side, 3 * P) for _ in "abc"]
    for prompt in (*prompts, [*prompts[0], 1]):
        side.submit(prompt)
        side.prefill(400)
        finish_all(side)
        if tier:
            send_to_host(side)
    there = []
    for _ in prompts:
        held = [list(node.key.token_ids[:P]) for node in tree_nodes(side.tree)]
        there.append([prompt[:P] in held for prompt in prompts])
        evict(3 * P)
    assert there == [[True, True, True], [True, False, True], [True, False, False]]


def test_a_storage_backend_cannot_be_attached_later(side):
    done, why = side.tree.attach_storage_backend("file")
    assert not done
    assert "names KV by tokens alone" in why
    assert not side.tree.enable_storage


def test_the_worker_is_given_the_counter_that_forward_passes_wait_on(side):
    assert side.counter is side.tree.cache_controller.layer_done_counter
    assert side.pool.layer_transfer_counter is side.counter


def test_a_pool_without_a_host_tier_expects_nothing(model_config):
    side = MemorySide(model_config, SPECS[0], page_size=P, num_pages=8)
    calls = []
    side.pool.update_planes = lambda *arguments, **more: calls.append(arguments)
    side.pool.loads.wait(0)
    side.pool.loads.update_planes()
    assert not calls
