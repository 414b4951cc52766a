# SPDX-License-Identifier: Apache-2.0
"""Buffers of the decode path: fixed capacity, allocated once, addressed by captured graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.attend import make_workspace
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.select import make_topk_workspace

# Scores of one pass over the rows. Longer batches take several passes over the same buffer, so
# that 1M-token contexts times hundreds of requests do not reserve gigabytes.
_SCORE_BYTES = 512 << 20
_MAX_ROWS_A_PASS = 256
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
    """

    max_units: int
    capacity_units: int
    rows_a_pass: int

    @classmethod
    def of(cls, config: SparseConfig, *, max_context: int, kv_heads: int, max_rows: int) -> Limits:
        """Limits of one server; ``max_rows`` is the most requests that run at once."""
        units = -(-max_context // config.unit)
        max_units = -(-units // SCORE_ALIGNMENT) * SCORE_ALIGNMENT
        rows = _SCORE_BYTES // (kv_heads * max_units * torch.float32.itemsize)
        return cls(
            max_units=max_units,
            capacity_units=config.capacity_units(max_context),
            rows_a_pass=max(1, min(rows, _MAX_ROWS_A_PASS, max_rows)),
        )


def kept_bytes(limits: Limits, *, layers: int, request_slots: int, kv_heads: int) -> int:
    """Bytes of the lists when a selection outlives its step."""
    return layers * request_slots * kv_heads * limits.capacity_units * torch.int32.itemsize


class SelectionBuffers:
    """Scores, lists and workspace; shared by all layers unless selections are kept across steps.

    Attributes:
        scores: fp32 [rows_a_pass, kv_heads, max_units].
        indices: int32 [layers or 1, list rows, kv_heads, capacity_units], logical units.
        counts: int32 [layers or 1, list rows, kv_heads].
        attention, topk: scratch of the two kernels.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        keep: bool,
        layers: int,
        request_slots: int,
        kv_heads: int,
        query_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        """``keep`` is true when a selection outlives its step (cadence above 1): then lists are
        per layer and request slot; otherwise one set of rows serves every layer in turn."""
        self.limits = limits
        self.keep = keep
        rows = limits.rows_a_pass
        self.scores = torch.empty((rows, kv_heads, limits.max_units), device=device)
        sets, list_rows = (layers, request_slots) if keep else (1, rows)
        shape = (sets, list_rows, kv_heads, limits.capacity_units)
        self.indices = torch.zeros(shape, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:-1], dtype=torch.int32, device=device)
        self.attention = make_workspace(rows, query_heads, kv_heads, head_dim, device)
        self.topk = make_topk_workspace(
            rows, kv_heads, limits.max_units, limits.capacity_units, device
        )
        self._own_rows = torch.arange(rows, dtype=torch.int32, device=device)

    def lists_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, counts) that ``layer`` (counted among the selecting ones) writes and reads."""
        index = layer if self.keep else 0
        return self.indices[index], self.counts[index]

    def list_plan(self, plan: DecodePlan) -> DecodePlan:
        """``plan`` with ``list_rows`` naming rows of :attr:`indices`."""
        return plan if self.keep else replace(plan, list_rows=self._own_rows[: plan.num_rows])

    def nbytes(self) -> int:
        """Device bytes of all buffers."""
        tensors = (self.scores, self.indices, self.counts, self.attention)
        return sum(t.nbytes for t in (*tensors, self.topk.block_max, self.topk.blocks))


def passes(plan: DecodePlan, rows_a_pass: int) -> list[tuple[slice, DecodePlan]]:
    """Cut a plan into runs of at most ``rows_a_pass`` rows; host arithmetic only."""
    if plan.num_rows <= rows_a_pass:
        return [(slice(0, plan.num_rows), plan)]
    runs = []
    for start in range(0, plan.num_rows, rows_a_pass):
        run = slice(start, min(start + rows_a_pass, plan.num_rows))
        runs.append((run, DecodePlan(**{f.name: getattr(plan, f.name)[run] for f in fields(plan)})))
    return runs
