# SPDX-License-Identifier: Apache-2.0
"""Budget `mass`: as many units as reach a share of the attention mass (PSA, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sglang_sparse.choices.budget._asked import AskedBudget
from sglang_sparse.choices.choice import MAX_COUNT, MILLION, InvalidConfig
from sglang_sparse.choices.interfaces import PassShape, Point, ScoreChoice

if TYPE_CHECKING:
    import torch

    from sglang_sparse.choices.build import Build
    from sglang_sparse_kernels.step import Stage
    from sglang_sparse_radix.planes import Plane

# One program of the device sorts all ranked units of a KV head.
MOST_RANKED_UNITS = 4096
# Limit of the partial results of one pass over the rows. Larger batches take several passes.
_WORKSPACE_BYTES = 256 << 20
# Expected microbatches of request slots that no request has used yet.
_EXPECTED_AT_FIRST = 8


class MassBudget(AskedBudget):
    """As many units as reach a share of the attention mass (PSA, section 3.2).

    Units are attended to in the order of their scores, a microbatch at a time, until the estimated
    share of the mass that was reached is at least `epsilon`.
    """

    key: ClassVar[str] = "epsilon"
    list_key: ClassVar[str] = "cap"
    stops_by_attending: ClassVar[bool] = True
    verifies: ClassVar[bool] = False  # where a row stops follows from one query

    kind: Literal["mass"] = "mass"
    epsilon: float = Field(
        gt=0.0, le=1.0, description="Share of the attention mass to reach; at 1 only the cap ends."
    )
    max_epsilon: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Most that one request may ask for; null allows no more than `epsilon`.",
    )
    cap: int = Field(
        ge=1,
        le=MAX_COUNT,
        description="Most selected tokens, sinks and recent ones among them; hits are counted.",
    )
    microbatch: Literal[16, 32, 64, 128] = Field(
        default=128, description="Tokens attended to between two looks at the share."
    )
    estimator: Literal["observed_min", "upper_bound", "scored"] = Field(
        default="observed_min",
        description="What the units that are left may hold: each the smallest mass seen so far; "
        "what its key bounds allow, which never makes the share too large; or what each head's "
        "score of it says, less `margin`.",
    )
    margin: float = Field(
        default=0.0,
        ge=0.0,
        le=100.0,
        description="With estimator scored, the nats by which scores exceed what units hold.",
    )
    share: Literal["min", "mean"] = Field(
        default="min",
        description="Share of the query heads of one KV head: the smallest, or their mean.",
    )

    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the least and the largest share that a request may ask for."""
        return 1 / MILLION, self.largest.amount

    def asked(self, value: float) -> MassBudget:
        """Return the budget of a request that is to reach the share `value`."""
        return self.model_copy(update={"epsilon": float(value), "max_epsilon": None})

    @property
    def list_size(self) -> tuple[int, float]:
        # Lists hold as many units as may be attended to. Each row finds its stop at run time.
        return self.cap, 0.0

    @property
    def request_values(self) -> dict[str, float]:
        return {"epsilon": self.epsilon}

    @property
    def _estimates(self) -> bool:
        """Whether the residual mass is estimated from cuboids of the units that are left."""
        return self.estimator != "observed_min"

    @property
    def _bounds(self) -> bool:
        return self.estimator == "upper_bound"

    def planes(self, score: ScoreChoice) -> tuple[Plane, ...]:
        plane = score.cuboids(bound=self._bounds) if self._estimates else None
        return () if plane is None else (plane,)

    def check(self, point: Point) -> None:
        self._check_lists(point)
        self._check_estimator(point)

    def _check_lists(self, point: Point) -> None:
        if self.microbatch % point.unit:
            raise InvalidConfig(
                f"budget.microbatch {self.microbatch} is no whole number of units of {point.unit}",
                allowed=f"budget.microbatch a multiple of {point.unit}, at most 128",
                remedy=f"raise budget.microbatch, or lower score.{point.score.unit_key}",
            )
        if self.cap > MOST_RANKED_UNITS * point.unit:
            raise InvalidConfig(
                f"budget.cap {self.cap} ranks more than {MOST_RANKED_UNITS} units of {point.unit}",
                allowed=f"budget.cap of at most {MOST_RANKED_UNITS * point.unit}",
                remedy="lower budget.cap, or score pages of more tokens",
            )
        if point.score.lists(2) != 2:
            raise InvalidConfig(
                "score.pool heads makes one list a layer, and budget mass stops each KV head's own",
                allowed="score.pool group with budget mass",
                remedy="set score.pool to group, or choose another budget",
            )

    def _check_estimator(self, point: Point) -> None:
        if self.margin and self.estimator != "scored":
            raise InvalidConfig(
                f"budget.margin {self.margin} lowers scores, budget.estimator is {self.estimator}",
                allowed="budget.margin 0 unless budget.estimator is scored",
                remedy="set budget.estimator to scored, or leave out budget.margin",
            )
        if not self._estimates:
            return
        if not point.score.has_cuboids:
            fitting = [
                kind.model_fields["kind"].default for kind in type(point.score).with_cuboids()
            ]
            raise InvalidConfig(
                f"budget.estimator {self.estimator} needs bounds of pages, score is "
                f"{point.score.kind}",
                allowed=f"budget.estimator {self.estimator} with score {' or '.join(fitting)}",
                remedy="set budget.estimator to observed_min",
            )
        if point.cadence.every > 1:
            raise InvalidConfig(
                f"budget.estimator {self.estimator} bounds scored pages, cadence.every "
                f"{point.cadence.every} scores them at some steps alone",
                allowed=f"cadence.every 1 with budget.estimator {self.estimator}",
                remedy="set cadence.every to 1, or budget.estimator to observed_min",
            )

    def rows_a_pass(self, build: PassShape) -> int:
        from sglang_sparse_kernels.progressive import num_chunks, progressive_row_bytes

        chunks = num_chunks(build.capacity_units, build.unit, self.microbatch)
        row = progressive_row_bytes(build.query_heads, build.kv_heads, build.head_dim, chunks)
        return max(1, _WORKSPACE_BYTES // row)

    def build(self, build: Build, score: ScoreChoice) -> MassRun:
        return MassRun(self, build, score)


class MassRun:
    """Ranks the scored units, and attends to them in that order until the share is reached.

    Attributes:
        counters: what each layer reached.
    """

    def __init__(self, choice: MassBudget, build: Build, score: ScoreChoice) -> None:
        """Allocate what all layers share: scratch lists, the workspace, bounds, the counters."""
        import torch

        from sglang_sparse.choices.telemetry import LayerCounters
        from sglang_sparse_kernels.progressive import (
            COUNTERS,
            MassStop,
            make_progressive_workspace,
            num_chunks,
            num_stop_checks,
        )
        from sglang_sparse_kernels.records import Lists

        self._choice, self._build, self._score = choice, build, score
        limits, pool, device = build.limits, build.pool, build.device
        rows, heads, group = limits.rows_a_pass, pool.head_num, build.query_heads // pool.head_num
        sizes = (limits.capacity_units, build.unit, choice.microbatch)
        shape = (rows, heads, limits.capacity_units)
        self._selected = build.scratch(
            Lists(
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape[:2], dtype=torch.int32, device=device),
                build.lists.own_rows,
                build.unit,
            )
        )
        self._ranked = build.scratch(torch.zeros_like(build.lists.counts))
        self._workspace = build.scratch(
            make_progressive_workspace(
                rows, build.query_heads, heads, pool.head_dim, num_chunks(*sizes), device
            )
        )
        self._residual = self._cuboid_bounds = None
        if choice._estimates:
            self._cuboid_bounds = build.scratch(
                torch.empty((rows, heads, group, limits.max_units), device=device)
            )
            self._residual = build.scratch(
                torch.empty((rows, heads, group, num_stop_checks(*sizes)), device=device)
            )
        epsilons = torch.full((build.columns.request_slots,), choice.epsilon, device=device)
        self._stop = MassStop(
            build.always, choice.microbatch, choice.share, build.scratch(epsilons), self._residual
        )
        self.counters = LayerCounters(COUNTERS, build.layers, device)

    def plan(self, request_slots: torch.Tensor) -> None:
        """Take the batch's shares from those of all requests."""
        import torch

        out = self._stop.epsilons[: len(request_slots)]
        torch.index_select(self._build.columns["epsilon"], 0, request_slots, out=out)

    def stages(self, layer: int, *, attends: bool) -> list[Stage]:
        import torch

        from sglang_sparse_kernels.step import AttendUntil, BoundResidual, FindStop, Rank

        build, stop = self._build, self._stop
        position = build.layers.index(layer)
        ranked = self._ranked[position % len(self._ranked)]
        # It may be the number of the slot's former request: it changes the time, never the result.
        expected = build.columns.add(
            f"expected.{layer}", (build.pool.head_num,), torch.int32, _EXPECTED_AT_FIRST
        )
        scores = build.scores_of(layer)
        stages: list[Stage] = [Rank(scores, build.always, build.topk, self._selected, ranked)]
        plane = self._score.cuboids(bound=self._choice._bounds) if self._choice._estimates else None
        if plane is not None:
            assert self._cuboid_bounds is not None
            pages = build.cuboids(layer, plane)
            margin = self._choice.margin
            stages.append(BoundResidual(pages, scores, margin, ranked, self._cuboid_bounds, stop))
        kind = AttendUntil if attends else FindStop
        last_stage = kind(stop, ranked, expected, self.counters.row(layer), self._workspace)
        stages.append(build.attend_until(layer, last_stage) if attends else last_stage)
        return stages
