# SPDX-License-Identifier: Apache-2.0
"""Calibrates Kascade: measures a model, chooses anchors and head maps, writes presets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_sparse.calibrate.anchors import choose_anchors, map_heads, mapped_similarity
from sglang_sparse.calibrate.capture import Capture, Importance
from sglang_sparse.calibrate.files import replacing
from sglang_sparse.calibrate.prompts import Prompts, load_prompts
from sglang_sparse.calibrate.report import Measured, write_report
from sglang_sparse.calibrate.similarity import prompt_similarity
from sglang_sparse.config import (
    PATTERN_MODEL,
    Anchors,
    Calibration,
    ConfigError,
    Geometry,
    Reuse,
    SparseConfig,
    list_presets,
    load_preset,
)
from sglang_sparse.config.presets import PresetFileError, read_json_file

STATE = "unfinished.pt"
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
    bases = [(path, _base(path)) for path in settings.outputs]
    for flag, path in (
        ("--report", settings.report / STATE), *(("--output", path) for path in settings.outputs)
    ):  # fmt: skip
        _check_writable(flag, path)
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
        _write_preset(path, base, layers, geometry)
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
    fingerprint = _fingerprint(settings, prompts)
    sums = _resume(state, fingerprint) or Sums.zeros(capture.geometry)
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
            with replacing(state) as draft:
                torch.save({"fingerprint": fingerprint, **asdict(sums)}, draft)
    return sums


def _fingerprint(settings: Settings, prompts: Prompts) -> str:
    """The inputs that sums depend on: model files, prompts, and settings of the measurement."""
    folder = Path(settings.model)
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    facts = {
        "model": settings.model,
        "files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files],
        "prompts": hashlib.sha256(json.dumps(prompts.ids).encode()).hexdigest(),
        "top_k": settings.top_k,
        "importance": settings.importance,
        "device": settings.device,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _resume(state: Path, fingerprint: str) -> Sums | None:
    """The sums that an interrupted run of the same fingerprint left, or None."""
    if not state.is_file():
        return None
    try:
        saved: dict[str, Any] = torch.load(state, weights_only=True)
        return Sums(**saved) if saved.pop("fingerprint") == fingerprint else None
    except Exception as error:  # torch.load raises what it likes
        raise ConfigError(
            flag="--report",
            value=str(state.parent),
            problem=f"{state.name}, which an interrupted run left there, cannot be read ({error})",
            allowed="a folder, new or of an earlier run",
            remedy=f"remove {state}, or name another folder",
        ) from error


def _check_writable(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written, before hours are spent on its content."""
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            flag=flag,
            value=str(path),
            problem=f"it cannot be written ({error.strerror})",
            allowed="a path that can be written",
            remedy="name another one",
        ) from error


def _base(path: Path) -> SparseConfig:
    """The preset in ``path``, or the default settings if there is no such file."""
    if not path.exists():
        if path.suffix != ".json":
            raise ConfigError(
                flag="--output",
                value=str(path),
                problem="it is no JSON file",
                allowed="a path that ends in .json",
                remedy="name one, such as configs/MODEL/kascade.json",
            )
        shipped = {ref.name for ref in list_presets() if ref.model == PATTERN_MODEL}
        base = load_preset(PATTERN_MODEL, path.stem if path.stem in shipped else METHOD)
        if not isinstance(base.layers, Anchors):
            base = load_preset(PATTERN_MODEL, METHOD)
        return base.model_copy(update={"model": None})
    try:
        return SparseConfig.model_validate(read_json_file(path))
    except (PresetFileError, ValidationError) as error:
        raise ConfigError(
            flag="--output",
            value=str(path),
            problem="it is there and holds no preset "
            f"({error if isinstance(error, PresetFileError) else error.errors()[0]['msg']})",
            allowed="a new file, or a preset whose layers are to be replaced",
            remedy="name another one",
        ) from error


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


def _write_preset(path: Path, base: SparseConfig, layers: Anchors, geometry: Geometry) -> None:
    name = base.model.name if base.model is not None else path.parent.name or geometry.name
    named = geometry.model_copy(update={"name": name})
    content = base.model_dump(mode="json", exclude_unset=True) | {
        "model": named.model_dump(mode="json"),
        "layers": layers.model_dump(mode="json"),
    }
    SparseConfig.model_validate(content)
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
