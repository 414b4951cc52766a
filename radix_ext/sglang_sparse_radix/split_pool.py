# SPDX-License-Identifier: Apache-2.0
"""A KV pool of two groups of heads: one holds every token, the other sinks and windows.

Seams (`sglang/srt/mem_cache/`): `swa_memory_pool.py: SWAKVPool`, of which this is a
subclass so that SGLang takes it for a pool with windows (`managers/schedule_policy.py` budgets
both, `models/utils.py: enable_fused_set_kv_buffer` keeps RoPE from writing past it);
`allocator/swa.py: SWATokenToKVPoolAllocator`, which maps each slot of the one to a slot of the
other.

SGLang splits such a pool by layer. Here every layer has a part of its KV heads in each pool.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_sparse_radix.allocator import TorchPagedTokenToKVPoolAllocator
from sglang_sparse_radix.pool import SparseMHATokenToKVPool
from sglang_sparse_radix.verify import PlaneMismatch

_GIB = 1 << 30


@dataclass(frozen=True)
class SplitShape:
    """Sizes of a split pool.

    Attributes:
        tokens: tokens that heads of the first group hold.
        window_tokens: tokens that streaming heads hold.
        heads: KV heads of the first group, in each layer.
        window_heads: streaming heads, in each layer.
        sink: first tokens of a request that streaming heads hold.
        local: last ones.
    """

    tokens: int
    window_tokens: int
    heads: int
    window_heads: int
    sink: int
    local: int


class SplitHeadKVPool(SWAKVPool):
    """Two pools with all layers in each: retrieval heads with planes, and streaming heads.

    Attributes:
        full_kv_pool: K, V and planes of the heads that hold every token.
        swa_kv_pool: K and V of streaming heads, by slots of their own.
        shape: the sizes of both.
    """

    full_kv_pool: SparseMHATokenToKVPool
    swa_kv_pool: MHATokenToKVPool

    def __init__(
        self, pool_class: type[SparseMHATokenToKVPool], shape: SplitShape, **build: Any
    ) -> None:
        """Make both pools.

        Args:
            pool_class: of the heads that hold every token.
            shape: sizes.
            build: what both take: `page_size`, `dtype`, `head_dim`, `layer_num`, `device`,
                `enable_memory_saver`, `start_layer`, `end_layer`.
        """
        # Not SWAKVPool's own: that gives whole layers to each pool.
        self.shape = shape
        self.full_kv_pool = pool_class(size=shape.tokens, head_num=shape.heads, **build)
        self.swa_kv_pool = MHATokenToKVPool(
            size=shape.window_tokens, head_num=shape.window_heads, **build
        )
        self.size, self.size_swa = shape.tokens, shape.window_tokens
        self.dtype, self.device = build["dtype"], build["device"]
        self.page_size, self.layer_num = build["page_size"], build["layer_num"]
        self.full_layer_nums = self.swa_layer_nums = self.layer_num
        self.start_layer, self.end_layer = (
            self.full_kv_pool.start_layer,
            self.full_kv_pool.end_layer,
        )
        self.head_num = shape.heads + shape.window_heads
        self.head_dim = build["head_dim"]
        self.layer_transfer_counter = None
        self.full_to_swa_index_mapping = None
        self.mem_usage = sum(self.get_kv_size_bytes()) / _GIB

    def window_pages(self, page_table: torch.Tensor) -> torch.Tensor:
        """Pages of the streaming heads, int32 of any shape, of pages of the other heads.

        A page that these no longer hold is 0, SGLang's padding page.
        """
        assert self.full_to_swa_index_mapping is not None
        # The last entry maps -1 to -1.
        pages = self.full_to_swa_index_mapping[: -1 : self.page_size] // self.page_size
        return pages.to(torch.int32)[page_table.long()]

    def verify_planes(self, pages: torch.Tensor) -> list[PlaneMismatch]:
        """See `SparseMHATokenToKVPool.verify_planes`."""
        return self.full_kv_pool.verify_planes(pages)

    def _no_single_buffer(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a layer's heads lie in two pools (retention.kind streaming_window): read full_kv_pool "
            "and swa_kv_pool"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _no_single_buffer
    move_kv_cache = get_cpu_copy = load_cpu_copy = _no_single_buffer
    get_contiguous_buf_infos = get_state_buf_infos = finalize_backing = _no_single_buffer


def make_allocator(pool: SplitHeadKVPool, *, need_sort: bool) -> SWATokenToKVPoolAllocator:
    """SGLang's allocator of both pools; in plain PyTorch where there is no Triton."""
    allocator = SWATokenToKVPoolAllocator(
        pool.size,
        pool.size_swa,
        page_size=pool.page_size,
        dtype=pool.dtype,
        device=pool.device,
        kvcache=pool,
        need_sort=need_sort,
    )
    if pool.device == "cpu":
        for name, part in (("full", pool.full_kv_pool), ("swa", pool.swa_kv_pool)):
            paged = TorchPagedTokenToKVPoolAllocator(
                part.size, pool.page_size, pool.dtype, pool.device, part, need_sort
            )
            setattr(allocator, f"{name}_attn_allocator", paged)
        allocator.clear()
    return allocator
