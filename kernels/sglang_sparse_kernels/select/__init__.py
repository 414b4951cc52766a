# SPDX-License-Identifier: Apache-2.0
"""Selection of the units a decode step attends to."""

from .api import select_topk
from .types import (
    BLOCK_UNITS,
    TopkWorkspace,
    make_topk_workspace,
    padded_blocks,
    topk_workspace_bytes,
)

__all__ = [
    "BLOCK_UNITS",
    "TopkWorkspace",
    "make_topk_workspace",
    "padded_blocks",
    "select_topk",
    "topk_workspace_bytes",
]
