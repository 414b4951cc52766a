# SPDX-License-Identifier: Apache-2.0
"""The tree of SGLang 0.5.17 where streaming heads hold sinks and windows only.

Seams beside those of :mod:`sglang_sparse.compat.windows`: (``mem_cache/unified_radix_cache.py:
UnifiedRadixCache``) ``dec_swa_lock_only``; (``mem_cache/common.py:
free_swa_out_of_window_slots``) ``Req.swa_evict_floor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sparse.compat.windows import WindowRadixCache as SharedTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class WindowRadixCache(SharedTree):
    """SGLang's tree of two pools, with sinks."""

    @staticmethod
    def floor_record(req: Req) -> Any:
        """The request itself."""
        return req

    @staticmethod
    def prompt_end(req: Req) -> int:
        """See `WindowRadixCache`."""
        return int(req.extend_range.end)

    @property
    def dec_swa_lock_only(self) -> Any:
        """Not there: SGLang asks for it to release a window early, and would release the sinks."""
        raise AttributeError("dec_swa_lock_only")
