# SPDX-License-Identifier: Apache-2.0
"""Calibrates Kascade: measures a model, chooses anchors and head maps, writes presets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_sparse.calibrate.anchors import choose_anchors, map_heads, mapped_similarity
from sglang_sparse.calibrate.capture import Capture, Importance
from sglang_sparse.calibrate.outputs import (
    STATE,
    fingerprint,
    open_outputs,
    resume,
    save_state,
    write_preset,
)
from sglang_sparse.calibrate.prompts import Prompts, load_prompts
from sglang_sparse.calibrate.report import Measured, write_report
from sglang_sparse.calibrate.similarity import prompt_similarity
from sglang_sparse.config import Anchors, Calibration, ConfigError, Geometry, Reuse

METHOD = "kascade"  # whose settings a new preset takes, unless its file is named for another


@dataclass(frozen=True)
class Settings:
    """Settings of a calibration.

    Attributes:
        model: folder or hub name.
        prompts: JSON Lines file, or None for generated prompts.
        anchors: number of layers that select, layer 0 included.
        outputs: presets to write; only their layers and geometry are changed.
        report: folder of tables and pictures, and of the state of an interrupted run.
        count, max_tokens: number of prompts, and most tokens of each.
        top_k: keys that each query selects when similarity is measured.
        tp: tensor-parallel ranks, which head maps may not cross.
        importance: see :meth:`Capture.run`.
        seed: seed of the prompts.
        device: "cpu" or "cuda".
    """

    model: str
    prompts: Path | None
    anchors: int
    outputs: Sequence[Path]
    report: Path
    count: int = 24
    max_tokens: int = 8192
    top_k: int = 64
    tp: int = 1
    importance: Importance = "cosine"
    seed: int = 0
    device: str = "cpu"


@dataclass
class Sums:
    """Sums over the prompts done so far, fp64."""

    done: int
    importance: torch.Tensor
    layers: torch.Tensor
    heads: torch.Tensor
    head_means: torch.Tensor

    @classmethod
    def zeros(cls, geometry: Geometry) -> Sums:
        """Nothing done yet."""
        count, heads = geometry.num_hidden_layers, geometry.num_key_value_heads
        by_head = (count, count, heads, heads)
        shapes = ((count,), (count, count), by_head, by_head)
        return cls(0, *(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def means(self, ranks: int) -> Measured:
        """Means over the prompts, and the head maps that follow from them."""
        importance, averaged, heads, head_means = (
            (total / self.done).numpy()
            for total in (self.importance, self.layers, self.heads, self.head_means)
        )
        maps = map_heads(head_means, ranks)
        mapped = mapped_similarity(heads, maps)
        return Measured(importance, averaged, head_means, maps, mapped)


def calibrate(settings: Settings, console: Console) -> Anchors:
    """Measure, choose and write; continues an interrupted run of the same settings.

    Raises:
        ConfigError: the model, the prompts, an output or a number cannot be used.
    """
    bases = open_outputs(settings.outputs, settings.report, "layers", METHOD)
    capture = Capture(settings.model, settings.device)
    geometry = capture.geometry
    _check_numbers(settings, geometry)
    prompts = load_prompts(
        settings.prompts,
        capture.tokenizer,
        count=settings.count,
        min_tokens=2 * settings.top_k,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )
    sums = _measure(settings, capture, prompts, console)
    measured = sums.means(settings.tp)
    layers = choose(settings, measured, sums.done, prompts.sha256)
    write_report(settings.report, layers, measured)
    for path, base in bases:
        write_preset(path, base, "layers", layers, geometry)
    (settings.report / STATE).unlink(missing_ok=True)
    return layers


def choose(settings: Settings, measured: Measured, prompts: int, prompts_sha256: str) -> Anchors:
    """Anchors and head maps from what was measured on so many prompts."""
    anchors = choose_anchors(measured.mapped, measured.importance, settings.anchors)
    reuse = []
    for layer in range(len(measured.importance)):
        source = max(anchor for anchor in anchors if anchor <= layer)
        if source != layer:
            reuse.append(Reuse(layer=layer, heads=tuple(map(int, measured.maps[source, layer]))))
    return Anchors(
        anchors=tuple(anchors),
        reuse=tuple(reuse),
        calibration=Calibration(
            prompts=prompts,
            prompts_sha256=prompts_sha256,
            seed=settings.seed,
            top_k=settings.top_k,
            tp=settings.tp,
            importance=settings.importance,
        ),
    )


def _measure(settings: Settings, capture: Capture, prompts: Prompts, console: Console) -> Sums:
    state = settings.report / STATE
    mark = fingerprint(
        settings.model,
        {
            "prompts": hashlib.sha256(json.dumps(prompts.ids).encode()).hexdigest(),
            "top_k": settings.top_k,
            "importance": settings.importance,
            "device": settings.device,
        },
    )
    saved = resume(state, mark)
    sums = Sums.zeros(capture.geometry) if saved is None else Sums(**saved)
    if sums.done:
        console.print(f"resuming after {sums.done} of {len(prompts.ids)} prompts")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        total = sum(map(len, prompts.ids))
        task = progress.add_task("tokens", total=total)
        progress.advance(task, sum(map(len, prompts.ids[: sums.done])))
        for ids in prompts.ids[sums.done :]:
            layers, importance = capture.run(ids, settings.importance)
            found = prompt_similarity(
                layers,
                settings.top_k,
                advance=lambda queries: progress.advance(task, queries),
            )
            sums.importance += torch.tensor(importance, dtype=torch.float64)
            sums.layers += found.layers
            sums.heads += found.heads
            sums.head_means += found.head_means
            sums.done += 1
            save_state(state, mark, asdict(sums))
    return sums


def _check_numbers(settings: Settings, geometry: Geometry) -> None:
    heads = geometry.num_key_value_heads
    rules = (
        ("--anchors", settings.anchors, 1, geometry.num_hidden_layers, True),
        ("--count", settings.count, 1, 10_000, True),
        ("--top-k", settings.top_k, 1, settings.max_tokens // 2, True),
        ("--tp", settings.tp, 1, heads, settings.tp > 0 and heads % settings.tp == 0),
    )
    for flag, value, low, high, divides in rules:
        if not (low <= value <= high and divides):
            raise ConfigError(
                flag=flag,
                value=str(value),
                problem=f"it does not suit {geometry.describe()}",
                allowed=f"{low} to {high}" + ("" if divides else f", a divisor of {heads}"),
                remedy="correct it",
            )
