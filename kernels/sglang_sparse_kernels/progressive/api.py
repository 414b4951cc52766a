# SPDX-License-Identifier: Apache-2.0
"""Public progressive attention: validate, then dispatch to the implementation asked for."""

import torch

from ..common import IMPLS, Impl, check_choice, check_contiguous, check_dtype, check_shape
from ..plan import DecodePlan
from ..records import Always, KVView, Lists, Scores, Softmax
from .reference import (
    progressive_decode_attention_reference,
    rank_units_reference,
    residual_bounds_reference,
)
from .types import (
    COUNTERS,
    MassStop,
    ProgressiveWorkspace,
    ResidualRule,
    StopState,
    check_microbatch,
    num_chunks,
    num_stop_checks,
)


def rank_units(
    scores: Scores,
    plan: DecodePlan,
    selected: torch.Tensor,
    ranking: Lists,
    *,
    always: Always,
    impl: Impl,
) -> None:
    """Put selected units in the order in which they are attended to (PSA section 3.2, line 6).

    Units that are always selected come first, ascending. The others follow by score; of two equal
    scores the lower index comes first. Rows with reselect 0 keep their lists, and so does every
    list that is not read.

    Args:
        scores: R rows, as :func:`sglang_sparse_kernels.select_topk` read them.
        plan: R rows; tail_start, k_units and reselect are read.
        selected: int32 [R, H, capacity], contiguous: the units that ``select_topk`` listed for row
            r, ascending, with the same arguments.
        ranking: lists of the batch's rows are rewritten.
        always: tokens that are selected whatever their scores.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, _ = scores.values.shape
    scores.check(plan.num_rows, ranking.indices.shape[1])
    ranking.check_written(rows)
    check_shape("selected", selected, (rows, heads, ranking.capacity))
    check_dtype("selected", selected, torch.int32)
    check_contiguous("selected", selected)
    if impl != "triton":
        rank_units_reference(scores, plan, selected, ranking, always=always)
        return
    scores.check_triton()
    from .rank_kernel import rank_units_triton

    rank_units_triton(scores, plan, selected, ranking, always=always)


def residual_bounds(
    bounds: torch.Tensor,
    scores: Scores,
    plan: DecodePlan,
    ranking: Lists,
    *,
    always: Always,
    microbatch: int,
    softmax: Softmax,
    margin: float = 0.0,
    out: torch.Tensor,
    impl: Impl,
) -> None:
    """Bound the residual mass at each stop check: the mass of all units not attended to by then.

    After j microbatches it is at most the sum of tokens * exp(bound) over those units. The result
    is raised by a bound of its rounding error, so that it is never too small. It is -inf where no
    unit is left. With a ``margin`` the result is an estimate instead: the bound of a unit is larger
    than what the unit holds, and ``margin`` nats are subtracted from it.

    Args:
        bounds: float32 [R, H, G, max_units] ("torch" also float64), contiguous: largest q.k that a
            unit may hold, for each query head (:func:`sglang_sparse_kernels.page_bounds`).
        scores: R rows, as :func:`rank_units` read them.
        plan: R rows; tail_start, k_units and reselect are read. Rows with reselect 0 keep theirs,
            and so do lists that are not read.
        ranking: from :func:`rank_units`.
        always: as there.
        microbatch: tokens between two stop checks.
        softmax: scale and cap of the logits.
        margin: nats to take off, at least 0.
        out: [R, H, G, checks], contiguous, bounds' dtype: log2 of the bound, in the scale of
            exp(logit); at least ``num_stop_checks`` of them.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a number out of range.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, group, width = bounds.shape
    check_microbatch(microbatch, ranking.unit)
    check_shape("bounds", bounds, (plan.num_rows, ranking.indices.shape[1], -1, -1))
    check_shape("scores", scores.values, (rows, heads, width))
    ranking.check_read(rows, heads)
    check_shape("out", out, (rows, heads, group, -1))
    if margin < 0:
        raise ValueError(f"margin={margin} must be at least 0")
    checks = num_stop_checks(ranking.capacity, ranking.unit, microbatch)
    if out.shape[3] < checks:
        raise ValueError(f"out holds {out.shape[3]} stop checks, these lists take {checks}")
    rule = ResidualRule(always, microbatch, softmax, margin)
    if impl != "triton":
        residual_bounds_reference(bounds, scores, plan, ranking, rule, out)
        return
    for name, tensor in {"bounds": bounds, "scores": scores.values, "out": out}.items():
        check_contiguous(name, tensor)
    from .rank_kernel import residual_bounds_triton

    residual_bounds_triton(bounds, scores, plan, ranking, rule, out)


def progressive_decode_attention(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    ranking: Lists,
    stop: MassStop,
    state: StopState,
    *,
    softmax: Softmax,
    out: torch.Tensor | None,
    workspace: ProgressiveWorkspace | None = None,
    impl: Impl,
) -> None:
    """Softmax attention over ranked units until their share is reached (PSA, algorithm 1).

    Row r, KV head h attends to the tail [tail_start, seq_len), then to the units that are always
    selected, and then to the other units of its list in their order, a microbatch at a time. The
    always selected units and one unit for the tail may not fill whole microbatches: the units left
    over are part of the first microbatch.

    A stop check after each microbatch estimates the share of each query head as A / (A + residual).
    A is the mass reached. The residual mass is the number of units of the domain that are left,
    times the smallest mass of a unit so far. Always selected units are no candidates for the
    smallest, since they did not come by rank. With ``stop.residual`` the residual mass is the bound
    given for this stop check, which never makes the share too large.

    The KV head stops at the first stop check at which the group's share is at least its row's
    epsilon, or at the end of its list. At epsilon 1 it stops only at the end of the list. Units
    after the stop have no effect on the result. A row with k_units 0 has an empty list; with
    tail_start 0 it is dense. A streaming head of the ranking's ``windows``, in a row that selects,
    attends to its sinks and window. It is complete with that, and is not counted.

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows; D is
            64 or 128.
        kv: KV rows in q's dtype or fp8 e4m3, with their scales.
        plan: R rows.
        ranking: from :func:`rank_units`; its unit divides the page size and the microbatch.
        stop: when a row has reached enough.
        state: stops and counters; rewritten.
        softmax: scale and cap of the logits.
        out: [R, H * G, D], q's dtype, contiguous; every entry is written. With None the function
            only finds the stops: it does not read V and computes no attention.
        workspace: at least R rows. Needed by "triton".
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl`` or share, a wrong dtype or shape, a number out of range,
            a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    check_attention(q, kv, plan, ranking, stop, state, out)
    if impl != "triton":
        progressive_decode_attention_reference(
            q, kv, plan, ranking, stop, state, softmax=softmax, out=out
        )
        return
    workspace = check_launch(q, kv, ranking, stop, state, out, workspace)
    from .kernel import progressive_decode_attention_triton

    progressive_decode_attention_triton(
        q, kv, plan, ranking, stop, state, softmax=softmax, out=out, workspace=workspace
    )


def check_attention(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, out: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError unless the arguments fit together, whatever the implementation."""
    rows, heads, group, unit = plan.num_rows, kv.num_heads, kv.group_of(q), ranking.unit
    check_shape("q", q, (rows, -1, -1))
    ranking.check_read(rows, heads)
    stop.check(rows, heads, group, unit)
    check_shape("reached", state.reached, tuple(ranking.counts.shape))
    if kv.page_size % unit:
        raise ValueError(f"unit={unit} must divide page_size={kv.page_size}")
    if state.counters is not None:
        check_shape("counters", state.counters, (len(COUNTERS),))
        check_dtype("counters", state.counters, torch.int64)
    if out is not None:
        check_shape("out", out, tuple(q.shape))


def check_launch(
    q: torch.Tensor, kv: KVView, ranking: Lists, stop: MassStop, state: StopState,
    out: torch.Tensor | None, workspace: ProgressiveWorkspace | None,
) -> ProgressiveWorkspace:  # fmt: skip
    """Raise ValueError unless kernels take the arguments; the batch's part of ``workspace``."""
    rows, heads, group, unit = q.shape[0], kv.num_heads, kv.group_of(q), ranking.unit
    kv.check_triton(q)
    if out is not None:
        check_dtype("out", out, q.dtype)
        check_contiguous("out", out)
    if workspace is None or state.expected is None:
        raise ValueError("impl='triton' needs a workspace and what is expected of each request")
    check_shape("expected", state.expected, (-1, heads))
    for name, tensor in {"reached": state.reached, "expected": state.expected}.items():
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
    if stop.residual is not None:
        check_dtype("residual", stop.residual, torch.float32)
        check_contiguous("residual", stop.residual)
    workspace = workspace.rows(rows)
    held, needed = workspace.lse.shape[3], num_chunks(ranking.capacity, unit, stop.microbatch)
    check_shape("workspace.partial", workspace.partial, (rows, heads, held, group, q.shape[2]))
    for name, tensor in {"lse": workspace.lse, "min_block": workspace.min_block}.items():
        check_shape(f"workspace.{name}", tensor, (rows, heads, group, held))
    if held < needed:
        raise ValueError(f"workspace holds {held} chunks, needed are {needed}")
    return workspace
