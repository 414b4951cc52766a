# SPDX-License-Identifier: Apache-2.0
"""Score `page_mean`: an estimate of the largest q·k over a block (ArkVale's digest, PSA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sglang_sparse.choices.choice import PageSize
from sglang_sparse.choices.score._pages import PageScoreChoice

if TYPE_CHECKING:
    from sglang_sparse_radix.planes import CuboidPlane


class PageMean(PageScoreChoice):
    """ArkVale's cuboid-mean estimate of the largest q·k over a block (PSA, section 3.1)."""

    kind: Literal["page_mean"] = "page_mean"
    logical_page: PageSize = Field(
        default=32,
        description="Tokens of a block: they share one digest and are selected together.",
    )

    def cuboids(self, *, bound: bool) -> CuboidPlane:
        from sglang_sparse_radix.planes import PageBounds, PageDigest

        # The digest leaves keys out; the bounds of a page hold all of them.
        return PageBounds(self.logical_page) if bound else PageDigest(self.logical_page)
