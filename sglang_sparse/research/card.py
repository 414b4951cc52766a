# SPDX-License-Identifier: Apache-2.0
"""Fills the model card's tables and draws its plots from the study's JSON files.

``python -m sglang_sparse.research.card`` reads what lies in ``study/`` beside the card. It rewrites
what stands between ``<!-- NAME -->`` and ``<!-- end -->`` in ``README.md``.
"""

import argparse
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.research.tables import Cell, cells_of
from sglang_sparse.tasks import NEEDLE_TASKS, RULER_TASKS

Key = tuple[str, int, int, str]
RETRIEVAL = (*NEEDLE_TASKS, "passkey", "variable_tracking")
BUDGETS = (64, 128, 256, 512, 1024)


class Results:
    """Every cell of every file of a folder, found by policy, task and length."""

    def __init__(self, folder: Path) -> None:
        """Read ``table_*.json.gz`` and the ``ablation_4k.json`` of ``folder``."""
        self.cells: dict[tuple[Key, str, int], Cell] = {}
        for path in sorted(folder.glob("table_*.json.gz")):
            for cell in cells_of(json.loads(gzip.decompress(path.read_bytes()))):
                self.cells[(policy_key(cell["policy"]), cell["task"], cell["length"])] = cell
        self.ablation = json.loads((folder / "ablation_4k.json").read_text())

    def get(self, key: Key, task: str, length: int) -> Cell | None:
        """One cell, or ``None`` where it was not measured."""
        return self.cells.get((key, task, length))

    @property
    def lengths(self) -> list[int]:
        """Lengths measured, in order."""
        return sorted({length for _, _, length in self.cells})


def policy_key(policy: dict[str, Any]) -> Key:
    """The properties that tell two policies apart."""
    if policy["kind"] in ("dense", "window"):
        return policy["kind"], 0, 0, "max"
    return policy["kind"], policy["budget"], policy["dense_layers"], policy["reduce"]


def percent(cell: Cell | None) -> str:
    """``98.5 (95.7-99.5)``: per cent exact and the 95 % Wilson interval; a dash if not measured."""
    if cell is None:
        return "-"
    exact, low, high = (100 * cell[k] for k in ("exact", "low", "high"))
    return f"{exact:.1f} ({low:.1f}-{high:.1f})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def dense_table(results: Results) -> str:
    """Dense and window, every task and length."""
    head = ["task", *(f"dense {n // 1024}K" for n in results.lengths), "window 4K"]
    rows = []
    for task in RULER_TASKS:
        cells = [results.get(("dense", 0, 0, "max"), task, n) for n in results.lengths]
        window = results.get(("window", 0, 0, "max"), task, 4096)
        rows.append([task, *map(percent, cells), percent(window)])
    return markdown(head, rows)


def budget_table(results: Results, length: int) -> str:
    """Every selector at every budget, at one length; a line that says so if none was measured."""
    head = ["policy", "tokens", *RETRIEVAL]
    rows = []
    keys: list[Key] = [("dense", 0, 0, "max"), ("window", 0, 0, "max")]
    keys += [(k, b, 0, "max") for k in ("oracle", "sparcas", "page_minmax") for b in BUDGETS]
    for key in keys:
        cells = [results.get(key, task, length) for task in RETRIEVAL]
        if any(cells):
            tokens = {"dense": "all", "window": "4 + 256"}.get(key[0], str(key[1]))
            rows.append([key[0], tokens, *map(percent, cells)])
    return markdown(head, rows) if rows else "Not measured yet."


def variant_table(results: Results) -> str:
    """``sparcas`` by reduction and dense layers, ``page_minmax`` by reduction, at 4K."""
    head = ["policy", "group", "dense layers", "tokens", *RETRIEVAL]
    rows = []
    for kind, layers in (("sparcas", (0, 1, 2)), ("page_minmax", (0,))):
        for budget in (64, 128, 256):
            for reduce in ("max", "sum"):
                for first in layers:
                    key = (kind, budget, first, reduce)
                    cells = [results.get(key, task, 4096) for task in RETRIEVAL]
                    shown = ["-" if c is None else f"{100 * c['exact']:.1f}" for c in cells]
                    rows.append([kind, reduce, str(first), str(budget), *shown])
    return markdown(head, rows)


def tables(results: Results) -> dict[str, str]:
    """Every table of the card, by the name of its marker."""
    return {
        "dense": dense_table(results),
        "budgets 4K": budget_table(results, 4096),
        "budgets 8K": budget_table(results, 8192),
        "variants": variant_table(results),
        "ablation": ablation_table(results),
    }


def drops(results: Results) -> tuple[list[float], list[list[float]]]:
    """Mean loss of accuracy over the needle tasks, by layer and by head, in points."""
    tasks = results.ablation["ablation"]["tasks"].values()
    layers = len(next(iter(tasks))["layers"])
    heads = len(next(iter(tasks))["heads"][0])

    def mean(values: list[float]) -> float:
        return 100 * sum(values) / len(values)

    by_layer = [mean([t["dense"] - t["layers"][i] for t in tasks]) for i in range(layers)]
    by_head = [
        [mean([t["dense"] - t["heads"][i][j] for t in tasks]) for j in range(heads)]
        for i in range(layers)
    ]
    return by_layer, by_head


def ablation_table(results: Results) -> str:
    """Points lost when a layer, or one of its heads, sees the window alone."""
    by_layer, by_head = drops(results)
    head = ["layer", "whole layer", *(f"KV head {j}" for j in range(len(by_head[0])))]
    rows = [
        [str(i), f"{by_layer[i]:.1f}", *(f"{v:.1f}" for v in row)] for i, row in enumerate(by_head)
    ]
    return markdown(head, rows)


def draw_ablation(results: Results, path: Path) -> None:
    """Heat map of :func:`drops`."""
    from matplotlib.figure import Figure

    by_layer, by_head = drops(results)
    grid = [[layer, *heads] for layer, heads in zip(by_layer, by_head, strict=True)]
    figure = Figure(figsize=(5, 4), dpi=90, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="magma_r", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(grid[0])), ["layer", *(f"head {j}" for j in range(len(grid[0]) - 1))])
    axes.set_yticks(range(len(grid)), [f"layer {i}" for i in range(len(grid))])
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            axes.text(
                j, i, f"{value:.0f}", ha="center", va="center", color="w" if value > 50 else "k"
            )
    axes.set_title("Points lost when cut to the window (4K needles)", fontsize=10)
    figure.colorbar(image, ax=axes)
    figure.savefig(path)


def draw_budgets(results: Results, path: Path) -> None:
    """Mean accuracy of the needle tasks over the budget, one panel a length."""
    from matplotlib.figure import Figure

    lengths = [n for n in results.lengths if results.get(("oracle", 256, 0, "max"), "multi_key", n)]
    figure = Figure(figsize=(4.2 * len(lengths), 3.2), dpi=90, layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        for kind, style in (("oracle", "k:"), ("sparcas", "C0o-"), ("page_minmax", "C1s-")):
            points = []
            for budget in BUDGETS:
                cells = [results.get((kind, budget, 0, "max"), t, length) for t in NEEDLE_TASKS]
                found = [100 * c["exact"] for c in cells if c]
                if found:
                    points.append((budget, sum(found) / len(found)))
            axes.plot(*zip(*points, strict=True), style, label=kind)
        window = [results.get(("window", 0, 0, "max"), t, length) for t in NEEDLE_TASKS]
        level = [100 * c["exact"] for c in window if c]
        axes.axhline(sum(level) / len(level), color="C3", ls="--", label="window 4 + 256")
        axes.set_xscale("log", base=2)
        axes.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
        axes.set_ylim(-3, 103)
        axes.set_title(f"Needle tasks at {length // 1024}K", fontsize=10)
        axes.set_xlabel("tokens kept for each KV head")
    panels[0].set_ylabel("exact, %")
    panels[0].legend(fontsize=8)
    figure.savefig(path)


def fill(card: str, named: dict[str, str]) -> str:
    """``card`` with each table between its markers.

    Raises:
        ValueError: the card lacks a marker.
    """
    for name, table in named.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(card):
            raise ValueError(f"the card has no '<!-- {name} -->' ... '<!-- end -->'")
        card = pattern.sub(lambda m, t=table: f"{m[1]}{t}\n{m[2]}", card)  # type: ignore[misc]
    return card


def main() -> None:
    """Rewrite the card's tables and plots."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=Path("configs/reference/model"))
    folder = parser.parse_args().model
    results = Results(folder / "study")
    draw_ablation(results, folder / "study" / "ablation.png")
    draw_budgets(results, folder / "study" / "budgets.png")
    path = folder / "README.md"
    path.write_text(fill(path.read_text(), tables(results)))


if __name__ == "__main__":
    main()
