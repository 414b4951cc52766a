# SPDX-License-Identifier: Apache-2.0
"""A pool of frames on the device for blocks of KV that lie in host memory, replaced by recency."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class FramePool:
    """Which blocks are on the device; the least recently used ones make room (PSA, section 3.4).

    Attributes:
        frames: blocks that fit.
    """

    def __init__(self, frames: int) -> None:
        """An empty pool of ``frames`` blocks."""
        self.frames = frames
        # Least recently used first.
        self._held: OrderedDict[Hashable, None] = OrderedDict()

    def touch(self, blocks: Sequence[Hashable]) -> int:
        """Attend to some blocks at once; those that are missing are loaded.

        A block that is attended to now does not make room for another one. What then finds no
        frame is read from the host and not kept.

        Args:
            blocks: of one layer's step, each once.

        Returns:
            How many of them were there.
        """
        missing = [block for block in blocks if block not in self._held]
        for block in blocks:
            if block in self._held:
                self._held.move_to_end(block)
        in_use = len(blocks) - len(missing)
        for block in missing[: max(0, self.frames - in_use)]:
            if len(self._held) >= self.frames:
                self._held.popitem(last=False)
            self._held[block] = None
        return in_use
