# SPDX-License-Identifier: Apache-2.0
"""Buffers of the decode path: fixed capacity, allocated once, addressed by captured graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.attend import make_workspace
from sglang_sparse_kernels.exact import make_exact_workspace
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.records import make_scores
from sglang_sparse_kernels.select import make_topk_workspace

# Scores of one pass over the rows. Longer batches take several passes over the same buffer, so
# that 1M-token contexts times hundreds of requests do not reserve gigabytes.
_SCORE_BYTES = 512 << 20
_MAX_ROWS_A_PASS = 256
_ROWS_APART = 4
SCORE_ALIGNMENT = 16  # scores of a row start on a 64-byte line, so that kernels load them whole
# Selections kept across steps are not part of SGLang's memory sizing, so they must stay small.
MOST_KEPT_BYTES = 4 << 30


@dataclass(frozen=True)
class Limits:
    """Capacities that follow from the config and the server, all on the host.

    Attributes:
        max_units: selection units in the longest context, rounded up to whole lines of scores.
        capacity_units: units that a list holds.
        rows_a_pass: rows scored and attended together.
        lists: lists a layer: KV heads, or 1 if they share one.
    """

    max_units: int
    capacity_units: int
    rows_a_pass: int
    lists: int

    @classmethod
    def of(
        cls,
        config: SparseConfig,
        *,
        max_context: int,
        kv_heads: int,
        query_heads: int,
        max_rows: int,
    ) -> Limits:
        """Limits of one server; ``max_rows`` is the most requests that run at once."""
        units = -(-max_context // config.unit)
        max_units = -(-units // SCORE_ALIGNMENT) * SCORE_ALIGNMENT
        lists = config.score.lists(kv_heads)
        floats = lists + kv_heads * config.score.scratch(query_heads // kv_heads)
        rows = _SCORE_BYTES // (floats * max_units * torch.float32.itemsize)
        if rows >= _ROWS_APART:
            # Where a pass starts, vectors of a plan stay aligned: kernels of the first one fit.
            rows -= rows % _ROWS_APART
        return cls(
            max_units=max_units,
            capacity_units=config.capacity_units(max_context),
            rows_a_pass=max(1, min(rows, _MAX_ROWS_A_PASS, max_rows)),
            lists=lists,
        )


def kept_sets(config: SparseConfig, layers: range) -> int:
    """Sets of lists that outlive their layer: one a selecting layer if they outlive their step.

    Lists that other layers of the same step read take one set, as the next anchor comes after the
    last of them. 0 if none outlives its layer.
    """
    roles = [config.layers.role(layer) for layer in layers]
    if config.cadence.every > 1:
        return sum(role.selects for role in roles)
    return int(any(role.source is not None and not role.selects for role in roles))


def kept_bytes(limits: Limits, *, sets: int, request_slots: int) -> int:
    """Bytes of lists that outlive their layer."""
    return sets * request_slots * limits.lists * limits.capacity_units * torch.int32.itemsize


class SelectionBuffers:
    """Scores, lists and workspace; shared by all layers unless selections outlive their layer.

    Attributes:
        scores: those of one pass over the rows.
        indices: int32 [sets, list rows, lists, capacity_units], logical units.
        counts: int32 [sets, list rows, lists].
        attention, topk: scratch of the two kernels.
        exact: scratch of exact scoring, or None.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        sets: int,
        request_slots: int,
        kv_heads: int,
        query_heads: int,
        head_dim: int,
        exact: bool,
        device: torch.device,
    ) -> None:
        """``sets`` is :func:`kept_sets`: lists are per request slot if there are any, otherwise one
        set of rows serves every layer in turn. ``exact`` asks for the scratch of exact scoring."""
        self.limits = limits
        self.query_heads = query_heads
        self.keep = sets > 0
        rows, lists = limits.rows_a_pass, limits.lists
        self.scores = make_scores(rows, lists, limits.max_units, device)
        shape = (max(sets, 1), request_slots if self.keep else rows, lists, limits.capacity_units)
        self.indices = torch.zeros(shape, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:-1], dtype=torch.int32, device=device)
        self.attention = make_workspace(rows, query_heads, kv_heads, head_dim, device)
        self.topk = make_topk_workspace(
            rows, lists, limits.max_units, limits.capacity_units, device
        )
        self.exact = (
            make_exact_workspace(rows, query_heads, kv_heads, limits.max_units, device)
            if exact
            else None
        )
        self.own_rows = torch.arange(rows, dtype=torch.int32, device=device)

    def lists_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, counts) that ``layer`` (counted among the selecting ones) writes and reads."""
        index = layer % len(self.indices)
        return self.indices[index], self.counts[index]

    def list_rows(self, plan: DecodePlan) -> torch.Tensor:
        """int32 [rows], the row of :attr:`indices` of each row of ``plan``."""
        return plan.request_slots if self.keep else self.own_rows[: plan.num_rows]

    def nbytes(self) -> int:
        """Device bytes of all buffers."""
        tensors = (self.indices, self.counts, self.attention)
        scratch = self.scores.nbytes + (0 if self.exact is None else self.exact.nbytes)
        return scratch + sum(t.nbytes for t in (*tensors, *vars(self.topk).values()))


def passes(plan: DecodePlan, rows_a_pass: int) -> list[tuple[slice, DecodePlan]]:
    """Cut a plan into runs of at most ``rows_a_pass`` rows; host arithmetic only."""
    if plan.num_rows <= rows_a_pass:
        return [(slice(0, plan.num_rows), plan)]
    runs = []
    for start in range(0, plan.num_rows, rows_a_pass):
        run = slice(start, min(start + rows_a_pass, plan.num_rows))
        runs.append((run, plan.part(run)))
    return runs
