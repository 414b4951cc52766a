# SPDX-License-Identifier: Apache-2.0
"""What a calibration of heads found: tables, DuoAttention's file, pictures, and a comparison."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from sglang_sparse.calibrate.files import replacing
from sglang_sparse.calibrate.gates import GatedModel
from sglang_sparse.tasks import HuggingFaceEncoder, Sample, TaskSuite

DUO_ATTENTION_FILE = "full_attention_heads.tsv"
ARM_TASK, ARM_SAMPLES, RANDOM_DRAWS = "passkey", 16, 3


@dataclass(frozen=True)
class Found:
    """What was measured and chosen.

    Attributes:
        scores: fp64 [layers, KV heads], how much the model needs each head to see everything.
        gates: [layers, KV heads] in [0, 1], as DuoAttention's file has them.
        streaming: heads of each layer that stream.
        divergence: fp64 [layers, KV heads], what leaving a head out alone does; None if not tried.
        finder: what found them.
    """

    scores: Tensor
    gates: Tensor
    streaming: list[list[int]]
    divergence: Tensor | None
    finder: str

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation of scores and divergence; None without the latter."""
        if self.divergence is None:
            return None
        return float(spearmanr(self.scores.flatten(), self.divergence.flatten()).statistic)

    def mask(self) -> Tensor:
        """bool [layers, KV heads], which heads stream."""
        streams = torch.zeros(self.scores.shape, dtype=torch.bool)
        for layer, heads in enumerate(self.streaming):
            streams[layer, heads] = True
        return streams


@dataclass(frozen=True)
class Arm:
    """What a model does with some heads streaming, over the held-out passkeys.

    Attributes:
        name: "dense", "chosen", or "random" with a number.
        streaming: how many heads stream.
        loss: mean negative log-probability of the answers' tokens, nats.
        passkey: share of the answers of which every token is the likeliest.
    """

    name: str
    streaming: int
    loss: float
    passkey: float


def measure_arms(model: GatedModel, found: Found, *, length: int, seed: int) -> list[Arm]:
    """Compare dense, the chosen heads, and as many drawn at random, with windows in prompts, too.

    Args:
        model: all gates are 1.
        found: its heads.
        length: tokens of a prompt with its answer.
        seed: of the prompts and of the draws.
    """
    suite = TaskSuite(HuggingFaceEncoder(model.tokenizer), "heldout")
    samples = suite.samples(ARM_TASK, length, ARM_SAMPLES, seed)
    chosen = found.mask()
    masks = {"dense": torch.zeros_like(chosen), "chosen": chosen, **drawn_heads(chosen, seed)}
    return [_arm(model, name, mask, samples) for name, mask in masks.items()]


def drawn_heads(chosen: Tensor, seed: int) -> dict[str, Tensor]:
    """As many heads as in ``chosen`` [layers, KV heads], drawn at random a few times, by name."""
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(chosen.numel(), generator=generator) for _ in range(RANDOM_DRAWS))
    return {
        f"random {draw}": chosen.flatten()[order].view(chosen.shape)
        for draw, order in enumerate(orders, start=1)
    }


@torch.no_grad()
def _arm(model: GatedModel, name: str, streams: Tensor, samples: Sequence[Sample]) -> Arm:
    gates = model.ones().masked_fill(streams.to(model.device), 0.0)
    loss, right, tokens = 0.0, 0, 0
    for sample in samples:
        answer = torch.tensor(sample.answer_ids)
        ids = [*sample.prompt_ids, *sample.answer_ids]
        predicted = model.predictions(model.tokens(ids), gates)[-len(answer) - 1 : -1].cpu()
        loss -= float(predicted.gather(1, answer[:, None]).sum())
        tokens += len(answer)
        right += bool((predicted.argmax(-1) == answer).all())
    return Arm(name, int(streams.sum()), loss / tokens, right / len(samples))


def write_report(folder: Path, found: Found, arms: Sequence[Arm]) -> None:
    """Write the tables, DuoAttention's gate file and the pictures; makes ``folder``."""
    layers, heads = found.scores.shape
    streams, rows = found.mask(), []
    for layer in range(layers):
        for head in range(heads):
            left_out = "" if found.divergence is None else f"{found.divergence[layer, head]:.6e}"
            rows.append(
                [layer, head, f"{found.scores[layer, head]:.6e}",
                 f"{found.gates[layer, head]:.6f}", int(streams[layer, head]), left_out]
            )  # fmt: skip
    names = ["layer", "head", "score", "gate", "streams", "divergence left out"]
    _csv(folder / "heads.csv", names, rows)
    _csv(
        folder / "arms.csv",
        ["arm", "streaming heads", "loss", "passkey"],
        [[arm.name, arm.streaming, f"{arm.loss:.6f}", f"{arm.passkey:.4f}"] for arm in arms],
    )
    if found.correlation is not None:
        _csv(
            folder / "correlation.csv",
            ["finder", "ground truth", "spearman"],
            [[found.finder, "leave-one-out", f"{found.correlation:.4f}"]],
        )
    with replacing(folder / DUO_ATTENTION_FILE) as path:
        path.write_text(gates_text(found.gates.tolist()), encoding="utf-8")
    with replacing(folder / "heads.png") as path:
        _heads_figure(found).savefig(path, dpi=100, format="png")
    with replacing(folder / "arms.png") as path:
        _arms_figure(arms).savefig(path, dpi=100, format="png")
    if found.divergence is not None:
        with replacing(folder / "check.png") as path:
            _check_figure(found).savefig(path, dpi=100, format="png")


def gates_text(gates: Sequence[Sequence[float]]) -> str:
    """Return the content of a TSV in DuoAttention's format: a line a layer, a column a KV head."""
    return "".join("\t".join(f"{gate:.6f}" for gate in row) + "\n" for row in gates)


def _csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def _heads_figure(found: Found) -> Any:
    from matplotlib.figure import Figure

    layers, heads = found.gates.shape
    figure = Figure(figsize=(1.5 + 0.35 * layers, 1.5 + 0.35 * heads), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(found.gates.T, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=axes, label="gate")
    for layer, streaming in enumerate(found.streaming):
        axes.plot([layer] * len(streaming), streaming, "wx")
    axes.set(xlabel="layer", ylabel="KV head", title="Gates; heads that stream have a cross")
    return figure


def _arms_figure(arms: Sequence[Arm]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [f"{arm.name} ({arm.streaming})" for arm in arms]
    left.barh(names, [arm.passkey for arm in arms])
    left.set(xlim=(0, 1), xlabel="passkeys found", title="Heads that stream")
    left.invert_yaxis()
    right.barh(names, [arm.loss for arm in arms])
    right.set(xlabel="loss of the answer, nats a token", yticks=[])
    right.invert_yaxis()
    return figure


def _check_figure(found: Found) -> Any:
    from matplotlib.figure import Figure

    assert found.divergence is not None
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for streams, color in ((True, "tab:blue"), (False, "tab:red")):
        which = found.mask() == streams
        label = "streams" if streams else "selects"
        axes.scatter(found.scores[which], found.divergence[which], color=color, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel=f"score of the finder {found.finder}",
        ylabel="divergence if the head alone streams, nats",
        title=f"Spearman {found.correlation:.2f}",
    )  # fmt: skip
    axes.legend()
    return figure
