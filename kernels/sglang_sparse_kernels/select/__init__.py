# SPDX-License-Identifier: Apache-2.0
"""Selection of the units a decode step attends to."""

from .api import find_block_max, select_topk
from .types import TopkWorkspace, make_topk_workspace

__all__ = [
    "TopkWorkspace",
    "find_block_max",
    "make_topk_workspace",
    "select_topk",
]
