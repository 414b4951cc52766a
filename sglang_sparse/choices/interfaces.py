# SPDX-License-Identifier: Apache-2.0
"""The interface that choices of each axis implement. Only a choice's own file asks for its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from sglang_sparse.choices.cadence import StepCadence
from sglang_sparse.choices.choice import Choice, InvalidConfig, ModelShape
from sglang_sparse.choices.role import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang_sparse.choices.build import Build, LayerProgram
    from sglang_sparse.choices.telemetry import LayerCounters
    from sglang_sparse_kernels.cascade import AttentionAverage, CascadeShape
    from sglang_sparse_kernels.records import KVScales, Softmax
    from sglang_sparse_kernels.step import Stage
    from sglang_sparse_radix.planes import CuboidPlane, Plane


class Point(Protocol):
    """The parts of a config that a choice may read, to check rules between keys."""

    @property
    def page_size(self) -> int: ...

    @property
    def sink_tokens(self) -> int: ...

    @property
    def recent_tokens(self) -> int: ...

    @property
    def min_sparse_tokens(self) -> int: ...

    @property
    def layers(self) -> LayersChoice: ...

    @property
    def heads(self) -> HeadsChoice: ...

    @property
    def score(self) -> ScoreChoice: ...

    @property
    def budget(self) -> BudgetChoice: ...

    @property
    def prefill(self) -> PrefillChoice: ...

    @property
    def model_fields_set(self) -> set[str]: ...

    @property
    def cadence(self) -> StepCadence: ...

    @property
    def unit(self) -> int: ...

    @property
    def least_tokens(self) -> int: ...


class LayersChoice(Choice, ABC):
    """Which layers select (``selects``: some do), and which attend to another's selection."""

    kind: str
    selects: ClassVar[bool] = True

    @abstractmethod
    def role(self, layer_id: int) -> Role:
        """Return what layer `layer_id` (global, from 0) does."""

    def how_to_measure(self, model: str, method: str) -> str | None:
        """Say how such layers are measured for another model, a path; None if nothing is."""
        return None

    def check_model(self, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model that these layers do not fit."""


class HeadsChoice(Choice, ABC):
    """Which KV heads attend to what is selected, and which to sinks and a local window."""

    kind: str

    @property
    def window(self) -> tuple[int, int]:
        """First and last tokens that a streaming head sees. Heads that select ignore them."""
        return (0, 0)

    @property
    def prompt_window(self) -> tuple[int, int]:
        """The same in prompts, where the choice of prefill has windows."""
        return self.window

    def streams_in(self, layer_id: int) -> tuple[int, ...]:
        """Return the KV heads of layer `layer_id`, both global ids, that stream."""
        return ()

    def how_to_measure(self, model: str, method: str) -> str | None:
        """Say where such heads of another model, a path, come from; None if nothing is measured."""
        return None

    def check(self, point: Point) -> None:
        """Refuse, with `InvalidConfig`, a config that these heads cannot be part of."""

    def check_model(self, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model that these heads do not fit."""


class ScoreChoice(Choice, ABC):
    """How a unit of the context is scored for a query.

    Attributes:
        selects: it is for layers that select.
        has_cuboids: a plane bounds each unit's keys by a cuboid, so that an estimator of the
            residual mass can ask for it.
        tile_pool: how tiles of prompt tokens pool this score over query heads: those of one KV
            head, or all of a layer; None if it cannot score tiles.
    """

    kind: str
    selects: ClassVar[bool] = True
    has_cuboids: ClassVar[bool] = False

    @property
    def tile_pool(self) -> Literal["group", "heads"] | None:
        return None

    @property
    @abstractmethod
    def unit(self) -> int:
        """Tokens that are selected together."""

    @property
    def unit_key(self) -> str:
        """The key that says how many tokens are selected together."""
        return "kind"

    @property
    def refresh_steps(self) -> int:
        """Decode steps between two refreshes of the score's own state of a request."""
        return 1

    def lists(self, kv_heads: int) -> int:
        """Return how many lists a layer of `kv_heads` KV heads has."""
        return kv_heads

    def scratch(self, group: int) -> int:
        """Return fp32 numbers of scratch a unit and KV head, whose list `group` heads select."""
        return 0

    def planes(self) -> tuple[Plane, ...]:
        """Return the planes that scoring reads."""
        return ()

    @classmethod
    def with_cuboids(cls) -> list[type[ScoreChoice]]:
        """Return all kinds of score that have cuboids."""
        found, left = [], ScoreChoice.__subclasses__()
        while left:
            choice = left.pop(0)
            left.extend(choice.__subclasses__())
            if choice.has_cuboids and isinstance(choice.model_fields["kind"].default, str):
                found.append(choice)
        return found

    def cuboids(self, *, bound: bool) -> CuboidPlane | None:
        """Return the plane that holds a cuboid of each unit's keys, or None.

        Args:
            bound: True for a cuboid that holds every key, False for the cuboid that is scored.
        """
        return None

    def check_model(self, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model that the score does not fit."""

    @abstractmethod
    def build(self, build: Build) -> ScoreRun:
        """Allocate the state of this score, and return its run time."""


class ScoreRun(Protocol):
    """A score at run time."""

    def stage(self, layer: int) -> Stage:
        """The stage that scores the units of `layer`, a global id."""


class BudgetChoice(Choice, ABC):
    """How much is selected.

    Attributes:
        selects: it is for layers that select.
        key: the key that a request's budget replaces.
        list_key: the key with the smallest number of tokens that a list holds.
        stops_by_attending: whether a list's length shows only when its own head attends to it.
        verifies: whether draft tokens may share a list that it fills.
    """

    kind: str
    selects: ClassVar[bool] = True
    verifies: ClassVar[bool] = True
    key: ClassVar[str]
    list_key: ClassVar[str]
    stops_by_attending: ClassVar[bool] = False

    @property
    @abstractmethod
    def amount(self) -> float:
        """The number that names this budget in a list."""

    @property
    @abstractmethod
    def largest(self) -> BudgetChoice:
        """This budget with the largest value that a request may ask for; it sizes the buffers."""

    @abstractmethod
    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the smallest and the largest value that a request may ask for."""

    @abstractmethod
    def asked(self, value: float) -> BudgetChoice:
        """Return the budget of a request that asks for `value`."""

    @property
    @abstractmethod
    def list_size(self) -> tuple[int, float]:
        """Size of a list: at least this many tokens, and at least this share of the domain."""

    @property
    def request_values(self) -> dict[str, float]:
        """Further state of a request's budget: names of float32 columns, with the value of each."""
        return {}

    def planes(self, score: ScoreChoice) -> tuple[Plane, ...]:
        """Return the planes that this budget reads beside the planes of `score`."""
        return ()

    def check(self, point: Point) -> None:
        """Raise `InvalidConfig` for a config that this budget does not fit."""

    def rows_a_pass(self, build: PassShape) -> int | None:
        """Return the most rows that its scratch allows in one pass; None for no limit."""
        return None

    @abstractmethod
    def build(self, build: Build, score: ScoreChoice) -> BudgetRun:
        """Allocate the state of this budget, and return its run time, which selects by `score`."""


@dataclass(frozen=True)
class PassShape:
    """The sizes that the scratch of a row depends on: units of a list, tokens of a unit, heads."""

    capacity_units: int
    unit: int
    query_heads: int
    kv_heads: int
    head_dim: int


class BudgetRun(Protocol):
    """A budget at run time."""

    @property
    def counters(self) -> LayerCounters | None:
        """Sums of what its layers reached, or None if it counts nothing."""

    def stages(self, layer: int, *, attends: bool) -> list[Stage]:
        """The stages that follow the score in `layer`; they attend only if `attends` is set."""

    def plan(self, request_slots: torch.Tensor) -> None:
        """Gather the state of a batch's request slots (int64 [rows]), once for all its layers."""


class RetentionChoice(Choice, ABC):
    """Which tokens of a request are held.

    Attributes:
        bounded: a request holds a number of tokens that does not grow with its length. Then no
            layer selects: each attends to everything that is held.
        by_head: streaming heads hold less than the others, in a pool of their own.
    """

    kind: str
    bounded: ClassVar[bool] = False
    by_head: ClassVar[bool] = False

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that a request holds; None for any number."""
        return None

    def check(self, point: Point) -> None:
        """Refuse, with `InvalidConfig`, a config that it cannot be part of."""
        axes = (
            ("layers", point.layers.kind, point.layers.selects),
            ("score", point.score.kind, point.score.selects),
            ("budget", point.budget.kind, point.budget.selects),
        )
        for axis, kind, selects in axes:
            if selects == self.bounded:
                needed = "layers none, score none and budget held if what is held is bounded"
                raise InvalidConfig(
                    f"{axis}.kind {kind} does not go with retention.kind {self.kind}",
                    allowed=f"{needed}, and none of these else",
                    remedy=f"change {axis} or retention, or start from a preset",
                )

    def check_model(self, point: Point, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model of which `point` cannot hold tokens like that."""

    @property
    def window_share(self) -> float:
        """Tokens that streaming heads have room for, as a share of those of the others."""
        return 1.0

    @property
    def kept_prefixes(self) -> int:
        """How many states of prefixes are kept for later requests; of a bounded retention alone."""
        return 0

    def check_request(self, *, dense: bool, budget: float | None) -> None:
        """Refuse, with `InvalidConfig`, what a request asks for and this cannot give."""


class BoundedRetention(RetentionChoice):
    """A retention that holds a bounded number of tokens of each request."""

    bounded: ClassVar[bool] = True

    @abstractmethod
    def shape(self) -> CascadeShape:
        """Return what a request holds, for the kernels."""

    @abstractmethod
    def average(self) -> AttentionAverage:
        """Return how scores follow from attention, for the kernels."""


class PrefillChoice(Choice, ABC):
    """How prompt tokens attend.

    Attributes:
        most_chunk: most tokens of a prefill batch, or None for no limit.
        has_windows: heads that stream see their windows in prompts, too.
    """

    kind: str
    most_chunk: ClassVar[int | None] = None
    has_windows: ClassVar[bool] = False

    @property
    def sparse_from(self) -> int | None:
        """First position that may attend sparsely; None for none."""
        return None

    def check(self, point: Point) -> None:
        """Raise `InvalidConfig` for a config that this choice does not fit."""

    @abstractmethod
    def build(
        self, build: Build, score: ScoreChoice, programs: dict[int, LayerProgram]
    ) -> PrefillRun | None:
        """Return the run time of sparse prefill, or None if prompts attend to everything."""


class PrefillRun(Protocol):
    """Sparse prefill at run time."""

    def plan(
        self,
        page_table: torch.Tensor,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        dense: Sequence[bool],
    ) -> Any:
        """The plan of a batch, or None if it runs densely; see the choice's own file."""

    def warm_up(self, max_pages: int, dtype: torch.dtype, softmax: Softmax) -> None:
        """Compile every kernel that a prompt may meet.

        Page tables have `max_pages` columns, queries are in `dtype`; layers have `softmax`.
        """

    def run(
        self, batch: Any, layer: int, q: torch.Tensor, softmax: Softmax, kv_scales: KVScales
    ) -> torch.Tensor:
        """Run `layer` over `q` [tokens, q_heads, head_dim]; `batch` is from :meth:`plan`."""
