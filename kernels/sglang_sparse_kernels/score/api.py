# SPDX-License-Identifier: Apache-2.0
"""Public scoring functions: validate, then dispatch to the implementation asked for."""

import torch

from ..common import (
    IMPLS,
    REDUCES,
    Impl,
    Reduce,
    check_choice,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
    group_size,
)
from ..plan import DecodePlan
from ..planes import KeySketch, PageCuboids
from ..records import Scores
from .cpu import page_bounds_cpu, page_minmax_score_cpu, select_channels_cpu, sketch_score_cpu
from .reference import (
    page_bounds_reference,
    page_minmax_score_reference,
    select_channels_reference,
    sketch_score_reference,
)

MOST_JOINED = 4
"""Logical pages that a unit of selection may have."""


def select_channels(
    q: torch.Tensor, channels: torch.Tensor, plan: DecodePlan, *, impl: Impl
) -> None:
    """Choose the channels that matter to the query (SparCas section 3.4, stage 1).

    Each KV head gets the D_b channels whose sum of \\|q\\| over its group of query heads is
    largest. Of two equal channels the lower index wins. Rows with refresh 0 or k_units 0 keep what
    they have.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows.
        channels: int32 [request slots, H, D_b], contiguous; row request_slots[r] is rewritten,
            ascending.
        plan: R rows; request_slots, refresh and k_units are read.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, or D_b > D.
    """
    check_choice("impl", impl, IMPLS)
    check_shape("q", q, (plan.num_rows, -1, -1))
    check_shape("channels", channels, (-1, -1, -1))
    check_dtype("channels", channels, torch.int32)
    check_contiguous("channels", channels)
    group_size(q.shape[1], channels.shape[1])
    if channels.shape[2] > q.shape[2]:
        raise ValueError(f"{channels.shape[2]} channels of a head dimension of {q.shape[2]}")
    if impl != "triton":
        choose = select_channels_reference if impl == "torch" else select_channels_cpu
        choose(q, channels, plan)
        return
    check_dense_rows("q", q)
    from .channel_kernel import select_channels_triton

    select_channels_triton(q, channels, plan)


def sketch_score(
    q: torch.Tensor,
    channels: torch.Tensor,
    sketch: KeySketch,
    plan: DecodePlan,
    *,
    reduce: Reduce,
    out: Scores,
    choose_channels: bool = False,
    impl: Impl,
) -> None:
    """Partial score of every token of the domain (SparCas section 3.4, stage 2, equation 4).

    The score of token t for a query head is the sum of q_d * k_sketch_d(t) over the D_b channels of
    its KV head. ``reduce`` makes one score of those of a group.

    Scores are written for positions [0, tail_start), in rows with reselect != 0 and k_units > 0,
    and in lists that are read. All other entries of ``out`` stay as they are. NaN is written as
    -inf, and +inf as the largest finite number. Sums of fp8 stay in range for queries below 1e37.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows.
        channels: int32 [request slots, H, D_b], from :func:`select_channels`. With
            ``choose_channels`` they are written here.
        sketch: one layer's.
        plan: R rows; page_table, tail_start, k_units, reselect, refresh and request_slots are read.
        reduce: "max" or "sum" over the group.
        out: R rows of H lists, at least tail_start units.
        choose_channels: whether to select the channels first, in the same launch.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``reduce``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("reduce", reduce, REDUCES)
    heads = sketch.values.shape[1]
    check_shape("q", q, (plan.num_rows, -1, -1))
    group_size(q.shape[1], heads)
    sketch.check(q.shape[2])
    check_shape("channels", channels, (-1, heads, -1))
    out.check(plan.num_rows, heads)
    if impl != "triton":
        choose, score = select_channels_cpu, sketch_score_cpu
        if impl == "torch":
            choose, score = select_channels_reference, sketch_score_reference
        if choose_channels:
            choose(q, channels, plan, out.read)
        score(q, channels, sketch, plan, reduce=reduce, out=out)
        return
    check_dense_rows("q", q)
    out.check_triton()
    from .sketch_kernel import sketch_score_triton

    sketch_score_triton(
        q, channels, sketch, plan, reduce=reduce, out=out, choose_channels=choose_channels
    )


def page_bounds(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int | None = None,
    out: torch.Tensor,
    unread: torch.Tensor | None = None,
    impl: Impl,
) -> None:
    """Upper bound of q.k over the keys of every unit, for each query head.

    This is :func:`page_minmax_score` without ``reduce``: each query head keeps its own score. The
    other arguments are the same, but for ``out`` and ``unread``.

    Args:
        q, pages, plan, unit, impl: as for :func:`page_minmax_score`.
        out: float32 [R, H, G, max_units] ("torch" also float64), contiguous.
        unread: as in :class:`Scores`.

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    heads, unit = pages.low.shape[1], _unit_of(pages, unit)
    check_shape("q", q, (plan.num_rows, -1, -1))
    pages.check(q.shape[2])
    check_shape("out", out, (plan.num_rows, heads, group_size(q.shape[1], heads), -1))
    check_contiguous("out", out)
    if impl != "triton":
        bound = page_bounds_reference if impl == "torch" else page_bounds_cpu
        bound(q, pages, plan, unit=unit, out=out, unread=unread)
        return
    check_dtype("out", out, torch.float32)
    check_dense_rows("q", q)
    from .page_kernel import page_minmax_score_triton

    page_minmax_score_triton(
        q, pages, plan, unit=unit, reduce=None, out=out, block_max=None, unread=unread
    )


def _unit_of(pages: PageCuboids, unit: int | None) -> int:
    """``unit``, or the tokens of one logical page; raises ValueError if it is not whole pages."""
    unit = pages.unit if unit is None else unit
    if unit < pages.unit or unit % pages.unit or unit > MOST_JOINED * pages.unit:
        raise ValueError(
            f"unit={unit} must be 1 to {MOST_JOINED} logical pages of {pages.unit} tokens"
        )
    return unit


def page_minmax_score(
    q: torch.Tensor,
    pages: PageCuboids,
    plan: DecodePlan,
    *,
    unit: int | None = None,
    reduce: Reduce,
    out: Scores,
    impl: Impl,
) -> None:
    """Largest q.k over a cuboid of every logical page, per KV head.

    The score of page j for a query head is the sum over d of max(q_d * min_d(j), q_d * max_d(j)).
    ``reduce`` makes one score of those of a group. A unit of several logical pages has the largest
    of their scores (LServe, section 3.5.2).

    With the bounding cuboid of a page's keys the score is Quest's criticality, an upper bound of
    q.k. With the smaller cuboid of :func:`sglang_sparse_kernels.cuboid_mean` it is ArkVale's
    estimate (PSA section 3.1).

    Scores are written for units [0, ceil(tail_start / unit)), in rows with reselect != 0 and
    k_units > 0, and in lists that are read. All other entries of ``out`` stay as they are. NaN is
    written as -inf, and +inf as the largest finite number.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows.
        pages: cuboids of one layer's logical pages.
        plan: R rows; page_table, tail_start, k_units and reselect are read.
        unit: tokens of a unit: 1 to 4 whole logical pages; one page if None.
        reduce: "max" or "sum" over the group.
        out: R rows of H lists, at least ceil(tail_start / unit) units.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``reduce``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("reduce", reduce, REDUCES)
    heads, unit = pages.low.shape[1], _unit_of(pages, unit)
    check_shape("q", q, (plan.num_rows, -1, -1))
    group_size(q.shape[1], heads)
    pages.check(q.shape[2])
    out.check(plan.num_rows, heads)
    if impl != "triton":
        score = page_minmax_score_reference if impl == "torch" else page_minmax_score_cpu
        score(q, pages, plan, unit=unit, reduce=reduce, out=out)
        return
    check_dense_rows("q", q)
    out.check_triton()
    from .page_kernel import page_minmax_score_triton

    page_minmax_score_triton(
        q, pages, plan, unit=unit, reduce=reduce, out=out.values, block_max=out.block_max,
        unread=out.unread,
    )  # fmt: skip
