# SPDX-License-Identifier: Apache-2.0
"""Score `page_minmax`: an upper bound of q·k over a logical page (Quest, arXiv 2406.10774)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sglang_sparse.choices.choice import PageSize
from sglang_sparse.choices.score._pages import PageScoreChoice

if TYPE_CHECKING:
    from sglang_sparse_radix.planes import CuboidPlane


class PageMinMax(PageScoreChoice):
    """Upper bound of q·k over a logical page, from its channel-wise key min and max (Quest)."""

    kind: Literal["page_minmax"] = "page_minmax"
    logical_page: PageSize = Field(
        default=16, description="Tokens that share one min/max pair and are selected together."
    )

    def cuboids(self, *, bound: bool) -> CuboidPlane:
        from sglang_sparse_radix.planes import PageBounds

        return PageBounds(self.logical_page)
