# SPDX-License-Identifier: Apache-2.0
"""Public selection: validate, then dispatch to the implementation asked for."""

import torch

from ..common import IMPLS, Impl, check_choice, check_contiguous, check_dtype, check_shape
from ..plan import DecodePlan
from .reference import select_topk_reference
from .types import TopkWorkspace, padded_blocks


def select_topk(
    scores: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    sink: int,
    recent: int,
    out_indices: torch.Tensor,
    out_counts: torch.Tensor,
    workspace: TopkWorkspace | None = None,
    has_block_max: bool = False,
    impl: Impl,
) -> None:
    """Exact top-k units per row and KV head, sinks and recents always among them.

    The domain of a row is its first ``ceil(tail_start / unit)`` units. Units that start before
    ``sink`` tokens, and units from ``max(0, tail_start - recent) // unit`` on, rank first; the
    rest by score, and of equal scores the lower index wins. The list holds logical unit indices,
    ascending. A NaN score counts as -inf, +inf as the largest finite number. Rows with reselect 0
    keep their lists; a row with reselect != 0 and k_units 0 gets a count of 0.

    Args:
        scores: float32 [R, H, max_units] ("torch" also float64), contiguous; entries past the
            domain are never used.
        plan: R rows; tail_start, k_units, reselect and list_rows are read.
        unit: tokens a unit.
        sink: leading tokens that are always selected.
        recent: tokens at the domain's end that are always selected.
        out_indices: int32 [list rows, H, capacity], contiguous; row list_rows[r] is rewritten,
            entries past its count are undefined.
        out_counts: int32 [list rows, H], contiguous.
        workspace: at least R rows, from :func:`make_topk_workspace`. Needed by "triton".
        has_block_max: ``workspace.block_max`` already holds this step's block maxima and
            ``scores`` hold neither NaN nor +inf: a score kernel of this package wrote both.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, width = scores.shape
    check_shape("scores", scores, (plan.num_rows, -1, -1))
    check_shape("out_indices", out_indices, (-1, heads, -1))
    check_shape("out_counts", out_counts, (out_indices.shape[0], heads))
    check_dtype("out_indices", out_indices, torch.int32)
    check_dtype("out_counts", out_counts, torch.int32)
    if unit < 1 or sink < 0 or recent < 0:
        raise ValueError(f"unit={unit}, sink={sink}, recent={recent} are out of range")
    if impl == "torch":
        select_topk_reference(
            scores,
            plan,
            unit=unit,
            sink=sink,
            recent=recent,
            out_indices=out_indices,
            out_counts=out_counts,
        )
        return
    check_dtype("scores", scores, torch.float32)
    check_contiguous("scores", scores)
    check_contiguous("out_indices", out_indices)
    check_contiguous("out_counts", out_counts)
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    blocks = padded_blocks(width)
    workspace = workspace.rows(rows)
    check_shape("workspace.block_max", workspace.block_max, (rows, heads, blocks))
    check_shape(
        "workspace.blocks", workspace.blocks, (rows, heads, min(blocks, out_indices.shape[2]))
    )
    from .kernel import select_topk_triton

    select_topk_triton(
        scores,
        plan,
        unit=unit,
        sink=sink,
        recent=recent,
        out_indices=out_indices,
        out_counts=out_counts,
        workspace=workspace,
        has_block_max=has_block_max,
    )
