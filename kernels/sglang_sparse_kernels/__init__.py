# SPDX-License-Identifier: Apache-2.0
"""Kernels of sparse decode attention, each beside its plain PyTorch reference.

An operator is a folder: ``reference.py`` defines it, ``kernel.py`` is the Triton implementation,
``api.py`` validates and dispatches on ``impl``, and never falls back to another implementation.
"""

from .attend import gathered_decode_attention, make_workspace, workspace_bytes
from .count import COUNTS, count_decode
from .exact import ExactWorkspace, exact_score, make_exact_workspace
from .plan import DENSE_REQUEST, DecodePlan, budget_row, plan_decode, snapshot_page_table
from .planes import (
    SKETCH_DTYPES,
    PlaneBuffers,
    SketchFormat,
    dequantize_sketch,
    quantize_sketch,
    update_planes,
)
from .score import page_minmax_score, select_channels, sketch_score
from .select import (
    BLOCK_UNITS,
    TopkWorkspace,
    make_topk_workspace,
    padded_blocks,
    select_topk,
    topk_workspace_bytes,
)
from .tiles import TilePlan, plan_tiles, tile_attention, tile_score, tile_tokens_of

__all__ = [
    "BLOCK_UNITS",
    "COUNTS",
    "DENSE_REQUEST",
    "SKETCH_DTYPES",
    "DecodePlan",
    "ExactWorkspace",
    "PlaneBuffers",
    "SketchFormat",
    "TilePlan",
    "TopkWorkspace",
    "budget_row",
    "count_decode",
    "dequantize_sketch",
    "exact_score",
    "gathered_decode_attention",
    "make_exact_workspace",
    "make_topk_workspace",
    "make_workspace",
    "padded_blocks",
    "page_minmax_score",
    "plan_decode",
    "plan_tiles",
    "quantize_sketch",
    "select_channels",
    "select_topk",
    "sketch_score",
    "snapshot_page_table",
    "tile_attention",
    "tile_score",
    "tile_tokens_of",
    "topk_workspace_bytes",
    "update_planes",
    "workspace_bytes",
]
