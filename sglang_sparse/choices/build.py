# SPDX-License-Identifier: Apache-2.0
"""The buffers, limits and state that the choices of one server share at run time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Protocol, TypeVar

import torch

from sglang_sparse.choices.role import Role
from sglang_sparse_kernels.attend import make_workspace
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.planes import PageCuboids
from sglang_sparse_kernels.records import (
    Always,
    HeadWindows,
    KVScales,
    KVView,
    Lists,
    Scores,
    make_scores,
)
from sglang_sparse_kernels.select import TopkWorkspace, make_topk_workspace
from sglang_sparse_kernels.step import Attend, AttendUntil, Stage
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
        lists: lists of a layer: one for each KV head, or 1 if they share one.
        queries: most tokens that a step runs for one request: 1, or those of a verification.
    """

    max_units: int
    capacity_units: int
    rows_a_pass: int
    lists: int
    queries: int = 1


@dataclass(frozen=True)
class HeadKinds:
    """KV heads of this rank that stream. By global layer id; a layer without any is left out.

    Attributes:
        windows: of layers that attend to a selection, the heads that attend to a window instead.
        prompt_windows: the same in prompts.
        unread: of selecting layers, int32 [lists], 1 for a list that no head of any layer reads.
    """

    windows: dict[int, HeadWindows] = field(default_factory=dict)
    prompt_windows: dict[int, HeadWindows] = field(default_factory=dict)
    unread: dict[int, torch.Tensor] = field(default_factory=dict)


class Columns:
    """State of requests: tensors with an entry for each request slot, declared by their readers."""

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

    Selections that a later layer or step reads are kept by request slot. Other selections have a
    row for each row of a pass; every layer overwrites them.

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


class Fetched(Protocol):
    """KV that attention reads elsewhere than in the pool's rows."""

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [rows, heads, head_dim] each."""

    def stage(self, layer: int) -> Stage:
        """The stage that attends to the step's lists and the tail in `layer`, a global id."""

    def until(self, layer: int, stage: AttendUntil) -> Stage:
        """What takes the place of `stage`, which attends in `layer` until a share is reached."""

    def ahead(
        self, layers: Sequence[int], head_maps: Sequence[torch.Tensor | None]
    ) -> tuple[list[Stage], list[Stage]]:
        """What fetches for `layers` in the layer that selects, and a stage for each that attends.

        Args:
            layers: global ids, in order, of those that attend next to the lists of a step.
            head_maps: of each of them.
        """

    def counts(self, *, wait: bool) -> dict[str, int] | None:
        """Sums since the start, by their names; without waiting None if none have arrived."""


@dataclass(frozen=True)
class Build:
    """All that choices need to build their run time: pool, limits, and buffers that layers share.

    Attributes:
        pool: the KV pool with the planes that the config reads.
        impl: kernels or their references.
        query_heads: of this rank.
        unit: tokens that are selected together.
        always: tokens that are always selected.
        layers: global ids of the selecting layers.
        limits: capacities.
        columns: state of requests.
        kinds: heads that stream.
        lists: what layers write and read.
        scores, topk, attention: scratch, sized for the largest pass.
        fetched: where KV is read, if not in the pool's rows.
    """

    pool: SparseMHATokenToKVPool
    impl: Impl
    query_heads: int
    unit: int
    always: Always
    layers: tuple[int, ...]
    limits: Limits
    columns: Columns
    kinds: HeadKinds
    lists: SelectionLists
    scores: Scores
    topk: TopkWorkspace
    attention: torch.Tensor
    fetched: Fetched | None = None
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
        kinds: HeadKinds,
        sets: int,
    ) -> Build:
        """Allocate the buffers that every choice reads; for the arguments see the attributes."""
        rows, device = limits.rows_a_pass, columns.device
        slots = columns.request_slots
        return cls(
            pool, impl, query_heads, unit, always, layers, limits, columns, kinds,
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
        """Return ``workspace``, after adding its bytes to those of this server's state."""
        self._scratch.append(tensor_bytes(workspace))
        return workspace

    def attend(self, layer: int) -> Stage:
        """The stage of ``layer``, a global id, that attends to the step's lists and the tail."""
        return Attend(self.attention) if self.fetched is None else self.fetched.stage(layer)

    def attend_again(
        self, layers: Sequence[int], head_maps: Sequence[torch.Tensor | None]
    ) -> tuple[list[Stage], list[Stage]]:
        """What a layer that selects does for `layers`, global ids, which reuse its lists.

        Returns:
            Its last stages, and a stage for each of them that attends to the lists and the tail.
        """
        if self.fetched is None:
            return [], list(map(self.attend, layers))
        return self.fetched.ahead(layers, head_maps)

    def attend_until(self, layer: int, stage: AttendUntil) -> Stage:
        """`stage`, or what does its work in ``layer``, a global id, where KV is fetched."""
        return stage if self.fetched is None else self.fetched.until(layer, stage)

    def kv_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that ``layer``, a global id, reads: [rows, heads, head_dim] each."""
        if self.fetched is not None:
            return self.fetched.rows
        return self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)

    def scores_of(self, layer: int) -> Scores:
        """Where ``layer`` scores, and which of its lists are read."""
        return replace(self.scores, unread=self.kinds.unread.get(layer))

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
    """The stages of one layer with their buffers, compiled once at start.

    Attributes:
        layer: global id.
        role: whether it selects, and what it attends to.
        stages: its part of a decode step.
        indices, counts: the lists that it writes, if it selects, and reads.
        head_map: int32 [kv_heads], the list that each KV head reads; its own if None.
        k, v: [slots, kv_heads, head_dim], as they are stored.
        windows: KV heads that read no list; None if every head reads one.
    """

    layer: int
    role: Role
    stages: tuple[Stage, ...]
    indices: torch.Tensor
    counts: torch.Tensor
    head_map: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    windows: HeadWindows | None = None

    @property
    def attends(self) -> bool:
        """True if it attends to a selection; otherwise the inner backend attends to everything."""
        return self.role.source is not None

    @property
    def kind(self) -> tuple[bool, ...]:
        """Equal for layers that run the same kernels."""
        return self.role.selects, self.attends, self.head_map is None, self.windows is None

    def kv(self, page_table: torch.Tensor, page_size: int, scales: KVScales) -> KVView:
        """The layer's KV rows as the rows of a batch see them."""
        return KVView(self.k, self.v, page_table, page_size, scales)

    def read(self, rows: torch.Tensor, unit: int) -> Lists:
        """The layer's lists, as rows of a batch write and read them."""
        return Lists(self.indices, self.counts, rows, unit, self.head_map, self.windows)


def tensor_bytes(value: object) -> int:
    """Device bytes of a tensor, or of the tensors of a record or tuple."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts: Iterable[object] = value if isinstance(value, tuple) else ()
    if is_dataclass(value):
        parts = vars(value).values()
    return sum(map(tensor_bytes, parts))
