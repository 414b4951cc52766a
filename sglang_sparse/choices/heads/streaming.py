# SPDX-License-Identifier: Apache-2.0
"""Heads `streaming`: some KV heads attend to sinks and a local window, the others select.

DuoAttention (arXiv 2410.10819), LServe (arXiv 2502.14866, section 3.3).
"""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sglang_sparse.choices.choice import MAX_COUNT, Choice, InvalidConfig, ModelShape
from sglang_sparse.choices.heads._files import read_heads
from sglang_sparse.choices.interfaces import HeadsChoice, Point


def heads_command(model: str) -> str:
    """Return the command that finds the streaming heads of a model."""
    outputs = "--output lserve.json --report lserve-report"
    return f"sglang-sparse calibrate lserve --model {shlex.quote(model)} {outputs}"


class HeadsModel(Choice):
    """The model that heads were found on, as far as it is known."""

    name: str = Field(min_length=1, description="For messages only; never compared.")
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int | None = Field(default=None, ge=1)

    def fits(self, model: ModelShape) -> bool:
        """Tell whether `model` has the numbers that are known."""
        return all(
            getattr(self, key) in (None, getattr(model, key))
            for key in type(self).model_fields
            if key != "name"
        )


class HeadsCalibration(Choice):
    """How streaming heads were found."""

    finder: Literal["gradient", "gates"] = Field(description="As `--finder`.")
    prompts: int = Field(ge=1, description="Prompts that heads were measured on.")
    prompts_sha256: str = Field(pattern="^[0-9a-f]{64}$", description="Hash of the prompts.")
    seed: int
    sparsity: float = Field(gt=0.0, lt=1.0, description="Share of the heads that stream.")
    equal_per_layer: bool = Field(
        default=False, description="As many heads stream in every layer, and on every rank."
    )
    tp: int = Field(default=1, ge=1, description="Ranks that the heads are balanced over.")


class StreamingHeads(HeadsChoice):
    """Some KV heads attend to sinks and a local window, the others to what is selected (LServe).

    A request streams where it is sparse: below `min_sparse_tokens`, and in layers that attend to
    everything, all heads do. Prompts stream under prefill `block_bounds` alone.
    Under retention `streaming_window` these heads always stream.
    """

    kind: Literal["streaming"] = "streaming"
    sink: int = Field(
        default=128, ge=0, le=MAX_COUNT, description="First tokens that a streaming head sees."
    )
    local: int = Field(
        default=1024, ge=1, le=MAX_COUNT, description="Last tokens that a streaming head sees."
    )
    prompt_local: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Last tokens that it sees in prompts, under prefill `block_bounds`; null for "
        "`local`.",
    )
    file: str | None = Field(
        default=None,
        description="JSON of the keys of this table, or TSV of DuoAttention's gates; a relative "
        "path begins at the config's own folder. Takes the place of `streaming`.",
    )
    sparsity: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="Share of the heads that stream, by the gates of a TSV; null for half.",
    )
    streaming: Annotated[
        tuple[Annotated[tuple[int, ...], Field(strict=False)], ...], Field(strict=False)
    ] = Field(default=(), description="KV heads that stream, a list for each layer of the model.")
    model: HeadsModel | None = Field(
        default=None, description="The model that the heads were found on."
    )
    calibration: Literal["uncalibrated", "published"] | HeadsCalibration = Field(
        default="uncalibrated",
        description="How the heads were found; published: from gates that others measured on the "
        "model.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, content: Any) -> Any:
        """Put what the file holds in its place, so that a config needs no file from then on."""
        if not isinstance(content, dict) or not isinstance(content.get("file"), str):
            return content
        sparsity = content.get("sparsity")
        found = read_heads(Path(content["file"]), sparsity if isinstance(sparsity, float) else None)
        own = {"model": None, "calibration": "uncalibrated", **found}
        windows = {key: content[key] for key in ("sink", "local", "prompt_local") if key in content}
        return {**content, **own, **windows, "file": None}

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if not self.streaming:
            raise InvalidConfig(
                "heads.kind streaming without heads",
                allowed="heads.file, or heads.streaming with a list for each layer",
                remedy="set heads.file, for example to the TSV in the report of `sglang-sparse "
                "calibrate lserve`",
            )
        for layer, heads in enumerate(self.streaming):
            if len(set(heads)) != len(heads) or any(head < 0 for head in heads):
                raise InvalidConfig(
                    f"heads.streaming lists the heads {list(heads)} of layer {layer}",
                    allowed="each head of a layer once, from 0 on",
                    remedy="correct heads.streaming",
                )
        return self

    @property
    def window(self) -> tuple[int, int]:
        return self.sink, self.local

    @property
    def prompt_window(self) -> tuple[int, int]:
        return self.sink, self.local if self.prompt_local is None else self.prompt_local

    def streams_in(self, layer_id: int) -> tuple[int, ...]:
        return self.streaming[layer_id] if layer_id < len(self.streaming) else ()

    def how_to_measure(self, model: str, method: str) -> str:
        return (
            f"run `{heads_command(model)}`, then use --sparse-config lserve.json; or set "
            "heads.file to a TSV of DuoAttention's gates of the model"
        )

    def check(self, point: Point) -> None:
        if self.prompt_local is not None and not point.prefill.has_windows:
            raise InvalidConfig(
                f"heads.prompt_local {self.prompt_local} with prefill.kind {point.prefill.kind}, "
                "under which no head streams in prompts",
                allowed="heads.prompt_local with prefill.kind block_bounds",
                remedy="drop heads.prompt_local, or set prefill",
            )
        for key in ("sink", "local", "prompt_local"):
            tokens = getattr(self, key) or 0
            if tokens % point.page_size:
                next_one = -(-tokens // point.page_size) * point.page_size
                raise InvalidConfig(
                    f"heads.{key} {tokens} is no multiple of page_size {point.page_size}",
                    allowed=f"heads.{key} a multiple of {point.page_size}",
                    remedy=f"raise heads.{key} to {next_one}",
                )
        if point.budget.stops_by_attending:
            self._check_lists_are_attended_to(point)

    def _check_lists_are_attended_to(self, point: Point) -> None:
        for layer, streaming in enumerate(self.streaming):
            role = point.layers.role(layer)
            if role.selects or role.source is None:
                continue
            if point.layers.role(role.source).source is None:
                continue  # that layer attends to no list, and only finds where each stops
            of_source = self.streams_in(role.source)
            lists = enumerate(role.heads) if role.heads else ((head, head) for head in of_source)
            for head, taken in lists:
                if head not in streaming and taken in of_source:
                    raise InvalidConfig(
                        f"head {head} of layer {layer} takes the list of head {taken} of layer "
                        f"{role.source}, which streams, and budget {point.budget.kind} finds where "
                        "a list stops by attending to it",
                        allowed="lists of heads that do not stream, or budget tokens or fraction",
                        remedy="let both heads stream, or neither, or choose another budget",
                    )

    def check_model(self, model: ModelShape) -> None:
        remedy = f"correct heads.file or heads.streaming, or run `{heads_command(model.name)}`"
        if self.model is not None and not self.model.fits(model):
            raise InvalidConfig(
                f"the heads are of {self.model.name} ({self.model.num_hidden_layers} layers, "
                f"{self.model.num_key_value_heads} KV heads), not of {model.describe()}",
                allowed="heads that were found on a model of the same numbers",
                remedy=remedy,
            )
        if len(self.streaming) != model.num_hidden_layers:
            raise InvalidConfig(
                f"heads.streaming has {len(self.streaming)} layers, unlike {model.describe()}",
                allowed=f"a list for each of {model.num_hidden_layers} layers",
                remedy=remedy,
            )
        heads = model.num_key_value_heads
        for layer, streaming in enumerate(self.streaming):
            if any(head >= heads for head in streaming):
                raise InvalidConfig(
                    f"heads.streaming lists the heads {list(streaming)} of layer {layer}, more "
                    f"than there are in {model.describe()}",
                    allowed=f"heads 0 to {heads - 1}",
                    remedy=remedy,
                )
