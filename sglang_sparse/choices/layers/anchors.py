# SPDX-License-Identifier: Apache-2.0
"""Layers `anchors`: a few layers select for the layers after them (Kascade, section 3)."""

import shlex
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sglang_sparse.choices.choice import MAX_COUNT, Choice, InvalidConfig, ModelShape
from sglang_sparse.choices.interfaces import LayersChoice
from sglang_sparse.choices.role import Role


def calibration_command(model: str, method: str = "kascade", *, tp: int = 1) -> str:
    """Return the command that measures anchors and head maps for `method` on `model`, a path."""
    ranks = f"--tp {tp} " if tp > 1 else ""
    return (
        f"sglang-sparse calibrate kascade --model {shlex.quote(model)} {ranks}"
        f"--output {method}.json --report {method}-report"
    )


class Reuse(Choice):
    """One reuse layer: the anchor's head whose list each KV head takes (Kascade, section 3.5)."""

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


class Anchors(LayersChoice):
    """A few layers select, and the layers after each attend to its selection (Kascade, section 3).

    The first layer selects, and attends to everything unless `first` says otherwise; the other
    anchors attend to what they select.
    """

    kind: Literal["anchors"] = "anchors"
    anchors: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        description="Layers that select, ascending; the first is 0."
    )
    first: Literal["all", "selection"] = Field(
        default="all",
        description="What the first layer attends to: everything, as in the paper, or what it "
        "selects, as KV in host memory (placement.kind host) asks for.",
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
        if layer_id == 0 and self.first == "all":
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

    def how_to_measure(self, model: str, method: str) -> str:
        return f"run `{calibration_command(model, method)}`, then use --sparse-config {method}.json"

    def check_model(self, model: ModelShape) -> None:
        recalibrate = f"run `{calibration_command(model.name)}`"
        count, heads = model.num_hidden_layers, model.num_key_value_heads
        if self.anchors[-1] >= count:
            raise InvalidConfig(
                f"layers.anchors {list(self.anchors)} are not layers of {model.describe()}",
                allowed=f"layers.anchors from 0 to {count - 1}",
                remedy=recalibrate,
            )
        if self.reuse == "identity":
            return
        mapped = [reuse.layer for reuse in self.reuse]
        if mapped != [i for i in range(count) if i not in self.anchors]:
            raise InvalidConfig(
                f"layers.reuse maps the layers {mapped} of {model.describe()}",
                allowed="one map for each layer that is no anchor, in order",
                remedy=recalibrate,
            )
        for reuse in self.reuse:
            if len(reuse.heads) != heads or not all(0 <= head < heads for head in reuse.heads):
                raise InvalidConfig(
                    f"the heads {list(reuse.heads)} of layer {reuse.layer} in layers.reuse do not "
                    f"fit {model.describe()}",
                    allowed=f"{heads} numbers from 0 to {heads - 1}",
                    remedy=recalibrate,
                )
