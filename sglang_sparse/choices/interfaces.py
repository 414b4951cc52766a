# SPDX-License-Identifier: Apache-2.0
"""What each axis asks of its choices. Nothing outside a choice's own file asks for its kind."""

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
    from sglang_sparse_kernels.records import KVScales
    from sglang_sparse_kernels.step import Stage
    from sglang_sparse_radix.planes import CuboidPlane, Plane


class Point(Protocol):
    """What a choice may ask of the config that it is part of, to check rules between keys."""

    @property
    def page_size(self) -> int: ...

    @property
    def sink_tokens(self) -> int: ...

    @property
    def recent_tokens(self) -> int: ...

    @property
    def layers(self) -> LayersChoice: ...

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
    """Which layers select, and which attend to the selection of another one.

    Attributes:
        selects: some layer does.
    """

    kind: str
    selects: ClassVar[bool] = True

    @abstractmethod
    def role(self, layer_id: int) -> Role:
        """Return what layer `layer_id` (global, from 0) does."""

    def calibration_command(self, model: str, method: str) -> str | None:
        """Return the command that measures such layers for another model, a path; or None."""
        return None

    def check_model(self, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model that these layers do not fit."""


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
    def refresh_steps(self) -> int:
        """Decode steps between two refreshes of the score's own state of a request."""
        return 1

    def lists(self, kv_heads: int) -> int:
        """Return how many lists a layer of `kv_heads` KV heads has."""
        return kv_heads

    def scratch(self, group: int) -> int:
        """Return the fp32 scratch a unit and KV head, for `group` query heads a KV head."""
        return 0

    def planes(self) -> tuple[Plane, ...]:
        """Return the planes that scoring reads."""
        return ()

    @classmethod
    def with_cuboids(cls) -> list[type[ScoreChoice]]:
        """Return the scores that have cuboids, of all that there are."""
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
            bound: the cuboid must hold every key; otherwise the one that scores.
        """
        return None

    def check_model(self, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model that the score does not fit."""

    @abstractmethod
    def build(self, build: Build) -> ScoreRun:
        """Return what scores at run time, its state allocated."""


class ScoreRun(Protocol):
    """A score at run time."""

    def stage(self, layer: int) -> Stage:
        """The stage that scores the units of `layer`, a global id."""


class BudgetChoice(Choice, ABC):
    """How much is selected.

    Attributes:
        selects: it is for layers that select.
        key: the key that a request's budget replaces.
        list_key: the key that says how many tokens a list holds at least.
        verifies: draft tokens may share a list that it fills.
    """

    kind: str
    selects: ClassVar[bool] = True
    verifies: ClassVar[bool] = True
    key: ClassVar[str]
    list_key: ClassVar[str]

    @property
    @abstractmethod
    def amount(self) -> float:
        """The number that names this budget in a list."""

    @property
    @abstractmethod
    def largest(self) -> BudgetChoice:
        """The budget at the most that a request may ask for; buffers are sized for it."""

    @abstractmethod
    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the least and the most that a request may ask for."""

    @abstractmethod
    def asked(self, value: float) -> BudgetChoice:
        """Return the budget of a request that asks for `value`."""

    @property
    @abstractmethod
    def list_size(self) -> tuple[int, float]:
        """What a list holds: at least so many tokens, and at least this share of the domain."""

    @property
    def request_values(self) -> dict[str, float]:
        """What else the run time keeps of a request's budget: a float32 column for each name."""
        return {}

    def planes(self, score: ScoreChoice) -> tuple[Plane, ...]:
        """Return the planes that it reads beside those of `score`."""
        return ()

    def check(self, point: Point) -> None:
        """Refuse, with `InvalidConfig`, a config that this budget cannot be part of."""

    def rows_a_pass(self, build: PassShape) -> int | None:
        """Return how many rows its scratch allows in one pass; None for any number."""
        return None

    @abstractmethod
    def build(self, build: Build, score: ScoreChoice) -> BudgetRun:
        """Return what selects by `score` and attends at run time, its state allocated."""


@dataclass(frozen=True)
class PassShape:
    """What the scratch of one row depends on: units a list holds, tokens a unit, and heads."""

    capacity_units: int
    unit: int
    query_heads: int
    kv_heads: int
    head_dim: int


class BudgetRun(Protocol):
    """A budget at run time.

    Attributes:
        counters: what its layers reached, or None if it counts nothing.
    """

    @property
    def counters(self) -> LayerCounters | None: ...

    def stages(self, layer: int, *, attends: bool) -> list[Stage]:
        """The stages that follow the score in `layer`; without attention unless `attends`."""

    def plan(self, request_slots: torch.Tensor) -> None:
        """Gather, once a batch, what the stages need of its requests (int64 [rows])."""


class RetentionChoice(Choice, ABC):
    """Which tokens of a request are held.

    Attributes:
        bounded: a request holds a number of tokens that does not grow with its length. Then no
            layer selects: each attends to everything that is held.
    """

    kind: str
    bounded: ClassVar[bool] = False

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

    @property
    def kept_prefixes(self) -> int:
        """How many states of prefixes are kept for later requests; of a bounded retention alone."""
        return 0

    def check_request(self, *, dense: bool, budget: float | None) -> None:
        """Refuse, with `InvalidConfig`, what a request asks for and this cannot give."""

    def shape(self) -> CascadeShape:
        """Return what a request holds, for the kernels; of a bounded retention alone."""
        raise NotImplementedError

    def average(self) -> AttentionAverage:
        """Return how scores follow from attention, for the kernels; as `shape`."""
        raise NotImplementedError


class PrefillChoice(Choice, ABC):
    """How prompt tokens attend.

    Attributes:
        most_chunk: most tokens of a prefill batch, or None for any number.
    """

    kind: str
    most_chunk: ClassVar[int | None] = None

    @property
    def sparse_from(self) -> int | None:
        """First position that may attend sparsely; None for none."""
        return None

    def check(self, point: Point) -> None:
        """Refuse, with `InvalidConfig`, a config that it cannot be part of."""

    @abstractmethod
    def build(
        self, build: Build, score: ScoreChoice, programs: dict[int, LayerProgram]
    ) -> PrefillRun | None:
        """Return what runs prompt tokens sparsely, or None if all attend to everything."""


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

    def warm_up(self, max_pages: int, dtype: torch.dtype) -> None:
        """Compile every kernel that a prompt may meet.

        Page tables have `max_pages` columns, queries are in `dtype`.
        """

    def run(
        self,
        batch: Any,
        layer: int,
        q: torch.Tensor,
        *,
        scaling: float,
        logit_cap: float,
        kv_scales: KVScales,
    ) -> torch.Tensor:
        """Run `layer` over `q` [tokens, q_heads, head_dim]; `batch` is from :meth:`plan`."""
