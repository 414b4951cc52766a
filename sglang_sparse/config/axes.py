# SPDX-License-Identifier: Apache-2.0
"""The seven axes. Each choice of an axis is one small frozen model whose `kind` names it.

A method is a point on these axes; nothing at run time asks which method it was. What the backend
needs from a choice is a plain attribute here, so that a new choice adds no branch elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_sparse.config.errors import InvalidConfig

PageSize = Literal[16, 32, 64]
# Counts travel in int32 and are added up there; no context comes near this.
MAX_COUNT = 2**24
MILLION = 1_000_000


class Choice(BaseModel):
    """Base of every choice: immutable, unknown keys refused, no silent type conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Role:
    """What one layer does with selections.

    Attributes:
        selects: it scores the context and writes a list.
        source: the layer whose list it attends to; None if it attends to everything.
        heads: for each of its KV heads, the head of `source` whose list it takes; None for its own.
    """

    selects: bool
    source: int | None
    heads: tuple[int, ...] | None = None


class EveryLayer(Choice):
    """Every layer selects for itself."""

    kind: Literal["every"] = "every"

    def role(self, layer_id: int) -> Role:
        """Return what layer `layer_id` (global, from 0) does."""
        return Role(selects=True, source=layer_id)


class FirstDense(Choice):
    """The first `n` layers attend to everything, the others select (SparCas, section 4)."""

    kind: Literal["first_dense"] = "first_dense"
    n: int = Field(ge=1, description="How many layers, counted from the input, stay dense.")

    def role(self, layer_id: int) -> Role:
        """Return what layer `layer_id` (global, from 0) does."""
        if layer_id < self.n:
            return Role(selects=False, source=None)
        return Role(selects=True, source=layer_id)


class Reuse(Choice):
    """One reuse layer: whose list each of its KV heads attends to (Kascade, section 3.5)."""

    layer: int = Field(ge=1, le=MAX_COUNT)
    heads: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        description="For each KV head, the head of the last anchor before this layer."
    )


class Calibration(Choice):
    """Where anchors and head maps come from."""

    prompts: int = Field(ge=1, description="Prompts that similarity was measured on.")
    prompts_sha256: str = Field(
        pattern="^[0-9a-f]{64}$", description="Hash of the prompts, as the calibration read them."
    )
    seed: int
    top_k: int = Field(ge=1, description="Keys a query that similarity compares.")
    tp: int = Field(default=1, ge=1, description="Ranks that head maps may not cross.")
    importance: Literal["cosine", "effect"] = Field(
        default="cosine", description="How a layer's weight in the choice of anchors was measured."
    )


class Anchors(Choice):
    """A few layers select, the layers after each attend to its selection (Kascade, section 3).

    The first layer attends to everything and selects; the other anchors attend to what they select.
    """

    kind: Literal["anchors"] = "anchors"
    anchors: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        description="Layers that select, ascending; the first is 0."
    )
    reuse: Annotated[
        Literal["identity"] | Annotated[tuple[Reuse, ...], Field(strict=False)],
        Field(description="A head map for every other layer; identity: head i takes head i's."),
    ] = "identity"
    calibration: Literal["uncalibrated"] | Calibration = Field(
        default="uncalibrated", description="What anchors and head maps were measured on."
    )

    @model_validator(mode="after")
    def _check_anchors(self) -> Self:
        ascending = all(a < b for a, b in pairwise(self.anchors))
        if self.anchors[:1] != (0,) or not ascending:
            raise InvalidConfig(
                f"layers.anchors {list(self.anchors)} is not an ascending list from 0",
                allowed="0, then layers in ascending order",
                remedy="correct layers.anchors",
            )
        return self

    def role(self, layer_id: int) -> Role:
        """Return what layer `layer_id` (global, from 0) does."""
        if layer_id == 0:
            return Role(selects=True, source=None)
        if layer_id in self.anchors:
            return Role(selects=True, source=layer_id)
        return Role(
            selects=False,
            source=max(anchor for anchor in self.anchors if anchor < layer_id),
            heads=None if self.reuse == "identity" else self._heads(layer_id),
        )

    def _heads(self, layer_id: int) -> tuple[int, ...] | None:
        assert self.reuse != "identity"
        return next((reuse.heads for reuse in self.reuse if reuse.layer == layer_id), None)


class PageMinMax(Choice):
    """Upper bound of q·k over a logical page, from its channel-wise key min and max (Quest)."""

    kind: Literal["page_minmax"] = "page_minmax"
    logical_page: PageSize = Field(
        default=16, description="Tokens that share one min/max pair and are selected together."
    )
    reduce: Literal["max", "sum"] = Field(
        default="max", description="How the query heads of one KV head pool their scores."
    )

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return self.logical_page

    def lists(self, kv_heads: int) -> int:
        """Return how many lists a layer of `kv_heads` KV heads has."""
        return kv_heads

    def scratch(self, group: int) -> int:
        """Return the fp32 scratch a unit and KV head, for `group` query heads a KV head."""
        return 0


class PageMean(Choice):
    """ArkVale's cuboid-mean estimate of the largest q·k over a block (PSA, section 3.1)."""

    kind: Literal["page_mean"] = "page_mean"
    logical_page: PageSize = Field(
        default=32,
        description="Tokens of a block: they share one digest and are selected together.",
    )
    reduce: Literal["max", "sum"] = Field(
        default="max", description="How the query heads of one KV head pool their scores."
    )

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return self.logical_page

    def lists(self, kv_heads: int) -> int:
        """Return how many lists a layer of `kv_heads` KV heads has."""
        return kv_heads

    def scratch(self, group: int) -> int:
        """Return the fp32 scratch a unit and KV head, for `group` query heads a KV head."""
        return 0


class KeySketch(Choice):
    """Partial q·k over the few channels where the query is largest (SparCas, section 3)."""

    kind: Literal["key_sketch"] = "key_sketch"
    channels: int = Field(default=16, ge=1, description="D_b: channels scored for one KV head.")
    refresh_every: int = Field(
        default=64,
        ge=1,
        le=MAX_COUNT,
        description="U: decode steps between two choices of the channels.",
    )
    storage: Literal["fp8", "int8", "int4", "bf16"] = Field(
        default="fp8", description="Element type of the dimension-major copy of the keys."
    )
    reduce: Literal["max", "sum"] = Field(
        default="max", description="How the query heads of one KV head pool their scores."
    )

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return 1

    def lists(self, kv_heads: int) -> int:
        """Return how many lists a layer of `kv_heads` KV heads has."""
        return kv_heads

    def scratch(self, group: int) -> int:
        """Return the fp32 scratch a unit and KV head, for `group` query heads a KV head."""
        return 0


class Exact(Choice):
    """Attention probability itself, added up after the softmax (Kascade, section 3.4)."""

    kind: Literal["exact"] = "exact"
    pool: Literal["group", "heads"] = Field(
        default="group",
        description="Query heads that share a list: those of one KV head, or all of a layer.",
    )

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return 1

    def lists(self, kv_heads: int) -> int:
        """Return how many lists a layer of `kv_heads` KV heads has."""
        return 1 if self.pool == "heads" else kv_heads

    def scratch(self, group: int) -> int:
        """Return the fp32 scratch a unit and KV head, for `group` query heads a KV head."""
        return group


def _check_at_least(key: str, value: float | None, base_key: str, base: float) -> None:
    if value is not None and value < base:
        raise InvalidConfig(
            f"{key} {value} is below {base_key} {base}",
            allowed=f"{key} of at least {base}, or null",
            remedy=f"raise {key}, or lower {base_key}",
        )


class TokenBudget(Choice):
    """A fixed number of selected tokens for every request, layer and KV head."""

    kind: Literal["tokens"] = "tokens"
    tokens: int = Field(
        ge=1, le=MAX_COUNT, description="Selected tokens, sinks and recent ones among them."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Most that one request may ask for; null allows no more than `tokens`.",
    )

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        _check_at_least("budget.max_tokens", self.max_tokens, "budget.tokens", self.tokens)
        return self

    @property
    def key(self) -> str:
        """The key that a request's budget replaces."""
        return "tokens"

    @property
    def amount(self) -> int:
        """The number that names this budget in a list."""
        return self.tokens

    @property
    def largest(self) -> TokenBudget:
        """The budget at the most that a request may ask for; buffers are sized for it."""
        return TokenBudget(tokens=self.max_tokens or self.tokens)

    def request_range(self, least_tokens: int) -> tuple[int, int]:
        """Return the least and the most tokens that a request may ask for."""
        return least_tokens, self.largest.tokens

    def asked(self, value: float) -> TokenBudget:
        """Return the budget of a request that asks for `value` tokens, a whole number."""
        return TokenBudget.model_validate({"tokens": value})

    @property
    def floor(self) -> int:
        """Fewest tokens to select."""
        return self.tokens

    @property
    def fraction(self) -> float:
        """Share of the context to select; 0 because this budget is all floor."""
        return 0.0


class FractionBudget(Choice):
    """A share of the context, never less than a floor."""

    kind: Literal["fraction"] = "fraction"
    fraction: float = Field(
        ge=1 / MILLION, le=1.0, description="Share of the context to select, to one millionth."
    )
    floor: int = Field(ge=1, le=MAX_COUNT, description="Fewest tokens to select.")
    max_fraction: float | None = Field(
        default=None,
        ge=1 / MILLION,
        le=1.0,
        description="Most that one request may ask for; null allows no more than `fraction`.",
    )

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        _check_at_least("budget.max_fraction", self.max_fraction, "budget.fraction", self.fraction)
        return self

    @property
    def key(self) -> str:
        """The key that a request's budget replaces."""
        return "fraction"

    @property
    def amount(self) -> float:
        """The number that names this budget in a list."""
        return self.fraction

    @property
    def largest(self) -> FractionBudget:
        """The budget at the most that a request may ask for; buffers are sized for it."""
        return self.asked(self.max_fraction or self.fraction)

    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the least and the largest share that a request may ask for."""
        return 1 / MILLION, self.largest.fraction

    def asked(self, value: float) -> FractionBudget:
        """Return the budget of a request that asks for the share `value`; the floor stays."""
        return FractionBudget(fraction=float(value), floor=self.floor)


class MassBudget(Choice):
    """As much as it takes to reach a share of the attention mass (PSA, section 3.2).

    Units are attended to in the order of their scores, a microbatch at a time, until the estimated
    share of the mass that was reached is at least `epsilon`.
    """

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

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        _check_at_least("budget.max_epsilon", self.max_epsilon, "budget.epsilon", self.epsilon)
        return self

    @property
    def key(self) -> str:
        """The key that a request's budget replaces."""
        return "epsilon"

    @property
    def amount(self) -> float:
        """The number that names this budget in a list."""
        return self.epsilon

    @property
    def largest(self) -> MassBudget:
        """The budget at the most that a request may ask for; all rank as much."""
        return self.asked(self.max_epsilon or self.epsilon)

    def request_range(self, least_tokens: int) -> tuple[float, float]:
        """Return the least and the largest share that a request may ask for."""
        return 1 / MILLION, self.largest.epsilon

    def asked(self, value: float) -> MassBudget:
        """Return the budget of a request that is to reach the share `value`."""
        return self.model_copy(update={"epsilon": float(value), "max_epsilon": None})

    @property
    def floor(self) -> int:
        """Fewest tokens to rank: as many as may be attended to."""
        return self.cap

    @property
    def fraction(self) -> float:
        """Share of the context to rank; 0 because the cap is all floor."""
        return 0.0


class RetrievalHeads(Choice):
    """Every KV head selects from the whole context."""

    kind: Literal["retrieval"] = "retrieval"


class StepCadence(Choice):
    """Selection is redone every `every` decode steps; tokens decoded since are always kept."""

    kind: Literal["steps"] = "steps"
    every: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Decode steps that share one selection."
    )


class RetainAll(Choice):
    """All KV stays in the pool."""

    kind: Literal["all"] = "all"


class DensePrefill(Choice):
    """Prompt tokens attend to everything before them."""

    kind: Literal["dense"] = "dense"

    @property
    def sparse_from(self) -> None:
        """First position that may attend sparsely; None for none."""
        return None


class TilePrefill(Choice):
    """Tiles of prompt tokens attend to their best tokens and to themselves (Kascade, 3.4)."""

    kind: Literal["tile_topk"] = "tile_topk"
    fraction: float = Field(
        ge=1 / MILLION, le=1.0, description="Share of the tokens before a tile, to one millionth."
    )
    floor: int = Field(default=128, ge=1, le=MAX_COUNT, description="Fewest tokens a tile selects.")
    min_tokens: int = Field(
        default=4096, ge=1, le=MAX_COUNT, description="Tiles that start before this are dense."
    )
    tile: Literal[128] = Field(
        default=128, description="Queries a tile, those of the heads of a group counted in."
    )

    @property
    def sparse_from(self) -> int:
        """First position that may attend sparsely."""
        return self.min_tokens


Layers = Annotated[EveryLayer | FirstDense | Anchors, Field(discriminator="kind")]
Score = Annotated[PageMinMax | PageMean | KeySketch | Exact, Field(discriminator="kind")]
Budget = Annotated[TokenBudget | FractionBudget | MassBudget, Field(discriminator="kind")]
Prefill = Annotated[DensePrefill | TilePrefill, Field(discriminator="kind")]


def budget_tokens(budget: Budget, context_len: int) -> int:
    """Return how many tokens `budget` keeps of a context of `context_len` tokens."""
    # In integers, as on the device: a float product could differ by one token from what is planned.
    share = context_len * round(budget.fraction * MILLION)
    return max(budget.floor, -(-share // MILLION))
