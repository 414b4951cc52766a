# SPDX-License-Identifier: Apache-2.0
"""`SparseConfig`: a choice on each axis, what all choices share, and the rules between them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sglang_sparse.config.axes import (
    MAX_COUNT,
    Anchors,
    Budget,
    Choice,
    DensePrefill,
    FirstDense,
    KeySketch,
    Layers,
    MassBudget,
    PageSize,
    Prefill,
    RetainAll,
    RetrievalHeads,
    Score,
    StepCadence,
    TilePrefill,
    budget_tokens,
)
from sglang_sparse.config.errors import InvalidConfig, shorten

# The key of each budget that says how much a list holds at least.
_LEAST_KEYS = {"tokens": "tokens", "fraction": "floor", "mass": "cap"}
# One program of the device sorts all ranked units of a KV head.
MOST_RANKED_UNITS = 4096


class Geometry(Choice):
    """The shape of a model's attention: what decides whether a preset fits a model."""

    name: str = Field(min_length=1, description="For messages only; never compared.")
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)

    @classmethod
    def from_hf_config(cls, config: object, *, name: str) -> Geometry:
        """Read the geometry from the content of a Hugging Face `config.json`.

        Raises:
            ValueError: it is no object, or lacks a layer, head or size count; one line.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"it holds a JSON {type(config).__name__}, not an object")
        heads = _count(config, "num_attention_heads")
        kv_heads, dim = config.get("num_key_value_heads"), config.get("head_dim")
        return cls(
            name=name,
            num_hidden_layers=_count(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=heads
            if kv_heads is None
            else _count(config, "num_key_value_heads"),
            head_dim=_head_dim(config, heads) if dim is None else _count(config, "head_dim"),
        )

    def matches(self, other: Geometry) -> bool:
        """Tell whether both are the same but for the name."""
        return self.shape == other.shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, query heads, KV heads and head dimension."""
        return (
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        )

    def describe(self) -> str:
        """Return the geometry in words, for messages."""
        layers, heads, kv_heads, dim = self.shape
        return f"{self.name} ({layers} layers, {heads} query and {kv_heads} KV heads of {dim})"


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {shorten(repr(value))}, not a whole number from 1 on")
    return value


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    size = _count(config, "hidden_size")
    if size < heads:
        raise ValueError(f"hidden_size {size} holds no dimension for each of {heads} heads")
    return size // heads


class SparseConfig(Choice):
    """One point on the seven axes, with what all points share. Frozen, so it can key a cache.

    Selection semantics are those of `DESIGN.md`: a step of a request of L tokens selects
    `max(budget.floor, ceil(budget.fraction * domain))` tokens, in units of `unit` tokens, always
    with the sinks and the recent ones among them.
    """

    schema_version: Literal[1] = 1
    description: str = ""
    model: Geometry | None = Field(
        default=None, description="The only geometry this config is for; null fits every model."
    )

    layers: Layers
    score: Score
    budget: Budget
    heads: RetrievalHeads = RetrievalHeads()
    cadence: StepCadence = StepCadence()
    retention: RetainAll = RetainAll()
    prefill: Prefill = DensePrefill()

    sink_tokens: int = Field(
        default=16, ge=0, le=MAX_COUNT, description="First tokens, always attended to."
    )
    recent_tokens: int = Field(
        default=64, ge=0, le=MAX_COUNT, description="Last tokens, always attended to."
    )
    min_sparse_tokens: int = Field(
        default=4096, ge=1, le=MAX_COUNT, description="Requests shorter than this attend densely."
    )
    page_size: PageSize = Field(default=64, description="Tokens in a page of SGLang's KV pool.")
    inner: Literal["auto", "flashinfer", "triton", "torch_native"] = Field(
        default="auto", description="Dense backend for prefill and for short requests."
    )

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return self.score.unit

    @property
    def forced_units(self) -> int:
        """Most units that sinks and recent tokens can touch, wherever the context ends."""
        sinks = -(-self.sink_tokens // self.unit)
        recent = (self.recent_tokens + self.unit - 2) // self.unit + 1
        return sinks + recent

    @property
    def least_tokens(self) -> int:
        """Fewest tokens a budget may hold: sinks, recent tokens, and one unit more."""
        return (self.forced_units + 1) * self.unit

    @property
    def request_range(self) -> tuple[float, float]:
        """Least and largest budget that a request may ask for."""
        return self.budget.request_range(self.least_tokens)

    def capacity_units(self, context_len: int) -> int:
        """Return the most units that a request of `context_len` tokens can select."""
        tokens = min(budget_tokens(self.budget.largest, context_len), context_len)
        return -(-tokens // self.unit)

    def selecting_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the ids of the layers, of `num_layers`, that select."""
        return tuple(i for i in range(num_layers) if self.layers.role(i).selects)

    @model_validator(mode="after")
    def _check_rules_between_keys(self) -> Self:
        self._check_page_holds_whole_units()
        self._check_budget_holds_forced_tokens()
        if isinstance(self.budget, MassBudget):
            self._check_mass(self.budget)
        if self.model is not None:
            check_fits(self, self.model)
        return self

    def _check_page_holds_whole_units(self) -> None:
        if self.page_size % self.unit:
            raise InvalidConfig(
                f"score.logical_page {self.unit} does not divide page_size {self.page_size}",
                allowed=f"page_size a multiple of score.logical_page {self.unit}",
                remedy="raise page_size, or lower score.logical_page",
            )

    def _check_budget_holds_forced_tokens(self) -> None:
        if isinstance(self.prefill, TilePrefill):
            least = self.sink_tokens + self.recent_tokens + 1
            if self.prefill.floor < least:
                raise InvalidConfig(
                    f"prefill.floor {self.prefill.floor} cannot hold sink_tokens "
                    f"{self.sink_tokens}, recent_tokens {self.recent_tokens} and one token more",
                    allowed=f"prefill.floor of at least {least}",
                    remedy="raise prefill.floor, or lower sink_tokens or recent_tokens",
                )
        least = self.least_tokens
        if self.budget.floor >= least:
            return
        key = f"budget.{_LEAST_KEYS[self.budget.kind]}"
        raise InvalidConfig(
            f"{key} {self.budget.floor} cannot hold sink_tokens {self.sink_tokens} and "
            f"recent_tokens {self.recent_tokens} in units of {self.unit}, and one unit more",
            allowed=f"{key} of at least {least}",
            remedy=f"raise {key}, or lower sink_tokens or recent_tokens",
        )

    def _check_mass(self, budget: MassBudget) -> None:
        if budget.microbatch % self.unit:
            raise InvalidConfig(
                f"budget.microbatch {budget.microbatch} is no whole number of units of {self.unit}",
                allowed=f"budget.microbatch a multiple of {self.unit}, at most 128",
                remedy="raise budget.microbatch, or lower score.logical_page",
            )
        if budget.cap > MOST_RANKED_UNITS * self.unit:
            raise InvalidConfig(
                f"budget.cap {budget.cap} ranks more than {MOST_RANKED_UNITS} units of {self.unit}",
                allowed=f"budget.cap of at most {MOST_RANKED_UNITS * self.unit}",
                remedy="lower budget.cap, or score pages of more tokens",
            )
        if self.score.kind == "exact" and self.score.pool == "heads":
            raise InvalidConfig(
                "score.pool heads makes one list a layer, and budget mass stops each KV head's own",
                allowed="score.pool group with budget mass",
                remedy="set score.pool to group, or choose another budget",
            )
        if budget.margin and budget.estimator != "scored":
            raise InvalidConfig(
                f"budget.margin {budget.margin} lowers scores, budget.estimator is "
                f"{budget.estimator}",
                allowed="budget.margin 0 unless budget.estimator is scored",
                remedy="set budget.estimator to scored, or leave out budget.margin",
            )
        if budget.estimator == "observed_min":
            return
        if self.score.kind not in ("page_minmax", "page_mean"):
            raise InvalidConfig(
                f"budget.estimator {budget.estimator} needs bounds of pages, score is "
                f"{self.score.kind}",
                allowed=f"budget.estimator {budget.estimator} with score page_minmax or page_mean",
                remedy="set budget.estimator to observed_min",
            )
        if self.cadence.every > 1:
            raise InvalidConfig(
                f"budget.estimator {budget.estimator} bounds scored pages, cadence.every "
                f"{self.cadence.every} scores them at some steps alone",
                allowed=f"cadence.every 1 with budget.estimator {budget.estimator}",
                remedy="set cadence.every to 1, or budget.estimator to observed_min",
            )


def check_fits(config: SparseConfig, geometry: Geometry) -> None:
    """Check the rules between a config and the model that it is to run on.

    Raises:
        InvalidConfig: the config asks for more layers or channels than the model has.
    """
    if isinstance(config.score, KeySketch) and config.score.channels > geometry.head_dim:
        raise InvalidConfig(
            f"score.channels {config.score.channels} exceeds the head dimension of "
            f"{geometry.describe()}",
            allowed=f"score.channels 1 to {geometry.head_dim}",
            remedy="lower score.channels",
        )
    if isinstance(config.layers, FirstDense) and config.layers.n >= geometry.num_hidden_layers:
        raise InvalidConfig(
            f"layers.n {config.layers.n} leaves no sparse layer in {geometry.describe()}",
            allowed=f"layers.n 1 to {geometry.num_hidden_layers - 1}",
            remedy="lower layers.n, or serve with a dense attention backend",
        )
    if isinstance(config.layers, Anchors):
        _check_anchors_fit(config.layers, geometry)


def calibration_command(model: str, method: str = "kascade", *, tp: int = 1) -> str:
    """Return the command that measures anchors and head maps for `method` on `model`, a path."""
    ranks = f"--tp {tp} " if tp > 1 else ""
    return (
        f"sglang-sparse calibrate kascade --model {shlex.quote(model)} {ranks}"
        f"--output {method}.json --report {method}-report"
    )


def _check_anchors_fit(layers: Anchors, geometry: Geometry) -> None:
    recalibrate = f"run `{calibration_command(geometry.name)}`"
    count, heads = geometry.num_hidden_layers, geometry.num_key_value_heads
    if layers.anchors[-1] >= count:
        raise InvalidConfig(
            f"layers.anchors {list(layers.anchors)} are not layers of {geometry.describe()}",
            allowed=f"layers.anchors from 0 to {count - 1}",
            remedy=recalibrate,
        )
    if layers.reuse == "identity":
        return
    mapped = [reuse.layer for reuse in layers.reuse]
    if mapped != [i for i in range(count) if i not in layers.anchors]:
        raise InvalidConfig(
            f"layers.reuse maps the layers {mapped} of {geometry.describe()}",
            allowed="one map for each layer that is no anchor, in order",
            remedy=recalibrate,
        )
    for reuse in layers.reuse:
        if len(reuse.heads) != heads or not all(0 <= head < heads for head in reuse.heads):
            raise InvalidConfig(
                f"the heads {list(reuse.heads)} of layer {reuse.layer} in layers.reuse do not fit "
                f"{geometry.describe()}",
                allowed=f"{heads} numbers from 0 to {heads - 1}",
                remedy=recalibrate,
            )


def preset_hash(config: SparseConfig) -> str:
    """Return 12 hexadecimal digits that change with anything in `config` but its description."""
    content = config.model_dump(mode="json", exclude={"description"})
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
