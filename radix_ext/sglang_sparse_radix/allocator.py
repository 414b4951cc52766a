# SPDX-License-Identifier: Apache-2.0
"""SGLang's paged KV allocator without Triton, for a machine that has no accelerator.

Seam: `sglang/srt/mem_cache/kv_cache_configurator.py` `_build_token_to_kv_pool_allocator` builds the
class that an out-of-tree platform returns from `get_paged_allocator_cls()`. In sglang 0.5.17
SGLang's own `mem_cache/allocator/paged.py` `PagedTokenToKVPoolAllocator` launches Triton kernels in
`alloc_extend` and `alloc_decode`, which fails on CPU tensors. Only those two are replaced here;
which page goes to which request, freeing, groups and state are SGLang's.
"""

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator


class TorchPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """`PagedTokenToKVPoolAllocator` in plain PyTorch; same constructor, same page order."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for the tokens `[prefix_len, seq_len)` of each request.

        First the free part of a request's last page is used, then new pages in free-list order.

        Args:
            prefix_lens, seq_lens: int64 `[bs]`, tokens before and after this extend.
            prefix_lens_cpu, seq_lens_cpu: the same on the host.
            last_loc: int64 `[bs]`, slot of token `prefix_len - 1`, -1 for an empty prefix.
            extend_num_tokens: sum of `seq_lens - prefix_lens`.
            num_new_pages: pages that the call takes; counted here when None.

        Returns:
            int64 `[extend_num_tokens]`, or None when too few pages are free (nothing is taken
            then).
        """
        page = self.page_size
        held = (prefix_lens + page - 1) // page
        new_pages = (seq_lens + page - 1) // page - held
        first_new = torch.cumsum(new_pages, 0) - new_pages
        needed = int(new_pages.sum()) if num_new_pages is None else num_new_pages
        if not self._have_pages(needed):
            return None

        lens = seq_lens - prefix_lens
        rows = torch.repeat_interleave(
            torch.arange(len(lens), device=lens.device), lens, output_size=extend_num_tokens
        )
        offset = (
            torch.arange(extend_num_tokens, device=lens.device)
            - (torch.cumsum(lens, 0) - lens)[rows]
        )  # token index within its request's extend
        position = prefix_lens[rows] + offset
        nth_new_page = position // page - held[rows]
        in_held_page = nth_new_page < 0
        new_page = self._page_ids(first_new[rows] + nth_new_page, in_held_page)
        out = torch.where(
            in_held_page, last_loc[rows] + 1 + offset, new_page * page + position % page
        ).to(torch.int64)
        self.free_pages = self.free_pages[needed:]
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot for each request: the next slot of its last page, or the first of a new page.

        Args:
            seq_lens: int64 `[bs]`, the new token included.
            seq_lens_cpu: the same on the host.
            last_loc: int `[bs]`, slot of the token before the new one.

        Returns:
            int64 `[bs]`, or None when too few pages are free (nothing is taken then).
        """
        opens_page = (seq_lens - 1) % self.page_size == 0
        nth_new = torch.cumsum(opens_page.to(torch.int64), 0) - 1
        needed = int(opens_page.sum())
        if not self._have_pages(needed):
            return None
        new_page = self._page_ids(nth_new, ~opens_page)
        out = torch.where(opens_page, new_page * self.page_size, last_loc + 1).to(torch.int64)
        self.free_pages = self.free_pages[needed:]
        return out

    def _have_pages(self, needed: int) -> bool:
        if self.need_sort and needed > len(self.free_pages):
            self.merge_and_sort_free()
        return needed <= len(self.free_pages)

    def _page_ids(self, nth: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        """Ids of the `nth` free pages; entries that are `unused` are arbitrary."""
        if len(self.free_pages) == 0:
            return torch.zeros_like(nth)
        return self.free_pages[nth.masked_fill(unused, 0)]
