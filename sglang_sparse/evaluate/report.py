# SPDX-License-Identifier: Apache-2.0
"""From single answers to one table: terminal, JSON, CSV and a plot of accuracy over budget."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_sparse.evaluate.arms import DENSE, Arm
from sglang_sparse.evaluate.run import PERPLEXITY
from sglang_sparse.tasks import wilson

_Z = 1.959964


def cells(entries: list[dict[str, Any]], arms: list[Arm]) -> list[dict[str, Any]]:
    """One cell a task, length and arm, with a 95 % interval.

    Accuracies have Wilson intervals. A perplexity is that of the mean over windows, and its
    interval follows from their spread.
    """
    grouped: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        grouped[entry["task"], entry["length"], entry["arm"]].append(entry)
    order = {arm.name: number for number, arm in enumerate(arms)}
    keys = sorted(grouped, key=lambda k: (k[0] == PERPLEXITY, k[0], k[1], order[k[2]]))
    return [_cell(*key, grouped[key]) for key in keys]


def _cell(task: str, length: int, arm: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    cell: dict[str, Any] = {"task": task, "length": length, "arm": arm, "count": len(entries)}
    if task == PERPLEXITY:
        losses = [entry["nll"] for entry in entries]
        mean = statistics.fmean(losses)
        spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        bounds = [math.exp(mean - _Z * spread), math.exp(mean + _Z * spread)]
        known = not math.isnan(spread)
        return cell | {
            "value": math.exp(mean),
            "low": bounds[0] if known else None,
            "high": bounds[1] if known else None,
        }
    right = sum(entry["exact"] for entry in entries)
    low, high = wilson(right, len(entries))
    return cell | {
        "value": right / len(entries),
        "low": low,
        "high": high,
        "recall": statistics.fmean(entry["recall"] for entry in entries),
    }


def table(found: list[dict[str, Any]], arms: list[Arm]) -> Table:
    """The terminal's table: a row a task and length, a column an arm."""
    out = Table("task", "tokens", *(arm.name for arm in arms), title="value [95 % interval]")
    rows: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for cell in found:
        digits = 2 if cell["task"] == PERPLEXITY else 3
        text = f"{cell['value']:.{digits}f}"
        if cell["low"] is not None:
            text += f" [{cell['low']:.{digits}f}, {cell['high']:.{digits}f}]"
        rows[cell["task"], cell["length"]][cell["arm"]] = text
    for (task, length), row in rows.items():
        out.add_row(task, str(length), *(row.get(arm.name, "-") for arm in arms))
    return out


def write(
    folder: Path, settings: dict[str, Any], found: list[dict[str, Any]], arms: list[Arm]
) -> None:
    """`results.json`, `results.csv` and `accuracy.png`."""
    report = {"settings": settings, "cells": found}
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    names = ["task", "length", "arm", "count", "value", "low", "high", "recall"]
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(found)
    if any(cell["task"] != PERPLEXITY for cell in found):
        _plot(folder / "accuracy.png", found, arms, settings)


def _plot(
    path: Path, found: list[dict[str, Any]], arms: list[Arm], settings: dict[str, Any]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    budgets = [arm.name for arm in arms if arm.name != DENSE]
    lines = sorted({(c["task"], c["length"]) for c in found if c["task"] != PERPLEXITY})
    for number, (task, length) in enumerate(lines):
        by_arm = {c["arm"]: c for c in found if (c["task"], c["length"]) == (task, length)}
        shown = [b for b in budgets if b in by_arm]
        values = [by_arm[b]["value"] for b in shown]
        below = [by_arm[b]["value"] - by_arm[b]["low"] for b in shown]
        above = [by_arm[b]["high"] - by_arm[b]["value"] for b in shown]
        color = f"C{number % 10}"
        axes.errorbar(
            [float(b) for b in shown],
            values,
            yerr=[below, above],
            marker="o",
            capsize=3,
            color=color,
            label=f"{task}, {length:,} tokens",
        )
        if DENSE in by_arm:
            axes.axhline(by_arm[DENSE]["value"], color=color, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"budget ({settings['budget_unit']}); dotted: dense")
    axes.set_ylabel("exact answers")
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(f"{settings['model']}, {settings['method']}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
