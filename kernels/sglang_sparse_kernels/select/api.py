# SPDX-License-Identifier: Apache-2.0
"""Public selection: validate, then dispatch to the implementation asked for."""

from ..common import IMPLS, Impl, check_choice, check_shape
from ..plan import DecodePlan
from ..records import Always, Lists, Scores
from .cpu import select_topk_cpu
from .reference import find_block_max_reference, select_topk_reference
from .types import TopkWorkspace


def find_block_max(scores: Scores, plan: DecodePlan, *, unit: int, impl: Impl) -> None:
    """Prepare scores that no operator of this package wrote for :func:`select_topk`.

    In each row's domain NaN becomes -inf, +inf becomes the largest float, and block maxima are
    written.

    Args:
        scores: R rows; changed in place.
        plan: R rows; tail_start, k_units and reselect are read.
        unit: tokens a unit.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    scores.check(plan.num_rows, -1)
    if impl != "triton":
        find_block_max_reference(scores, plan, unit=unit)
        return
    scores.check_triton()
    from .kernel import find_block_max_triton

    find_block_max_triton(scores, plan, unit=unit)


def select_topk(
    scores: Scores,
    plan: DecodePlan,
    lists: Lists,
    *,
    always: Always,
    workspace: TopkWorkspace | None = None,
    impl: Impl,
) -> None:
    """Exact top-k units per row and KV head; sinks and recent units are always among them.

    The domain of a row is its first ``ceil(tail_start / unit)`` units. Units that start before
    ``sink`` tokens, and units from ``max(0, tail_start - recent) // unit`` on, rank first. The
    others rank by score; of two equal scores the lower index wins. The list holds logical unit
    indices, ascending. Rows with reselect 0 keep their lists, and so does every list that is not
    read. A row with reselect != 0 and k_units 0 gets a count of 0.

    Args:
        scores: R rows, as a score operator or :func:`find_block_max` left them; entries past the
            domain are never used.
        plan: R rows; tail_start, k_units and reselect are read.
        lists: the lists of the batch's rows are rewritten. A ``head_map`` is not used.
        always: tokens that are selected whatever their scores.
        workspace: at least R rows, from :func:`make_topk_workspace`. Needed by "triton".
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, _ = scores.values.shape
    scores.check(plan.num_rows, lists.indices.shape[1])
    lists.check_written(rows)
    if impl == "torch":
        select_topk_reference(scores, plan, lists, always=always)
        return
    if impl == "cpu":
        select_topk_cpu(scores, plan, lists, always=always)
        return
    scores.check_triton()
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    workspace = workspace.rows(rows)
    blocks = min(scores.block_max.shape[2], lists.capacity)
    check_shape("workspace.blocks", workspace.blocks, (rows, heads, blocks))
    from .kernel import select_topk_triton

    select_topk_triton(scores, plan, lists, always=always, workspace=workspace)
