# SPDX-License-Identifier: Apache-2.0
"""`SparseConfig`: a choice on each axis, what all choices share, and the rules between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sglang_sparse.choices.cadence import StepCadence
from sglang_sparse.choices.choice import MAX_COUNT, Choice, InvalidConfig, PageSize
from sglang_sparse.choices.heads.retrieval import RetrievalHeads
from sglang_sparse.choices.placement.device import OnDevice
from sglang_sparse.choices.prefill.dense import DensePrefill
from sglang_sparse.choices.retention.everything import KeepAll
from sglang_sparse.config.axes import (
    Budget,
    Heads,
    Layers,
    Placement,
    Prefill,
    Retention,
    Score,
    budget_tokens,
)
from sglang_sparse.config.errors import shorten


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
    """One point on the eight axes, with what all points share. Frozen, so it can key a cache.

    Selection semantics are those of `DESIGN.md`: a list holds the best units of the domain, as many
    as `budget.list_size` says, always with the sinks and the recent tokens among them.
    """

    schema_version: Literal[1] = 1
    description: str = ""
    model: Geometry | None = Field(
        default=None, description="The only geometry this config is for; null fits every model."
    )

    layers: Layers
    heads: Heads = RetrievalHeads()
    score: Score
    budget: Budget
    cadence: StepCadence = StepCadence()
    prefill: Prefill = DensePrefill()
    retention: Retention = KeepAll()
    placement: Placement = OnDevice()

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
        """Most units that sinks and recent tokens can touch, for any length of the context."""
        sinks = -(-self.sink_tokens // self.unit)
        recent = (self.recent_tokens + self.unit - 2) // self.unit + 1
        return sinks + recent

    @property
    def least_tokens(self) -> int:
        """Smallest budget in tokens: sinks, recent tokens, and one unit more."""
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
        """Return the ids of the layers that select, of a model with `num_layers` layers."""
        return tuple(i for i in range(num_layers) if self.layers.role(i).selects)

    @model_validator(mode="after")
    def _check_rules_between_keys(self) -> Self:
        self.retention.check(self)
        self._check_page_holds_whole_units()
        self._check_budget_holds_forced_tokens()
        self.heads.check(self)
        self.budget.check(self)
        self.prefill.check(self)
        self.placement.check(self)
        if self.model is not None:
            check_fits(self, self.model)
        return self

    def _check_page_holds_whole_units(self) -> None:
        if self.page_size % self.unit:
            key = f"score.{self.score.unit_key}"
            raise InvalidConfig(
                f"{key} {self.unit} does not divide page_size {self.page_size}",
                allowed=f"page_size a multiple of {key} {self.unit}",
                remedy=f"raise page_size, or lower {key}",
            )

    def _check_budget_holds_forced_tokens(self) -> None:
        smallest, (tokens, _) = self.least_tokens, self.budget.list_size
        if tokens >= smallest:
            return
        key = f"budget.{self.budget.list_key}"
        raise InvalidConfig(
            f"{key} {tokens} cannot hold sink_tokens {self.sink_tokens} and "
            f"recent_tokens {self.recent_tokens} in units of {self.unit}, and one unit more",
            allowed=f"{key} of at least {smallest}",
            remedy=f"raise {key}, or lower sink_tokens or recent_tokens",
        )


def check_fits(config: SparseConfig, geometry: Geometry) -> None:
    """Check the rules between a config and the model that it is to run on.

    Raises:
        InvalidConfig: the config asks for more layers, heads or channels than the model has.
    """
    config.heads.check_model(geometry)
    config.score.check_model(geometry)
    config.layers.check_model(geometry)
    config.retention.check_model(config, geometry)
    config.placement.check_model(config, geometry)


def preset_hash(config: SparseConfig) -> str:
    """Return 12 hexadecimal digits that change with anything in `config` but its description."""
    skipped: dict[str, Any] = {"description": True}
    # What came later is left out where it is as if it were not there, so that hashes stay.
    if config.retention == KeepAll():
        skipped["retention"] = True
    if config.placement == OnDevice():
        skipped["placement"] = True
    if config.heads == RetrievalHeads():
        skipped["heads"] = True
    elif getattr(config.heads, "prompt_local", None) is None:
        skipped["heads"] = {"prompt_local"}
    if getattr(config.score, "select", None) is None:
        skipped["score"] = {"select"}
    content = config.model_dump(mode="json", exclude=skipped)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
