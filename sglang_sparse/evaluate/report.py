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

Z = 1.959964  # of a two-sided 95 % interval


def cells(entries: list[dict[str, Any]], arms: list[Arm]) -> list[dict[str, Any]]:
    """One cell a task, length and arm, with a 95 % interval; then those that lm-eval made.

    Accuracies have Wilson intervals. A perplexity is that of the mean over windows, and its
    interval follows from their spread.
    """
    grouped: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    made: list[dict[str, Any]] = []
    order = {arm.name: number for number, arm in enumerate(arms)}
    for entry in entries:
        if entry["arm"] not in order:
            continue
        if "cells" in entry:
            made += entry["cells"]
        else:
            grouped[entry["task"], entry["length"], entry["arm"]].append(entry)
    keys = sorted(grouped, key=lambda k: (k[0] == PERPLEXITY, k[0], k[1], order[k[2]]))
    made.sort(key=lambda cell: (cell["task"], order[cell["arm"]]))
    return [*(_cell(*key, grouped[key]) for key in keys), *made]


def _cell(task: str, length: int, arm: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    cell: dict[str, Any] = {"task": task, "length": length, "arm": arm, "count": len(entries)}
    if task == PERPLEXITY:
        losses = [entry["nll"] for entry in entries]
        mean = statistics.fmean(losses)
        spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        bounds = [math.exp(mean - Z * spread), math.exp(mean + Z * spread)]
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
    rows: dict[tuple[str, int | None], dict[str, str]] = defaultdict(dict)
    for cell in found:
        digits = 2 if cell["task"] == PERPLEXITY else 3
        text = f"{cell['value']:.{digits}f}"
        if cell["low"] is not None:
            text += f" [{cell['low']:.{digits}f}, {cell['high']:.{digits}f}]"
        rows[cell["task"], cell["length"]][cell["arm"]] = text
    for (task, length), row in rows.items():
        out.add_row(
            task, "" if length is None else str(length), *(row.get(arm.name, "-") for arm in arms)
        )
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
    shares = [c for c in found if c["task"] != PERPLEXITY and 0 <= c["value"] <= 1]
    if shares:
        _plot(folder / "accuracy.png", shares, arms, settings)


def _plot(
    path: Path, found: list[dict[str, Any]], arms: list[Arm], settings: dict[str, Any]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    budgets = [arm.name for arm in arms if arm.name != DENSE]
    lines = sorted({(c["task"], c["length"] or 0) for c in found})
    for number, (task, length) in enumerate(lines):
        by_arm = {c["arm"]: c for c in found if (c["task"], c["length"] or 0) == (task, length)}
        shown = [b for b in budgets if b in by_arm]
        values = [by_arm[b]["value"] for b in shown]
        ends = [(by_arm[b]["low"], by_arm[b]["high"]) for b in shown]
        below = [0 if low is None else v - low for v, (low, _) in zip(values, ends, strict=True)]
        above = [0 if high is None else high - v for v, (_, high) in zip(values, ends, strict=True)]
        color = f"C{number % 10}"
        axes.errorbar(
            [float(b) for b in shown],
            values,
            yerr=[below, above],
            marker="o",
            capsize=3,
            color=color,
            label=f"{task}, {length:,} tokens" if length else task,
        )
        if DENSE in by_arm:
            axes.axhline(by_arm[DENSE]["value"], color=color, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([float(b) for b in budgets], budgets)
    axes.minorticks_off()
    axes.set_xlabel(f"budget ({settings['budget_unit']}); dotted: dense")
    axes.set_ylabel("share of exact answers, or lm-eval's metric")
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(f"{settings['model']}, {settings['method']}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
