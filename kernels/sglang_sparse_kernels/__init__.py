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
    cuboid_mean,
    dequantize_sketch,
    quantize_sketch,
    update_planes,
)
from .progressive import (
    COUNTERS,
    MAX_RANKED_UNITS,
    MICROBATCHES,
    ProgressiveWorkspace,
    make_progressive_workspace,
    num_items,
    progressive_decode_attention,
    progressive_row_bytes,
    rank_units,
    remaining_bounds,
)
from .score import page_bounds, page_minmax_score, select_channels, sketch_score
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
    "COUNTERS",
    "COUNTS",
    "DENSE_REQUEST",
    "MAX_RANKED_UNITS",
    "MICROBATCHES",
    "SKETCH_DTYPES",
    "DecodePlan",
    "ExactWorkspace",
    "PlaneBuffers",
    "ProgressiveWorkspace",
    "SketchFormat",
    "TilePlan",
    "TopkWorkspace",
    "budget_row",
    "count_decode",
    "cuboid_mean",
    "dequantize_sketch",
    "exact_score",
    "gathered_decode_attention",
    "make_exact_workspace",
    "make_progressive_workspace",
    "make_topk_workspace",
    "make_workspace",
    "num_items",
    "padded_blocks",
    "page_bounds",
    "page_minmax_score",
    "plan_decode",
    "plan_tiles",
    "progressive_decode_attention",
    "progressive_row_bytes",
    "quantize_sketch",
    "rank_units",
    "remaining_bounds",
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
