# SPDX-License-Identifier: Apache-2.0
"""Fills the model card's tables and draws its plots from the study's JSON files.

``python -m sglang_sparse.research.card`` reads what lies in ``study/`` beside the card. It rewrites
what stands between ``<!-- NAME -->`` and ``<!-- end -->`` in ``README.md``.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang_sparse.research import text_decode, text_study
from sglang_sparse.research.study import SELECTORS
from sglang_sparse.research.tables import Cell, Key, cells_of, markdown, policy_key
from sglang_sparse.tasks import READING_TASKS, RULER_TASKS, TASKS

DENSE: Key = ("dense", 0)
WINDOW: Key = ("window", 0)


class Results:
    """Every cell of every file of a folder, found by policy, task and length."""

    def __init__(self, folder: Path) -> None:
        """Read tables (``table_*.json.gz``), and the studies of presets, heads and text."""
        self.cells: dict[tuple[Key, str, int], Cell] = {}
        for path in sorted(folder.glob("table_*.json.gz")):
            for cell in cells_of(json.loads(gzip.decompress(path.read_bytes()))):
                self.cells[(policy_key(cell["policy"]), cell["task"], cell["length"])] = cell
        self.ablation = json.loads((folder / "ablation_4k.json").read_text())
        self.presets, self.decode = (
            cells_of(json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes())))
            for name in ("shipped", "decode")
        )
        (text,) = folder.glob("text-*.json")
        self.text = json.loads(text.read_text())

    def get(self, key: Key, task: str, length: int) -> Cell | None:
        """One cell, or ``None`` where it was not measured."""
        return self.cells.get((key, task, length))

    @property
    def lengths(self) -> list[int]:
        """Lengths measured, in order."""
        return sorted({length for _, _, length in self.cells})

    def budgets(self, length: int) -> list[int]:
        """Budgets measured at a length, in order."""
        return sorted({key[1] for key, _, n in self.cells if n == length and key[1]})


def percent(cell: Cell | None) -> str:
    """``98 (93-99)``: per cent exact and the 95 % Wilson interval; a dash if not measured."""
    if cell is None:
        return "-"
    exact, low, high = (100 * cell[k] for k in ("exact", "low", "high"))
    return f"{exact:.0f} ({low:.0f}-{high:.0f})"


def dense_table(results: Results) -> str:
    """Dense and window, every task and length."""
    head = ["task", *(f"dense {n // 1024}K" for n in results.lengths), "window 4K"]
    rows = []
    for task in TASKS:
        cells = [results.get(DENSE, task, n) for n in results.lengths]
        rows.append([task, *map(percent, cells), percent(results.get(WINDOW, task, 4096))])
    return markdown(head, rows)


def budget_table(results: Results, length: int, tasks: Sequence[str]) -> str:
    """Every selector at every budget, at one length; a line that says so if none was measured."""
    rows = []
    budgets = results.budgets(length)
    keys: list[Key] = [DENSE, WINDOW]
    keys += [(kind, budget) for kind in SELECTORS for budget in budgets]
    for key in keys:
        cells = [results.get(key, task, length) for task in tasks]
        if any(cells):
            rows.append([key[0], _tokens(key, length), *map(percent, cells)])
    return markdown(["policy", "tokens", *tasks], rows) if rows else "Not measured yet."


def _tokens(key: Key, length: int) -> str:
    """What a policy keeps: a share where the budget is a twentieth or a fifth of the context."""
    if key in (DENSE, WINDOW):
        return {DENSE: "all", WINDOW: "4 + 256"}[key]
    shares = {round(length / 20): "5 %", round(length / 5): "20 %"}
    return shares.get(key[1], str(key[1]))


def preset_table(cells: Sequence[Cell]) -> str:
    """Per cent exact of dense and of each preset as it is shipped, a row a task and length."""
    names = list(dict.fromkeys(cell["preset"] for cell in cells))
    found = {(cell["task"], cell["length"], cell["preset"]): cell for cell in cells}
    asked = dict.fromkeys((task, length) for task, length, _ in found)
    rows = [
        [task, f"{length:,}", *(percent(found.get((task, length, name))) for name in names)]
        for task, length in asked
    ]
    return markdown(["task", "tokens", *names], rows)


def tables(results: Results) -> dict[str, str]:
    """Every table of the card, by the name of its marker."""
    return {
        "dense": dense_table(results),
        **{
            f"{name} {n // 1024}K": budget_table(results, n, tasks)
            for name, tasks in (("budgets", (*RULER_TASKS,)), ("reading", (*READING_TASKS,)))
            for n in (4096, 8192, 16384, 32768)
        },
        "presets": preset_table(results.presets),
        "ablation": ablation_table(results),
        "text": text_study.table(results.text).rstrip(),
        "decode": text_decode.table(results.decode).rstrip(),
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


def draw_budgets(results: Results, path: Path) -> None:
    """Mean accuracy over the budget at 4K and 8K: older tasks above, reading tasks below."""
    from matplotlib.figure import Figure

    lengths = [n for n in results.lengths if n <= 8192]
    figure = Figure(figsize=(4.2 * len(lengths), 5.6), dpi=66, layout="constrained")
    grid = figure.subplots(2, len(lengths), squeeze=False)
    for panels, (name, tasks) in zip(
        grid, (("RULER's", RULER_TASKS), ("Reading", READING_TASKS)), strict=True
    ):
        for axes, length in zip(panels, lengths, strict=True):
            budgets = results.budgets(length)
            for kind, style in zip(SELECTORS, ("k:", "C0o-", "C1s-"), strict=True):
                points = [(b, _mean(results, (kind, b), tasks, length)) for b in budgets]
                axes.plot(*zip(*points, strict=True), style, label=kind)
            axes.axhline(_mean(results, DENSE, tasks, length), color="k", lw=0.8, label="dense")
            axes.axhline(_mean(results, WINDOW, tasks, length), color="C3", ls="--", label="window")
            axes.set_xscale("log", base=2)
            told = [b for a, b in zip([0, *budgets], budgets, strict=False) if b >= 1.4 * a]
            axes.set_xticks(told, [str(b) for b in told])
            axes.set_ylim(-3, 103)
            axes.set_title(f"{name} tasks at {length // 1024}K", fontsize=10)
            axes.set_xlabel("tokens kept for each KV head")
        panels[0].set_ylabel("exact, %")
    grid[0][0].legend(fontsize=8)
    figure.savefig(path)


def _mean(results: Results, key: Key, tasks: Iterable[str], length: int) -> float:
    cells = [results.get(key, task, length) for task in tasks]
    return 100 * sum(c["exact"] for c in cells if c) / sum(c is not None for c in cells)


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
    draw_budgets(results, folder / "study" / "budgets.png")
    path = folder / "README.md"
    path.write_text(fill(path.read_text(), tables(results)))


if __name__ == "__main__":
    main()
