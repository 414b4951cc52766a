# SPDX-License-Identifier: Apache-2.0
"""What one layer does with selections."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """What one layer does with selections.

    Attributes:
        selects: it scores the context and writes a list.
        source: the layer whose list it attends to; None if it attends to everything.
        heads: for each of its KV heads, the head of `source` whose list it takes; None for its own.
    """

    selects: bool
    source: int | None
    heads: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Name of this role in metrics."""
        if not self.selects:
            return "dense" if self.source is None else "reuse"
        return "dense_select" if self.source is None else "select"
