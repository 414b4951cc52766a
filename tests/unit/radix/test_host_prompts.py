# SPDX-License-Identifier: Apache-2.0
"""Copies of one layer at a time: where requests lie, what is read and written, sizes, refusals."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from host_kv_harness import (
    BUDGETS,
    CONTEXT,
    DEVICE,
    DIM,
    HEADS,
    LAYERS,
    SLOTS,
    Twins,
    make_config,
)

from sglang_sparse import pools
from sglang_sparse.backend.host_frame_sizes import (
    default_bytes,
    frames_in,
    pages_of_row,
    pages_to_copy,
)
from sglang_sparse.backend.host_prompts import buffer_bytes, lay_out
from sglang_sparse.config import ConfigError
from sglang_sparse_radix import host_kv

PAGE = 16


def test_requests_lie_one_behind_the_other_from_page_1_on():
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    one, two = lay_out(table, [32, 5], [20, 11], PAGE)
    assert (one.base, one.first, two.base, two.first) == (1, 2, 5, 0)
    assert one.read.tolist() == [0, 1]
    assert one.written.tolist() == [2, 3]
    assert one.open_page.tolist() == [3]
    # Its first page holds tokens of the prefix too, and is read before it is written.
    assert two.read.tolist() == two.written.tolist() == [10]
    assert two.open_page.tolist() == []


def test_a_batch_of_two_requests_reads_prefixes_and_writes_what_follows():
    twins = Twins(make_config(PAGE))
    prompts, pool = twins.frames.prompts, twins.hosted.pool
    numbers = torch.Generator().manual_seed(1)
    pool.host.copy_(torch.randn(pool.host.shape, generator=numbers))
    before = pool.host.clone()
    table = torch.tensor([[7, 3, 9, 0], [4, 8, 0, 0]], dtype=torch.int32, device=DEVICE)
    batch = SimpleNamespace(
        extend_prefix_lens_cpu=[32, 16],
        extend_seq_lens_cpu=[10, 3],
        req_pool_indices=torch.tensor([2, 1], device=DEVICE),
    )
    prompts.plan(batch, table)
    # Pages 7, 3 and 4 are read in all layers, 9 and 8 are written, and read for decoding.
    page = 2 * PAGE * HEADS * DIM * LAYERS * pool.dtype.itemsize
    counts = twins.frames.counts(wait=True)
    assert (counts["prompt_read_bytes"], counts["prompt_written_bytes"]) == (5 * page, 2 * page)
    inner = twins.seen.token_to_kv_pool
    for layer in range(LAYERS):
        prompts.begin_layer(layer)
        # Three rows pad a graph.
        k, v = (
            torch.randn((16, HEADS, DIM), generator=numbers).bfloat16().to(DEVICE) for _ in "kv"
        )
        inner.set_kv_buffer(SimpleNamespace(layer_id=layer), None, k, v)
        for row, fresh in zip(inner.get_kv_buffer(layer), (k, v), strict=True):
            part = 0 if fresh is k else 1
            for slot, pages, prefix, new in (
                (2, [7, 3], 32, fresh[:10]),
                (1, [4], 16, fresh[10:13]),
            ):
                found = row[prompts.table[slot, : prefix + len(new)].long()]
                held = before[layer, pages, :, part].transpose(1, 2).flatten(0, 1).to(DEVICE)
                assert torch.equal(found, torch.cat((held, new)))
        prompts.end_layer(layer)
        for page, fresh in ((9, slice(10)), (8, slice(10, 13))):
            count = len(k[fresh])
            for part, rows in ((0, k), (1, v)):
                written = pool.host[layer, page, :, part].transpose(0, 1)[:count]
                assert torch.equal(written.to(DEVICE), rows[fresh])
    others = [page for page in range(pool.num_pages) if page not in (8, 9)]
    assert torch.equal(pool.host[:, others], before[:, others])
    assert (
        pool.verify_planes(
            torch.tensor([9, 8], device=DEVICE), torch.tensor([10, 3], device=DEVICE)
        )
        == []
    )


def test_a_batch_that_is_longer_than_a_copy_is_an_error():
    twins = Twins(make_config(PAGE))
    pages = torch.zeros((2, CONTEXT // PAGE), dtype=torch.int32, device=DEVICE)
    batch = SimpleNamespace(
        extend_prefix_lens_cpu=[0, 0], extend_seq_lens_cpu=[CONTEXT, PAGE],
        req_pool_indices=torch.tensor([1, 2], device=DEVICE),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="a prefill of 11 pages exceeds the 10 of a copy"):
        twins.frames.prompts.plan(batch, pages)


def test_a_copy_has_room_for_each_prompt_and_for_no_more_prompts_than_requests():
    twins = Twins(make_config(PAGE))
    sizes = {"request_slots": 4, "max_context": CONTEXT}

    def pages(prompts: int, device_bytes: int = 1 << 30) -> int:
        placement = {"kind": "host", "device_bytes": device_bytes, "host_bytes": 1 << 30}
        config = make_config(PAGE, placement=placement)
        return pages_to_copy(config, twins.hosted.pool, prompts=prompts, **sizes)

    assert [pages(n) for n in (1, 2, 3, 4, 9)] == [10, 20, 30, 30, 30]
    of_two = buffer_bytes(twins.hosted.pool, 20)
    assert pages(2, of_two) == 20
    with pytest.raises(ConfigError, match=rf"device_bytes={of_two}: .*--prefill-max-requests"):
        pages(3, of_two)


def test_scales_are_those_of_no_row_unless_keys_are_cast():
    twins, layer = Twins(make_config(PAGE)), SimpleNamespace(layer_id=1)
    pages = torch.tensor([[3]], dtype=torch.int32, device=DEVICE)
    batch = SimpleNamespace(
        extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[5],
        req_pool_indices=torch.tensor([1], device=DEVICE),
    )  # fmt: skip
    twins.frames.prompts.plan(batch, pages)
    inner, one = twins.seen.token_to_kv_pool, torch.tensor(1.0, device=DEVICE)
    k, v = (torch.randn((5, HEADS, DIM)).bfloat16().to(DEVICE) for _ in "kv")
    inner.set_kv_buffer(layer, None, k, v, one, one)
    for rows, fresh in zip(inner.get_kv_buffer(1), (k, v), strict=True):
        assert torch.equal(rows[PAGE : PAGE + 5], fresh)
    with pytest.raises(RuntimeError, match=r"float32 with scales cannot .*--kv-cache-dtype auto"):
        inner.set_kv_buffer(layer, None, k.float(), v.float(), one, one)


def test_readers_of_rows_are_refused():
    twins = Twins(make_config(PAGE))
    for name in ("get_key_buffer", "get_kv_buffer", "set_kv_buffer", "update_planes"):
        with pytest.raises(RuntimeError, match="lie in blocks in host memory"):
            getattr(twins.hosted.pool, name)(0)


@pytest.mark.parametrize("budget", ["tokens", "reuse-mass"])
@pytest.mark.parametrize("prompts", [1, 2])
def test_device_bytes_are_what_is_taken(prompts, budget):
    twins = Twins(make_config(PAGE, **BUDGETS[budget]), prompts=prompts)
    frames, pool = twins.frames, twins.hosted.pool
    given = frames.frames.demand.blocks
    assert frames.frames.cached == given
    # Two layers of the second config reuse the lists of the first one.
    assert len(frames._found_ahead) == (2 if budget == "reuse-mass" else 0)
    copies = frames.prompts
    pages = prompts * CONTEXT // PAGE
    assert copies.nbytes() - copies.table.nbytes == buffer_bytes(pool, pages)
    needs = twins.needs
    least = needs.fixed + given * needs.frame
    assert frames_in(needs, least) == given
    with pytest.raises(ConfigError, match=rf"device_bytes={least - 1}: .*at least {least};"):
        frames_in(needs, least - 1)
    # Where blocks lie was counted with the planes; counters and rounds take some bytes a row.
    rest = frames.nbytes() - frames.frames.frame_of.nbytes - least
    assert 0 <= rest < 256


def test_a_server_whose_frames_hold_less_than_two_steps_says_so(caplog):
    twins = Twins(make_config(PAGE))
    needs, blocks = twins.needs, twins.needs.demand.blocks
    least = needs.fixed + blocks * needs.frame
    caplog.clear()
    assert frames_in(needs, least) == blocks
    fewer = blocks // (2 * blocks // SLOTS) - 1
    assert f"frames hold 1.0 times what a step of {SLOTS - 1} requests may touch" in caplog.text
    assert f"--max-running-requests {fewer}," in caplog.text
    caplog.clear()
    # Nothing is loaded twice where frames hold all there is.
    every = LAYERS * twins.hosted.pool.num_pages * HEADS
    assert blocks < every < 2 * blocks
    for more in (0, 1):
        assert frames_in(needs, needs.fixed + (every + more) * needs.frame) == every
    assert not caplog.text


def test_unset_device_bytes_are_for_four_steps_or_what_is_free_down_to_two():
    needs = Twins(make_config(PAGE)).needs
    step = needs.demand.blocks * needs.frame

    def steps(free: int) -> float:
        return (default_bytes(needs, needs.fixed + free) - needs.fixed) / step

    every = needs.useful * needs.frame
    assert steps(9 * step) == steps(every) == every / step < 2
    needs = replace(needs, useful=4 * needs.demand.blocks)
    assert [steps(free) for free in (9 * step, 3 * step, 2 * step)] == [4, 3, 2]
    least = needs.fixed + 2 * step
    with pytest.raises(ConfigError, match=rf"device_bytes unset: .*where {least} bytes"):
        steps(2 * step - 1)


@pytest.mark.parametrize(
    ("least", "every", "pages"),
    # Tails of every alignment: 2 tokens may lie in 2 pages, a short request begins with a page.
    [(1, 1, (1, 6)), (2, 2, (2, 7)), (17, 1, (1, 6)), (18, 1, (2, 6)), (161, 18, (10, 10))],
)
def test_a_row_reads_a_list_and_what_follows_or_all_of_a_short_request(least, every, pages):
    config = make_config(PAGE, min_sparse_tokens=least, cadence={"kind": "steps", "every": every})
    assert pages_of_row(config, 5) == pages


def test_memory_is_pinned_until_no_tensor_has_it(monkeypatch):
    calls = []

    def call(name: str, address: int) -> int:
        # What is unpinned is still there.
        calls.append((name, address, ctypes.c_int16.from_address(address + 22).value))
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: call(f"pin {size} bytes", address),
        cudaHostUnregister=lambda address: call("unpin", address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    blocks = host_kv.host_blocks((3, 4), torch.int16, pinned=True)
    assert blocks.shape == (3, 4)
    assert not blocks.any()
    address = blocks.data_ptr()
    blocks[2, 3] = 7
    part = blocks[2:].view(torch.float16)
    del blocks
    assert calls == [("pin 24 bytes", address, 0)]
    del part
    assert calls[1:] == ["wait", ("unpin", address, 7)]


def test_memory_that_cannot_be_pinned_ends_the_start_by_name(monkeypatch):
    def failing(configurator: object, **kwargs: object) -> None:
        host_kv.host_blocks((2, 3), torch.bfloat16, pinned=True)

    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    config = make_config(PAGE)
    launch = SimpleNamespace(config=config)
    monkeypatch.setattr(pools, "selecting_launch_of", lambda server_args: launch)
    monkeypatch.setattr(pools, "kv_pool_class", lambda: host_kv.HostKVPool)
    configurator = SimpleNamespace(is_draft_worker=False, server_args=None)
    host_bytes = config.placement.room[1]
    with pytest.raises(
        ConfigError, match=rf"host_bytes={host_bytes}: .*cannot be pinned \(CUDA error 2\)"
    ):
        pools.build_mha_kv_pool(failing, configurator, mha_pool_class=object)
