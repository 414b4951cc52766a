# SPDX-License-Identifier: Apache-2.0
"""Public progressive attention: validate, then dispatch to the implementation asked for."""

from typing import Literal

import torch

from ..common import (
    IMPLS,
    Impl,
    check_choice,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
    group_size,
)
from ..plan import DecodePlan
from .reference import (
    progressive_decode_attention_reference,
    rank_units_reference,
    remaining_bounds_reference,
)
from .types import COUNTERS, MICROBATCHES, ProgressiveWorkspace, num_items

Share = Literal["min", "mean"]
SHARES = ("min", "mean")


def _check_microbatch(microbatch: int, unit: int) -> None:
    if microbatch not in MICROBATCHES or microbatch % unit:
        raise ValueError(
            f"microbatch={microbatch} must be one of {MICROBATCHES}, in whole units of {unit}"
        )


def rank_units(
    scores: torch.Tensor,
    plan: DecodePlan,
    picked: torch.Tensor,
    *,
    unit: int,
    sink: int,
    recent: int,
    out_indices: torch.Tensor,
    out_counts: torch.Tensor,
    impl: Impl,
) -> None:
    """Put selected units in the order in which they are attended to (PSA section 3.2, line 6).

    Units that are always selected come first, ascending; the others follow by score, and of equal
    scores the lower index first. A NaN score counts as -inf, +inf as the largest finite
    number. Rows with reselect 0 keep their lists.

    Args:
        scores: float32 [R, H, max_units] ("torch" also float64), contiguous, as ``select_topk``
            read them.
        plan: R rows; tail_start, k_units, reselect and list_rows are read.
        picked: int32 [R, H, capacity], contiguous: the units that ``select_topk`` listed for row r,
            ascending, with the same arguments.
        unit: tokens a unit.
        sink: leading tokens that are always selected.
        recent: tokens at the domain's end that are always selected.
        out_indices: int32 [list rows, H, capacity], contiguous; row list_rows[r] is rewritten,
            entries past its count are undefined.
        out_counts: int32 [list rows, H], contiguous.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, _ = scores.shape
    check_shape("scores", scores, (plan.num_rows, -1, -1))
    check_shape("out_indices", out_indices, (-1, heads, -1))
    check_shape("picked", picked, (rows, heads, out_indices.shape[2]))
    check_shape("out_counts", out_counts, (out_indices.shape[0], heads))
    for name, lists in {"picked": picked, "indices": out_indices, "counts": out_counts}.items():
        check_dtype(name, lists, torch.int32)
        check_contiguous(name, lists)
    if unit < 1 or sink < 0 or recent < 0:
        raise ValueError(f"unit={unit}, sink={sink}, recent={recent} are out of range")
    if impl == "torch":
        rank_units_reference(
            scores,
            plan,
            picked,
            unit=unit,
            sink=sink,
            recent=recent,
            out_indices=out_indices,
            out_counts=out_counts,
        )
        return
    check_dtype("scores", scores, torch.float32)
    check_contiguous("scores", scores)
    from .rank_kernel import rank_units_triton

    rank_units_triton(
        scores,
        plan,
        picked,
        unit=unit,
        sink=sink,
        recent=recent,
        out_indices=out_indices,
        out_counts=out_counts,
    )


def remaining_bounds(
    bounds: torch.Tensor,
    scores: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    unit: int,
    sink: int,
    recent: int,
    microbatch: int,
    sm_scale: float,
    logit_cap: float = 0.0,
    lowered: float = 0.0,
    out: torch.Tensor,
    impl: Impl,
) -> None:
    """Bound the attention mass of all units that lie after each look at the share.

    After j microbatches, the mass left is at most the sum of tokens * exp(bound) over the units
    that were not attended to. The result is raised by a part for rounding, so that it is never too
    small; it is -inf where no unit is left. With ``lowered`` it is an estimate instead: bounds of a
    unit exceed what it holds by some nats, and those are taken off.

    Args:
        bounds: float32 [R, H, G, max_units] ("torch" also float64), contiguous: largest q.k that a
            unit may hold, for each query head (:func:`sglang_sparse_kernels.page_bounds`).
        scores: float32 [R, H, max_units], as :func:`rank_units` read them.
        plan: R rows; tail_start, k_units, reselect and list_rows are read. Rows with reselect 0
            stay as they are.
        indices, counts: from :func:`rank_units`.
        unit, sink, recent: as there.
        microbatch: tokens between two looks.
        sm_scale: factor on q.k.
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
        lowered: nats to take off, at least 0.
        out: [R, H, G, looks], contiguous, bounds' dtype: log2 of the bound, in the scale of
            exp(logit); looks >= ceil(capacity * unit / microbatch) + 1.
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a number out of range.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, group, width = bounds.shape
    _check_microbatch(microbatch, unit)
    check_shape("bounds", bounds, (plan.num_rows, -1, -1, -1))
    check_shape("scores", scores, (rows, heads, width))
    check_shape("indices", indices, (-1, heads, -1))
    check_shape("counts", counts, (indices.shape[0], heads))
    check_shape("out", out, (rows, heads, group, -1))
    if lowered < 0:
        raise ValueError(f"lowered={lowered} must be at least 0")
    looks = -(-indices.shape[2] * unit // microbatch) + 1
    if out.shape[3] < looks:
        raise ValueError(f"out holds {out.shape[3]} looks, these lists take {looks}")
    if impl == "torch":
        remaining_bounds_reference(
            bounds,
            plan,
            indices,
            counts,
            unit=unit,
            sink=sink,
            recent=recent,
            microbatch=microbatch,
            sm_scale=sm_scale,
            logit_cap=logit_cap,
            lowered=lowered,
            out=out,
        )
        return
    tensors = {"bounds": bounds, "scores": scores, "indices": indices, "counts": counts, "out": out}
    for name, tensor in tensors.items():
        check_contiguous(name, tensor)
    from .rank_kernel import remaining_bounds_triton

    remaining_bounds_triton(
        bounds,
        scores,
        plan,
        indices,
        counts,
        unit=unit,
        sink=sink,
        recent=recent,
        microbatch=microbatch,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        lowered=lowered,
        out=out,
    )


def progressive_decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    ranked: torch.Tensor,
    reached: torch.Tensor,
    *,
    unit: int,
    page_size: int,
    sink: int,
    recent: int,
    microbatch: int,
    epsilons: torch.Tensor,
    share: Share,
    rest_bounds: torch.Tensor | None = None,
    sm_scale: float,
    logit_cap: float = 0.0,
    out: torch.Tensor,
    counters: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
    expected_rows: torch.Tensor | None = None,
    workspace: ProgressiveWorkspace | None = None,
    impl: Impl,
) -> None:
    """Softmax attention over ranked units until their share is reached (PSA, algorithm 1).

    Row r, KV head h attends to the tail [tail_start, seq_len), to the units that are always
    selected, and then to the others of its list in their order, a microbatch at a time. Selected
    units that are left over beside whole microbatches, with one unit for the tail, are of the first
    microbatch. After each the share is estimated, for each query head, as A / (A + rest), A being
    the mass reached. ``rest`` is the smallest mass of a unit so far, always selected ones aside
    (they did not come by rank), times the units of the domain that are left; or, with
    ``rest_bounds``, the bound given for this look, which never makes the share too large. The KV
    head stops at the first look at which the group's share is at least its row's epsilon, or at the
    end of its list. At epsilon 1 only the end of the list stops it. Units after the stop have no
    effect on the result. A row with k_units 0 has an empty list; with tail_start 0 it is dense.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows; D is
            64 or 128.
        k_buffer: [slots, H, D] in q's dtype, contiguous.
        v_buffer: the same.
        plan: R rows.
        indices: int32 [list rows, H, capacity], from :func:`rank_units`; distinct units.
        ranked: int32 [list rows, H], how many units each list holds.
        reached: int32 [list rows, H]; row list_rows[r] becomes the number of units attended to, so
            that ``indices`` and ``reached`` are a list as ``gathered_decode_attention`` takes it.
        unit: tokens a unit; divides ``page_size`` and ``microbatch``.
        page_size: tokens a physical page (P).
        sink, recent: as for :func:`rank_units`.
        microbatch: tokens between two looks at the share: 16, 32, 64 or 128.
        epsilons: float32 [R], contiguous: the share that each row is to reach, in (0, 1].
        share: share of a group: "min" or "mean" of its query heads.
        rest_bounds: [R, H, G, looks], from :func:`remaining_bounds` of this step, or None.
        sm_scale: factor on q.k, usually 1 / sqrt(D).
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
        out: [R, H * G, D], q's dtype, contiguous; every entry is written.
        counters: int64 [len(COUNTERS)], contiguous; this step's numbers are added. None for none.
        expected: int32 [request slots, H], contiguous: microbatches that each KV head took in its
            last step, any numbers at first; rewritten. What is expected decides the time that
            "triton" takes, nothing else; "torch" does without.
        expected_rows: int32 [R], the row of ``expected`` of each row.
        workspace: at least R rows. Needed by "triton".
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or ``share``, a wrong dtype or shape, a number out of
            range, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    check_choice("share", share, SHARES)
    _check_microbatch(microbatch, unit)
    rows, heads, dim = plan.num_rows, k_buffer.shape[1], q.shape[2]
    check_shape("q", q, (rows, -1, dim))
    check_shape("k_buffer", k_buffer, (-1, heads, dim))
    check_shape("v_buffer", v_buffer, tuple(k_buffer.shape))
    check_shape("out", out, tuple(q.shape))
    check_shape("indices", indices, (-1, heads, -1))
    for name, counts in {"ranked": ranked, "reached": reached}.items():
        check_shape(name, counts, (indices.shape[0], heads))
        check_dtype(name, counts, torch.int32)
    if page_size % unit:
        raise ValueError(f"unit={unit} must divide page_size={page_size}")
    group = group_size(q.shape[1], heads)
    items = num_items(indices.shape[2], unit, microbatch)
    check_shape("epsilons", epsilons, (rows,))
    check_dtype("epsilons", epsilons, torch.float32)
    if rest_bounds is not None:
        check_shape("rest_bounds", rest_bounds, (rows, heads, group, -1))
    if counters is not None:
        check_shape("counters", counters, (len(COUNTERS),))
        check_dtype("counters", counters, torch.int64)
    if impl == "torch":
        progressive_decode_attention_reference(
            q,
            k_buffer,
            v_buffer,
            plan,
            indices,
            ranked,
            reached,
            unit=unit,
            page_size=page_size,
            sink=sink,
            recent=recent,
            microbatch=microbatch,
            epsilons=epsilons,
            share=share,
            rest_bounds=rest_bounds,
            sm_scale=sm_scale,
            logit_cap=logit_cap,
            out=out,
            counters=counters,
        )
        return
    check_dtype("q", q, torch.bfloat16, torch.float16)
    for name, tensor in {"k_buffer": k_buffer, "v_buffer": v_buffer, "out": out}.items():
        check_dtype(name, tensor, q.dtype)
        check_contiguous(name, tensor)
    check_dense_rows("q", q)
    lists = {"indices": indices, "ranked": ranked, "reached": reached, "epsilons": epsilons}
    for name, tensor in lists.items():
        check_contiguous(name, tensor)
    if rest_bounds is not None:
        check_dtype("rest_bounds", rest_bounds, torch.float32)
        check_contiguous("rest_bounds", rest_bounds)
    if dim not in (64, 128) or group > 16:
        raise ValueError(f"head_dim={dim} must be 64 or 128, and {group} query heads at most 16")
    if workspace is None or expected is None or expected_rows is None:
        raise ValueError("impl='triton' needs a workspace and what is expected of each row")
    check_shape("expected", expected, (-1, heads))
    check_shape("expected_rows", expected_rows, (rows,))
    for name, words in {"expected": expected, "expected_rows": expected_rows}.items():
        check_dtype(name, words, torch.int32)
        check_contiguous(name, words)
    workspace = workspace.rows(rows)
    held = workspace.partial.shape[2]
    check_shape("workspace.partial", workspace.partial, (rows, heads, held, group, dim))
    for name, looks in {"lse": workspace.lse, "least": workspace.least}.items():
        check_shape(f"workspace.{name}", looks, (rows, heads, group, held))
    if held < items:
        raise ValueError(f"workspace holds {held} items, needed are {items}")
    from .kernel import progressive_decode_attention_triton

    progressive_decode_attention_triton(
        q,
        k_buffer,
        v_buffer,
        plan,
        indices,
        ranked,
        reached,
        unit=unit,
        page_size=page_size,
        sink=sink,
        recent=recent,
        microbatch=microbatch,
        epsilons=epsilons,
        share=share,
        rest_bounds=rest_bounds,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        out=out,
        counters=counters,
        expected=expected,
        expected_rows=expected_rows,
        workspace=workspace,
    )
