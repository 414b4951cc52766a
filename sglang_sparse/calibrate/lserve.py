# SPDX-License-Identifier: Apache-2.0
"""Finds the heads of a model that can do with a window, and writes LServe's presets."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sglang_sparse.calibrate.finders import GateTraining, leave_one_out, log_odds_slopes
from sglang_sparse.calibrate.gates import JUDGED, GatedModel
from sglang_sparse.calibrate.heads_report import Found, measure_arms, write_report
from sglang_sparse.calibrate.outputs import (
    STATE,
    fingerprint,
    model_name,
    open_outputs,
    resume,
    save_state,
    write_preset,
)
from sglang_sparse.calibrate.prompts import Prompts, load_prompts
from sglang_sparse.config import (
    ConfigError,
    Geometry,
    HeadsCalibration,
    HeadsModel,
    InvalidConfig,
    SparseConfig,
    StreamingHeads,
    read_gates,
)

METHOD = "lserve"
_STEPS_A_SAVE = 10

Finder = Literal["gradient", "gates"]


@dataclass(frozen=True)
class Settings:
    """What is asked for.

    Attributes:
        model: folder or hub name.
        prompts: JSON Lines file, or None for generated prompts.
        outputs: presets to write; what they hold beside heads and geometry stays.
        report: folder of tables and pictures, and of what an interrupted run has so far.
        finder: see :mod:`.finders`.
        gates: gates of others in DuoAttention's format, in place of a finder; None for none.
        sparsity: share of the heads that stream.
        sink, local: what a streaming head sees.
        check: leave each head out alone, and compare.
        equal_per_layer: as many heads stream in every layer.
        tp: ranks that are to have as many streaming heads each.
        steps, l1: of the finder "gates".
        count, max_tokens: prompts, and tokens of each.
        seed: of the prompts, and of what is drawn at random.
        device: "cpu" or "cuda".
    """

    model: str
    prompts: Path | None
    outputs: Sequence[Path]
    report: Path
    finder: Finder = "gradient"
    sparsity: float = 0.5
    sink: int = 128
    local: int = 1024
    check: bool = False
    equal_per_layer: bool = False
    tp: int = 1
    steps: int = 200
    l1: float = 0.05
    count: int = 24
    max_tokens: int = 8192
    seed: int = 0
    device: str = "cpu"
    gates: Path | None = None


@dataclass
class Progressed:
    """What a run has so far: sums over prompts in fp64, and the gates' training.

    Attributes:
        found: prompts that the finder has seen; of "gates" it is 0.
        checked: prompts on which heads were left out.
        slopes: sum of squared slopes, [layers, KV heads].
        divergence: sum of the divergences of heads that were left out, [layers, KV heads].
        training: of the finder "gates", as :class:`GateTraining` has it; else None.
    """

    slopes: Tensor
    divergence: Tensor
    found: int = 0
    checked: int = 0
    training: dict[str, Any] | None = field(default=None)


def calibrate(settings: Settings, console: Console) -> StreamingHeads:
    """Measure, choose and write; goes on where an interrupted run of the same settings ended.

    Raises:
        ConfigError: the model, the prompts, an output or a number cannot be used.
    """
    bases = open_outputs(settings.outputs, settings.report, "heads", METHOD)
    model = GatedModel(settings.model, settings.device, sink=settings.sink, local=settings.local)
    _check_numbers(settings, model.geometry, bases)
    given = None if settings.gates is None else _given_gates(settings.gates, model.geometry)
    prompts = load_prompts(
        settings.prompts,
        model.tokenizer,
        count=settings.count,
        min_tokens=settings.sink + settings.local + JUDGED,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )
    done = _measure(settings, model, prompts, console)
    scores = _scores(settings, done) if given is None else given
    chosen = choose(settings, scores)
    found = Found(
        scores=scores,
        gates=gates_of(settings, scores),
        streaming=chosen,
        divergence=done.divergence / done.checked if settings.check else None,
        finder="file" if given is not None else settings.finder,
    )
    console.print("comparing dense, these heads, and heads drawn at random")
    arms = measure_arms(model, found, length=prompt_length(prompts), seed=settings.seed)
    write_report(settings.report, found, arms)
    name = model_name(*bases[0], model.geometry)
    heads = _heads(settings, chosen, model.geometry.model_copy(update={"name": name}), prompts)
    for path, base in bases:
        write_preset(path, base, "heads", heads, model.geometry)
    (settings.report / STATE).unlink(missing_ok=True)
    return heads


def prompt_length(prompts: Prompts) -> int:
    """Tokens of a prompt of middle length."""
    return sorted(map(len, prompts.ids))[len(prompts.ids) // 2]


def choose(settings: Settings, scores: Tensor) -> list[list[int]]:
    """Return the heads of each layer that stream: those that score least.

    Args:
        settings: how many, and whether as many in each layer or on each rank.
        scores: [layers, KV heads]; of equal scores those of lower layers and heads stream.
    """
    layers, heads = scores.shape
    of_layer = torch.arange(layers)[:, None].expand(layers, heads)
    of_rank = (torch.arange(heads) * settings.tp // heads).expand(layers, heads)
    groups = of_rank + (of_layer * settings.tp if settings.equal_per_layer else 0)
    streams = torch.zeros(scores.shape, dtype=torch.bool)
    for group in groups.unique():
        mine = (groups == group).nonzero()
        ranked = scores[groups == group].sort(stable=True).indices
        first = mine[ranked[: round(settings.sparsity * len(ranked))]]
        streams[first[:, 0], first[:, 1]] = True
    return [row.nonzero().flatten().tolist() for row in streams]


def gates_of(settings: Settings, scores: Tensor) -> Tensor:
    """Return gates in [0, 1] for DuoAttention's file: trained ones, else ranks of the scores."""
    if settings.finder == "gates" or settings.gates is not None:
        return scores.clamp(0.0, 1.0)
    order = scores.flatten().sort(stable=True).indices
    ranks = torch.empty_like(scores.flatten())
    ranks[order] = torch.arange(len(order), dtype=scores.dtype)
    return (ranks / max(len(order) - 1, 1)).view(scores.shape)


def _scores(settings: Settings, done: Progressed) -> Tensor:
    """fp64 [layers, KV heads]: how much the model needs each head to see everything."""
    if settings.finder == "gates":
        assert done.training is not None
        gates: Tensor = done.training["gates"]
        return gates.double()
    return (done.slopes / done.found).sqrt()


def _measure(
    settings: Settings, model: GatedModel, prompts: Prompts, console: Console
) -> Progressed:
    state = settings.report / STATE
    mark = fingerprint(
        settings.model,
        {
            "prompts": hashlib.sha256(json.dumps(prompts.ids).encode()).hexdigest(),
            "window": [settings.sink, settings.local],
            "finder": [settings.finder, settings.steps, settings.l1, settings.seed],
            "given": settings.gates is not None,
            "device": settings.device,
        },
    )
    saved = resume(state, mark)
    empty = torch.zeros(model.ones().shape, dtype=torch.float64)
    done = Progressed(empty, empty.clone()) if saved is None else Progressed(**saved)
    if saved is not None:
        console.print(f"resuming after {_told(done)}")

    def save() -> None:
        save_state(state, mark, asdict(done))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        if settings.gates is not None:
            pass  # found by others
        elif settings.finder == "gates":
            _train(settings, model, prompts, done, save, progress)
        else:
            task = progress.add_task("gradient: prompts", total=len(prompts.ids))
            progress.advance(task, done.found)
            for index, ids in enumerate(prompts.ids[done.found :], start=done.found):
                generator = torch.Generator().manual_seed(settings.seed * 100_003 + index)
                done.slopes += log_odds_slopes(model, ids, generator)
                done.found += 1
                save()
                progress.advance(task)
        if settings.check:
            task = progress.add_task("leave-one-out: prompts", total=len(prompts.ids))
            progress.advance(task, done.checked)
            for ids in prompts.ids[done.checked :]:
                done.divergence += leave_one_out(model, ids)
                done.checked += 1
                save()
                progress.advance(task)
    return done


def _train(
    settings: Settings,
    model: GatedModel,
    prompts: Prompts,
    done: Progressed,
    save: Callable[[], None],
    progress: Progress,
) -> None:
    if done.training is None:
        training = GateTraining.start(model, steps=settings.steps, l1=settings.l1)
    else:
        training = GateTraining(**done.training)
    task = progress.add_task("gates: steps", total=training.steps)
    progress.advance(task, training.step)
    while training.step < training.steps:
        training.advance(model, prompts.ids[training.step % len(prompts.ids)])
        done.training = asdict(training)
        if training.step % _STEPS_A_SAVE == 0 or training.step == training.steps:
            save()
        progress.advance(task)


def _told(done: Progressed) -> str:
    steps = 0 if done.training is None else done.training["step"]
    parts = {"prompts": done.found, "steps": steps, "prompts left out": done.checked}
    return ", ".join(f"{count} {name}" for name, count in parts.items() if count) or "nothing"


def _heads(
    settings: Settings, chosen: list[list[int]], geometry: Geometry, prompts: Prompts
) -> StreamingHeads:
    return StreamingHeads(
        sink=settings.sink,
        local=settings.local,
        streaming=tuple(map(tuple, chosen)),
        model=HeadsModel(**geometry.model_dump()),
        calibration="published"
        if settings.gates is not None
        else HeadsCalibration(
            finder=settings.finder,
            prompts=len(prompts.ids),
            prompts_sha256=prompts.sha256,
            seed=settings.seed,
            sparsity=settings.sparsity,
            equal_per_layer=settings.equal_per_layer,
            tp=settings.tp,
        ),
    )


def _given_gates(path: Path, geometry: Geometry) -> Tensor:
    """fp64 [layers, KV heads], the gates that a TSV holds."""
    shape = (geometry.num_hidden_layers, geometry.num_key_value_heads)
    try:
        gates = torch.tensor(read_gates(path), dtype=torch.float64)
        problem = f"it has {gates.shape[0]} layers of {gates.shape[1]} KV heads"
    except InvalidConfig as error:
        gates, problem = torch.empty(0), error.problem
    if gates.shape == shape:
        return gates
    raise ConfigError(
        flag="--gates",
        value=str(path),
        problem=problem,
        allowed=f"a TSV of {shape[0]} lines with {shape[1]} gates from 0 to 1 each",
        remedy="name the gates of this model, or drop --gates",
    )


def _check_numbers(
    settings: Settings, geometry: Geometry, bases: Sequence[tuple[Path, SparseConfig]]
) -> None:
    heads = geometry.num_key_value_heads
    page = max((base.page_size for _, base in bases), default=16)
    most = settings.max_tokens - JUDGED
    rules: tuple[tuple[str, float, float, float, int], ...] = (
        ("--count", settings.count, 1, 10_000, 1),
        ("--sparsity", settings.sparsity, 0.01, 0.99, 0),
        ("--sink", settings.sink, 0, most, page),
        ("--local", settings.local, page, most - settings.sink, page),
        ("--steps", settings.steps, 1, 100_000, 1),
        ("--l1", settings.l1, 0, 100, 0),
    )
    for flag, value, low, high, step in rules:
        if not (low <= value <= high and (not step or value % step == 0)):
            raise ConfigError(
                flag=flag,
                value=str(value),
                problem=f"it does not suit {geometry.describe()}",
                allowed=f"{low} to {high}" + (f", a multiple of {step}" if step > 1 else ""),
                remedy="correct it",
            )
    if settings.tp < 1 or heads % settings.tp:
        raise ConfigError(
            flag="--tp",
            value=str(settings.tp),
            problem=f"it does not suit {geometry.describe()}",
            allowed=f"1 to {heads}, a divisor of {heads}",
            remedy="correct it",
        )
    of_group = heads // settings.tp
    stream = settings.sparsity * of_group
    if settings.equal_per_layer and abs(stream - round(stream)) > 1e-6:
        raise ConfigError(
            flag="--sparsity",
            value=f"{settings.sparsity:g}",
            problem=f"with --equal-per-layer and --tp {settings.tp} as many of {of_group} KV heads "
            "stream in each layer of each rank, which is no whole number",
            allowed=f"multiples of {1 / of_group:g} below 1" if of_group > 1 else "no share",
            remedy="choose one of these, fewer ranks, or drop --equal-per-layer",
        )
