# SPDX-License-Identifier: Apache-2.0
"""What the choices of one server build their run time from, and what they leave with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import TypeVar

import torch

from sglang_sparse.choices.role import Role
from sglang_sparse_kernels.attend import make_workspace
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.planes import PageCuboids
from sglang_sparse_kernels.records import Always, KVScales, KVView, Lists, Scores, make_scores
from sglang_sparse_kernels.select import TopkWorkspace, make_topk_workspace
from sglang_sparse_kernels.step import Stage
from sglang_sparse_radix.planes import CuboidPlane
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Capacities that follow from the config and the server, all on the host.

    Attributes:
        max_units: selection units in the longest context, rounded up to whole lines of scores.
        capacity_units: units that a list holds.
        rows_a_pass: rows scored and attended together.
        lists: lists a layer: KV heads, or 1 if they share one.
        queries: most tokens that a step runs for one request: 1, or a verification's.
    """

    max_units: int
    capacity_units: int
    rows_a_pass: int
    lists: int
    queries: int = 1


class Columns:
    """State of requests: tensors with one entry a request slot, declared by those who read them."""

    def __init__(self, request_slots: int, device: torch.device) -> None:
        self.request_slots, self.device = request_slots, device
        self._columns: dict[str, torch.Tensor] = {}

    def add(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, fill: float = 0
    ) -> torch.Tensor:
        """A new column [request slots, *shape], filled; ValueError if the name is taken."""
        if name in self._columns:
            raise ValueError(f"there is a column {name} already")
        column = torch.full((self.request_slots, *shape), fill, dtype=dtype, device=self.device)
        self._columns[name] = column
        return column

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._columns[name]

    def nbytes(self) -> int:
        """Device bytes of all columns."""
        return sum(column.nbytes for column in self._columns.values())


class SelectionLists:
    """The lists of selected units that layers write and read.

    Selections that a later layer or step reads are kept by request slot; others have a row for
    each row of a pass, and serve every layer in turn.

    Attributes:
        indices: int32 [sets, list rows, lists, capacity_units], logical units.
        counts: int32 [sets, list rows, lists].
    """

    def __init__(
        self, limits: Limits, *, sets: int, unit: int, request_slots: int, device: torch.device
    ) -> None:
        """``sets`` is :func:`~sglang_sparse.backend.allocate.kept_sets`."""
        self.keep, self.unit = sets > 0, unit
        rows = request_slots if self.keep else limits.rows_a_pass
        shape = (max(sets, 1), rows, limits.lists, limits.capacity_units)
        self.indices = torch.zeros(shape, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:-1], dtype=torch.int32, device=device)
        self.own_rows = torch.arange(limits.rows_a_pass, dtype=torch.int32, device=device)

    def set_of(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, counts) of the layer at ``position`` among the selecting ones."""
        index = position % len(self.indices)
        return self.indices[index], self.counts[index]

    def rows_of(self, plan: DecodePlan) -> torch.Tensor:
        """int32 [rows], the list row of each row of a pass."""
        return plan.request_slots if self.keep else self.own_rows[: plan.num_rows]


@dataclass(frozen=True)
class Build:
    """One server: its pool, its limits, and the buffers that all layers share.

    Attributes:
        pool: the KV pool with the planes that the config reads.
        impl: kernels or their references.
        query_heads: of this rank.
        unit: tokens that are selected together.
        always: tokens that are always selected.
        layers: global ids of the selecting layers.
        limits: capacities.
        columns: state of requests.
        lists: what layers write and read.
        scores, topk, attention: of the largest pass.
    """

    pool: SparseMHATokenToKVPool
    impl: Impl
    query_heads: int
    unit: int
    always: Always
    layers: tuple[int, ...]
    limits: Limits
    columns: Columns
    lists: SelectionLists
    scores: Scores
    topk: TopkWorkspace
    attention: torch.Tensor
    _scratch: list[int] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        pool: SparseMHATokenToKVPool,
        impl: Impl,
        *,
        query_heads: int,
        unit: int,
        always: Always,
        layers: tuple[int, ...],
        limits: Limits,
        columns: Columns,
        sets: int,
    ) -> Build:
        """The buffers that every choice reads; arguments as the attributes."""
        rows, device = limits.rows_a_pass, columns.device
        slots = columns.request_slots
        return cls(
            pool, impl, query_heads, unit, always, layers, limits, columns,
            lists=SelectionLists(
                limits, sets=sets, unit=unit, request_slots=slots, device=device
            ),
            scores=make_scores(rows, limits.lists, limits.max_units, device),
            topk=make_topk_workspace(
                rows, limits.lists, limits.max_units, limits.capacity_units, device
            ),
            attention=make_workspace(
                rows, query_heads, pool.head_num, pool.head_dim, device, queries=limits.queries
            ),
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where the server runs."""
        return self.columns.device

    def scratch(self, workspace: T) -> T:
        """``workspace``, its bytes counted among those of this server's state."""
        self._scratch.append(tensor_bytes(workspace))
        return workspace

    def planes(self, layer: int, *names: str) -> tuple[torch.Tensor | None, ...]:
        """The planes of ``layer``, a global id, by name; None for those that are not kept."""
        kept, index = self.pool.planes.tensors(), self.pool.plane_of(layer)
        return tuple(kept[name][index] if name in kept else None for name in names)

    def cuboids(self, layer: int, plane: CuboidPlane) -> PageCuboids:
        """The cuboids of ``layer``'s logical pages that ``plane`` holds."""
        low, high = self.planes(layer, *plane.names)
        assert low is not None
        assert high is not None
        return PageCuboids(low, high, plane.logical_page, self.pool.page_size)

    def nbytes(self) -> int:
        """Device bytes of all buffers and columns."""
        shared = (self.scores, self.topk, self.attention, self.lists.indices, self.lists.counts)
        return sum(map(tensor_bytes, shared)) + sum(self._scratch) + self.columns.nbytes()


@dataclass(frozen=True)
class LayerProgram:
    """What one layer runs, compiled once at start.

    Attributes:
        layer: global id.
        role: what it does with selections.
        stages: its part of a decode step.
        indices, counts: the lists that it writes, if it selects, and reads.
        head_map: int32 [kv_heads], the list that each KV head reads; its own if None.
        k, v: [slots, kv_heads, head_dim], as they are stored.
    """

    layer: int
    role: Role
    stages: tuple[Stage, ...]
    indices: torch.Tensor
    counts: torch.Tensor
    head_map: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor

    @property
    def attends(self) -> bool:
        """It attends to a selection; otherwise the inner backend attends to everything."""
        return self.role.source is not None

    def kv(self, page_table: torch.Tensor, page_size: int, scales: KVScales) -> KVView:
        """The layer's KV rows as the rows of a batch see them."""
        return KVView(self.k, self.v, page_table, page_size, scales)

    def read(self, rows: torch.Tensor, unit: int) -> Lists:
        """The layer's lists, as rows of a batch write and read them."""
        return Lists(self.indices, self.counts, rows, unit, self.head_map)


def tensor_bytes(value: object) -> int:
    """Device bytes of a tensor, or of the tensors of a record."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = vars(value).values() if is_dataclass(value) else ()
    return sum(map(tensor_bytes, parts))
