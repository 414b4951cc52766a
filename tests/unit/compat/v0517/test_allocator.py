# SPDX-License-Identifier: Apache-2.0
"""The CPU allocator hands out the pages that SGLang's own definition hands out."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, alloc_extend_naive

from sglang_sparse_radix.allocator import TorchPagedTokenToKVPoolAllocator


def make(pages=16, page_size=16, need_sort=False):
    allocator = TorchPagedTokenToKVPoolAllocator(
        pages * page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache="the pool",
        need_sort=need_sort,
    )
    allocator.debug_mode = True
    return allocator


def extend(allocator, prefix_lens, seq_lens, last_loc):
    prefix, seq = torch.tensor(prefix_lens), torch.tensor(seq_lens)
    return allocator.alloc_extend(
        prefix, prefix, seq, seq, torch.tensor(last_loc), int((seq - prefix).sum())
    )


def decode(allocator, seq_lens, last_loc):
    seq = torch.tensor(seq_lens)
    return allocator.alloc_decode(seq, seq, torch.tensor(last_loc))


requests = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 70), st.integers(20, 30)), min_size=1, max_size=5
)


@given(requests=requests, page_size=st.sampled_from((1, 16, 32, 64)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_extend_equals_sglangs_definition(requests, page_size, data):
    allocator = make(pages=400, page_size=page_size)
    allocator.free_pages = allocator.free_pages[torch.randperm(400)]
    prefix = torch.tensor([p for p, _, _ in requests])
    seq = prefix + torch.tensor([n for _, n, _ in requests])
    held_page = torch.tensor([page for _, _, page in requests]) + 1000
    last_loc = torch.where(prefix > 0, held_page * page_size + (prefix - 1) % page_size, -1)
    expected = torch.empty(int((seq - prefix).sum()), dtype=torch.int64)
    free_before = allocator.free_pages.clone()
    alloc_extend_naive(prefix, seq, last_loc, free_before, expected, page_size, "cpu")
    got = allocator.alloc_extend(prefix, prefix, seq, seq, last_loc, len(expected))
    assert torch.equal(got, expected)
    taken = int((-(-seq // page_size) - -(-prefix // page_size)).sum())
    assert torch.equal(allocator.free_pages, free_before[taken:])


def test_decode_continues_a_page_or_opens_the_next_free_one():
    allocator = make()
    allocator.free_pages = torch.tensor([9, 4, 7])
    out = decode(allocator, [17, 5, 33, 16], [15, 83, 31, 110])
    assert out.tolist() == [9 * 16, 84, 4 * 16, 111]
    assert allocator.free_pages.tolist() == [7]
    assert out.dtype == torch.int64


def test_running_out_returns_none_and_takes_nothing():
    allocator = make(pages=2)
    assert extend(allocator, [0], [33], [-1]) is None
    assert allocator.available_size() == 32
    assert extend(allocator, [0], [32], [-1]) is not None
    assert decode(allocator, [33], [47]) is None
    assert decode(allocator, [32], [46]).tolist() == [47]


def test_a_full_pool_still_continues_partly_filled_pages():
    allocator = make(pages=1)
    assert extend(allocator, [0], [3], [-1]).tolist() == [16, 17, 18]
    assert extend(allocator, [3], [5], [18]).tolist() == [19, 20]
    assert allocator.available_size() == 0


def test_sorting_allocators_merge_released_pages_when_they_run_short():
    allocator = make(pages=4, need_sort=True)
    slots = extend(allocator, [0], [64], [-1])
    allocator.free(slots[16:48])
    assert (len(allocator.free_pages), len(allocator.release_pages)) == (0, 2)
    assert decode(allocator, [17], [31]).tolist() == [2 * 16]


def test_everything_else_is_sglangs():
    allocator = make(pages=4)
    assert isinstance(allocator, PagedTokenToKVPoolAllocator)
    own = {n for n in vars(TorchPagedTokenToKVPoolAllocator) if not n.startswith("_")}
    assert own == {"alloc_extend", "alloc_decode"}
    slots = allocator.alloc(32)
    allocator.free_group_begin()
    allocator.free(slots[:16])
    allocator.free_segment(slots[16:], start_pos=16)
    assert allocator.available_size() == 32
    allocator.free_group_end()
    assert allocator.available_size() == 64
    allocator.alloc(64)
    assert allocator.alloc(16) is None
    allocator.clear()
    assert allocator.available_size() == 64
    assert allocator.get_kvcache() == "the pool"


@pytest.mark.parametrize("page_size", [16, 64])
def test_no_page_is_handed_out_twice(page_size):
    allocator = make(pages=8, page_size=page_size)
    first = extend(allocator, [0, 0], [page_size + 3, 5], [-1, -1])
    second = extend(allocator, [0], [3 * page_size], [-1])
    pages = torch.cat([first, second]) // page_size
    assert set((first // page_size).tolist()).isdisjoint((second // page_size).tolist())
    assert pages.min() >= 1
