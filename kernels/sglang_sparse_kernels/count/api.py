# SPDX-License-Identifier: Apache-2.0
"""Public counting function: validate, then dispatch to the implementation asked for."""

import torch

from ..common import IMPLS, Impl, check_choice, check_dtype, check_shape
from ..plan.types import DecodePlan
from .reference import count_decode_reference

COUNTS = (
    "rows",
    "dense_rows",
    "kv_tokens",
    "attended_tokens",
    "selected_units",
    "selections",
    "refreshes",
    "cap_hits",
    "window_tokens",
)
"""What each entry of :func:`count_decode`'s ``sums`` counts, over rows and steps:

``rows``: decoded tokens; ``dense_rows``: those of them that attended to everything; ``kv_tokens``:
KV tokens they could see; ``attended_tokens``: those that a KV head of a selecting layer attended
to; ``selected_units``: units on the list of a KV head; ``selections``, ``refreshes``: rows whose
lists or channels were chosen anew; ``cap_hits``: rows whose budget did not fit their list;
``window_tokens``: KV tokens that a streaming head attended to.
"""


def count_decode(
    plan: DecodePlan,
    budgets: torch.Tensor,
    sums: torch.Tensor,
    *,
    unit: int,
    capacity_units: int,
    window: int = 0,
    impl: Impl,
) -> None:
    """Add what ``plan`` says of one decode step to ``sums``.

    Rows of request slot 0 pad a captured graph's batch and are not counted. Lists are assumed to
    hold the last unit of the domain, as they do wherever recent tokens are always kept.

    Args:
        plan: as :func:`plan_decode` left it.
        budgets: int32 [request slots, 2], contiguous, as given to :func:`plan_decode`.
        sums: int64 [len(COUNTS)], contiguous; changed in place.
        unit: tokens a selection unit.
        capacity_units: units a list holds.
        window: tokens of the sinks and the window of a streaming head.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a number out of range.
    """
    check_choice("impl", impl, IMPLS)
    check_dtype("budgets", budgets, torch.int32)
    check_shape("budgets", budgets, (-1, 2))
    check_dtype("sums", sums, torch.int64)
    check_shape("sums", sums, (len(COUNTS),))
    for name, tensor in {"budgets": budgets, "sums": sums}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    for name, value in {"unit": unit, "capacity_units": capacity_units}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if impl != "triton":
        count_decode_reference(
            plan, budgets, sums, unit=unit, capacity_units=capacity_units, window=window
        )
        return
    from .kernel import count_decode_triton

    count_decode_triton(
        plan, budgets, sums, unit=unit, capacity_units=capacity_units, window=window
    )
