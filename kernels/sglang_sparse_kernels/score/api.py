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
from ..planes import SKETCH_DTYPES, has_scale, tokens_per_element
from ..select import padded_blocks
from .reference import (
    page_bounds_reference,
    page_minmax_score_reference,
    select_channels_reference,
    sketch_score_reference,
)

_PAGE_SIZES = (16, 32, 64)


def _check_block_max(block_max: torch.Tensor | None, scores: torch.Tensor) -> None:
    if block_max is not None:
        rows, heads, width = scores.shape
        check_shape("block_max", block_max, (rows, heads, padded_blocks(width)))
        check_dtype("block_max", block_max, torch.float32)
        check_contiguous("block_max", block_max)


def select_channels(
    q: torch.Tensor,
    channels: torch.Tensor,
    list_rows: torch.Tensor,
    refresh: torch.Tensor,
    k_units: torch.Tensor,
    *,
    impl: Impl,
) -> None:
    """Choose the channels that matter to the query (SparCas section 3.4, stage 1).

    Per KV head, the D_b channels with the largest sum of \\|q\\| over the head's query group; of
    equal channels the lower index wins. Rows with refresh 0 or k_units 0 are left as they are.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows.
        channels: int32 [list rows, H, D_b], contiguous; row list_rows[r] is rewritten, ascending.
        list_rows: int32 [R].
        refresh: int32 [R].
        k_units: int32 [R].
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, or D_b > D.
    """
    check_choice("impl", impl, IMPLS)
    check_shape("q", q, (list_rows.shape[0], -1, -1))
    check_shape("channels", channels, (-1, -1, -1))
    check_dtype("channels", channels, torch.int32)
    check_contiguous("channels", channels)
    group_size(q.shape[1], channels.shape[1])
    if channels.shape[2] > q.shape[2]:
        raise ValueError(f"{channels.shape[2]} channels of a head dimension of {q.shape[2]}")
    if impl == "torch":
        select_channels_reference(q, channels, list_rows, refresh, k_units)
        return
    check_dense_rows("q", q)
    from .kernel import select_channels_triton

    select_channels_triton(q, channels, list_rows, refresh, k_units)


def sketch_score(
    q: torch.Tensor,
    channels: torch.Tensor,
    key_sketch: torch.Tensor,
    key_sketch_scale: torch.Tensor | None,
    plan: DecodePlan,
    *,
    page_size: int,
    reduce: Reduce,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
    choose_channels: bool = False,
    impl: Impl,
) -> None:
    """Partial score of every token of the domain (SparCas section 3.4, stage 2, equation 4).

    score(h, t) = max or sum over the group's query heads of sum over the head's D_b channels of
    q_d * k_sketch_d(t). Written for positions [0, tail_start) of rows with reselect != 0 and
    k_units > 0; every other entry of ``out`` stays untouched.
    A NaN score is written as -inf, +inf as the largest finite number. Sums of fp8 stay in range for
    queries below 1e37.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows.
        channels: int32 [list rows, H, D_b], from :func:`select_channels`, or written here.
        key_sketch: [runs, H, D, tokens a run] float8_e4m3fn, int8 or bfloat16, or half as many
            uint8 for 4-bit integers (:class:`PlaneBuffers`), one layer.
        key_sketch_scale: float16 [pages, H, P] for integers, else None.
        plan: R rows; page_table, tail_start, k_units, reselect, refresh and list_rows are read.
        page_size: tokens a physical page (P): 16, 32 or 64.
        reduce: "max" or "sum" over the group.
        out: float32 [R, H, max_units], max_units >= tail_start.
        block_max: float32 [R, H, padded_blocks(max_units)], optional; "triton" writes the largest
            score of every 8 units into it, for :func:`select_topk`; "torch" ignores it.
        choose_channels: first do what :func:`select_channels` does, in the same launch.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``reduce``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("reduce", reduce, REDUCES)
    rows, heads = plan.num_rows, key_sketch.shape[1]
    check_shape("q", q, (rows, -1, -1))
    group_size(q.shape[1], heads)
    check_shape("key_sketch", key_sketch, (-1, heads, q.shape[2], -1))
    check_dtype("key_sketch", key_sketch, *SKETCH_DTYPES.values(), torch.float64)
    check_contiguous("key_sketch", key_sketch)
    run = key_sketch.shape[3] * tokens_per_element(key_sketch.dtype)
    if page_size not in _PAGE_SIZES or run % page_size:
        raise ValueError(f"page_size={page_size} is not one of {_PAGE_SIZES} that divide {run}")
    if has_scale(key_sketch.dtype) != (key_sketch_scale is not None):
        raise ValueError("key_sketch_scale goes with a key_sketch of integers, and only with it")
    check_shape("channels", channels, (-1, heads, -1))
    check_shape("out", out, (rows, heads, -1))
    if impl == "torch":
        if choose_channels:
            select_channels_reference(q, channels, plan.list_rows, plan.refresh, plan.k_units)
        sketch_score_reference(
            q,
            channels,
            key_sketch,
            key_sketch_scale,
            plan,
            page_size=page_size,
            reduce=reduce,
            out=out,
        )
        return
    check_dtype("out", out, torch.float32)
    check_dense_rows("q", q)
    check_contiguous("out", out)
    _check_block_max(block_max, out)
    from .kernel import sketch_score_triton

    sketch_score_triton(
        q,
        channels,
        key_sketch,
        key_sketch_scale,
        plan,
        page_size=page_size,
        reduce=reduce,
        out=out,
        block_max=block_max,
        choose_channels=choose_channels,
    )


def page_bounds(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    page_size: int,
    out: torch.Tensor,
    impl: Impl,
) -> None:
    """Upper bound of q.k over the keys of every logical page, for each query head.

    As :func:`page_minmax_score`, whose arguments these are, but the heads of a group stay apart:
    ``out`` is float32 [R, H, G, max_units] ("torch" also float64), contiguous.

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads = plan.num_rows, page_min.shape[1]
    check_shape("q", q, (rows, -1, -1))
    group = group_size(q.shape[1], heads)
    check_shape("page_min", page_min, (-1, heads, q.shape[2]))
    check_shape("page_max", page_max, tuple(page_min.shape))
    check_shape("out", out, (rows, heads, group, -1))
    for name, tensor in {"page_min": page_min, "page_max": page_max, "out": out}.items():
        check_contiguous(name, tensor)
    if page_size not in _PAGE_SIZES or page_size % unit:
        raise ValueError(f"unit={unit} must divide page_size={page_size}, one of {_PAGE_SIZES}")
    if impl == "torch":
        page_bounds_reference(q, page_min, page_max, plan, unit=unit, page_size=page_size, out=out)
        return
    check_dtype("out", out, torch.float32)
    check_dense_rows("q", q)
    from .page_kernel import page_minmax_score_triton

    page_minmax_score_triton(
        q,
        page_min,
        page_max,
        plan,
        unit=unit,
        page_size=page_size,
        reduce=None,
        out=out,
        block_max=None,
    )


def page_minmax_score(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    plan: DecodePlan,
    *,
    unit: int,
    page_size: int,
    reduce: Reduce,
    out: torch.Tensor,
    block_max: torch.Tensor | None = None,
    impl: Impl,
) -> None:
    """Largest q.k over a cuboid of every logical page, per KV head.

    The bounding cuboid of the page's keys gives Quest's criticality, an upper bound of q.k; the
    smaller cuboid of :func:`sglang_sparse_kernels.cuboid_mean` gives ArkVale's estimate of it, by
    the same formula (PSA section 3.1).

    score(h, j) = max or sum over the group's query heads of sum over d of
    max(q_d * min_d(j), q_d * max_d(j)). Written for logical pages [0, ceil(tail_start / unit)) of
    rows with reselect != 0 and k_units > 0; every other entry of ``out`` stays untouched.
    A NaN score is written as -inf, +inf as the largest finite number.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows.
        page_min: [pages * P / unit, H, D], one layer, contiguous: the cuboid's lower end.
        page_max: the same: its upper end.
        plan: R rows; page_table, tail_start, k_units and reselect are read.
        unit: tokens a logical page.
        page_size: tokens a physical page (P): 16, 32 or 64.
        reduce: "max" or "sum" over the group.
        out: float32 [R, H, max_units], max_units >= ceil(tail_start / unit).
        block_max: float32 [R, H, padded_blocks(max_units)], optional; "triton" writes the largest
            score of every 8 units into it, for :func:`select_topk`; "torch" ignores it.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``reduce``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("reduce", reduce, REDUCES)
    rows, heads = plan.num_rows, page_min.shape[1]
    check_shape("q", q, (rows, -1, -1))
    group_size(q.shape[1], heads)
    check_shape("page_min", page_min, (-1, heads, q.shape[2]))
    check_shape("page_max", page_max, tuple(page_min.shape))
    check_contiguous("page_min", page_min)
    check_contiguous("page_max", page_max)
    if page_size not in _PAGE_SIZES or page_size % unit:
        raise ValueError(f"unit={unit} must divide page_size={page_size}, one of {_PAGE_SIZES}")
    check_shape("out", out, (rows, heads, -1))
    if impl == "torch":
        page_minmax_score_reference(
            q, page_min, page_max, plan, unit=unit, page_size=page_size, reduce=reduce, out=out
        )
        return
    check_dtype("out", out, torch.float32)
    check_dense_rows("q", q)
    check_contiguous("out", out)
    _check_block_max(block_max, out)
    from .page_kernel import page_minmax_score_triton

    page_minmax_score_triton(
        q,
        page_min,
        page_max,
        plan,
        unit=unit,
        page_size=page_size,
        reduce=reduce,
        out=out,
        block_max=block_max,
    )
