# SPDX-License-Identifier: Apache-2.0
"""Writes the results of a calibration as tables and pictures."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_sparse.calibrate.anchors import Floats
from sglang_sparse.calibrate.files import replacing
from sglang_sparse.config import Anchors

LABELS = {
    "cosine": "1 - cos(before attention, after it)",
    "effect": "divergence of predictions without it",
}


@dataclass(frozen=True)
class Measured:
    """What a calibration measured, mean over its prompts.

    Attributes:
        importance: [L].
        averaged: [L, L] similarity of the attention averaged over heads, least over queries.
        head_means: [L, L, H, H] similarity of heads, mean over queries (Kascade, 3.2 and 3.5).
        maps: [L, L, H], the head maps that follow from ``head_means``.
        mapped: [L, L] similarity under these maps, least over queries (3.3). The anchors follow
            from it.
    """

    importance: Floats
    averaged: Floats
    head_means: Floats
    maps: NDArray[np.int64]
    mapped: Floats


def write_report(folder: Path, layers: Anchors, measured: Measured) -> None:
    """Write four CSV files and two pictures of what was measured and chosen.

    ``folder`` is made if it is not there.
    """
    weight, mapped, heads = measured.importance, measured.mapped, measured.head_means
    count = len(weight)
    names = [str(i) for i in range(count)]
    for name, matrix in (("similarity", mapped), ("similarity_averaged", measured.averaged)):
        rows = [[a, *(f"{x:.6f}" if b >= a else "" for b, x in enumerate(matrix[a]))]
                for a in range(count)]  # fmt: skip
        _csv(folder / f"{name}.csv", ["anchor \\ layer", *names], rows)
    table, head_table = [], []
    for layer in range(count):
        role = layers.role(layer)
        anchor = layer if role.selects else role.source
        assert anchor is not None
        table.append([layer, f"{weight[layer]:.6f}", anchor, f"{mapped[anchor, layer]:.6f}"])
        for head, taken in enumerate(role.heads or ()):
            kept = f"{heads[anchor, layer, taken, head]:.6f}"
            own = f"{heads[anchor, layer, head, head]:.6f}"
            head_table.append([layer, head, anchor, taken, kept, own])
    _csv(folder / "layers.csv", ["layer", "importance", "anchor", "similarity"], table)
    _csv(
        folder / "heads.csv",
        ["layer", "head", "anchor", "anchor head", "mean similarity", "mean similarity unmapped"],
        head_table,
    )
    with replacing(folder / "similarity.png") as path:
        _similarity_figure(mapped, layers.anchors).savefig(path, dpi=100, format="png")
    with replacing(folder / "importance.png") as path:
        assert layers.calibration != "uncalibrated"
        label = LABELS[layers.calibration.importance]
        _importance_figure(weight, layers.anchors, label).savefig(path, dpi=100, format="png")


def _csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def _similarity_figure(similarity: Floats, anchors: Sequence[int]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    shown = np.where(np.triu(np.ones_like(similarity)) > 0, similarity, np.nan)
    image = axes.imshow(shown, vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes, label="attention kept, least over queries")
    bounds = [*anchors[1:], len(similarity)]
    for anchor, end in zip(anchors, bounds, strict=True):
        axes.plot(
            [anchor - 0.5, end - 0.5, end - 0.5, anchor - 0.5, anchor - 0.5],
            [anchor - 0.5, anchor - 0.5, anchor + 0.5, anchor + 0.5, anchor - 0.5],
            color="red",
        )
    axes.set(xlabel="layer", ylabel="its anchor", title="Similarity; chosen anchors in red")
    return figure


def _importance_figure(weight: Floats, anchors: Sequence[int], label: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:red" if i in anchors else "tab:blue" for i in range(len(weight))]
    axes.bar(range(len(weight)), weight, color=colors)
    axes.set(xlabel="layer (anchors in red)", ylabel=label, title="Importance")
    return figure
