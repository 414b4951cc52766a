# SPDX-License-Identifier: Apache-2.0
"""From single answers to one table: terminal, JSON, CSV and a plot of accuracy over budget."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sglang_sparse.evaluate.arms import DENSE, Arm
from sglang_sparse.evaluate.run import PERPLEXITY
from sglang_sparse.tasks import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Z = 1.959964  # of a two-sided 95 % interval
PICTURE = "accuracy.png"
_SPREAD = 0.5  # of the way from one arm to the next, over which curves are spread
_MARKERS = "os^Dv<>P*X"
_LINES = ("-", "--", "-.", ":")


def cells(entries: list[dict[str, Any]], arms: list[Arm]) -> list[dict[str, Any]]:
    """A cell for each task, length and arm, with a 95 % interval; then the cells of lm-eval.

    Accuracies have Wilson intervals. A perplexity is the exponential of the mean loss over windows,
    and its interval follows from the spread of the losses.
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
    """The table in the terminal: a row for each task and length, a column for each arm."""
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


def publish(
    folder: Path,
    settings: dict[str, Any],
    found: list[dict[str, Any]],
    arms: list[Arm],
    console: Console,
) -> None:
    """Write the files, print the table, and then draw the picture.

    If the picture cannot be drawn, there is one line of warning, and the report is still written.
    """
    write(folder, settings, found)
    console.print(table(found, arms))
    path = folder / PICTURE
    path.unlink(missing_ok=True)  # that of an earlier, shorter run would look like this one's
    shares = [c for c in found if c["task"] != PERPLEXITY and 0 <= c["value"] <= 1]
    if not shares:
        return
    try:
        draw(shares, arms, settings).savefig(path, dpi=150)
    except Exception as error:  # whatever a drawing library raises; the report is written
        problem = " ".join(str(error).split())
        console.print(
            f"warning: {path} was not drawn ({type(error).__name__}: {problem}); "
            "the results are in results.json and results.csv",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def write(folder: Path, settings: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """`results.json` and `results.csv`."""
    report = {"settings": settings, "cells": found}
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    names = ["task", "length", "arm", "count", "value", "low", "high", "recall"]
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(found)


def draw(found: list[dict[str, Any]], arms: list[Arm], settings: dict[str, Any]) -> Figure:
    """Accuracy of each task and length over the arms, dense last.

    Each curve has its own colour, marker and line style, and is moved a little to the side. So
    equal curves, such as perfect scores, stay visible.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [arm.name for arm in arms if arm.name != DENSE] + [DENSE]
    curves = sorted({(c["task"], c["length"] or 0) for c in found})
    for number, (task, length) in enumerate(curves):
        by_arm = {c["arm"]: c for c in found if (c["task"], c["length"] or 0) == (task, length)}
        shift = _SPREAD * ((number + 0.5) / len(curves) - 0.5)
        label = f"{task}, {length:,} tokens" if length else task
        color, marker = f"C{number % 10}", _MARKERS[number % len(_MARKERS)]
        places = [i for i, name in enumerate(names) if name in by_arm]
        points = [by_arm[names[i]] for i in places]
        # An interval of lm-eval may be missing, and rounding must not turn it inside out.
        ends = [[0.0 if p[end] is None else abs(p["value"] - p[end]) for p in points]
                for end in ("low", "high")]  # fmt: skip
        axes.errorbar(
            [i + shift for i in places],
            [p["value"] for p in points],
            yerr=ends,
            linestyle="",
            capsize=3,
            label=label,
            color=color,
            marker=marker,
        )
        joined = [(i + shift, by_arm[names[i]]["value"]) for i in places if names[i] != DENSE]
        if joined:
            line = _LINES[number % len(_LINES)]
            axes.plot(*zip(*joined, strict=True), linestyle=line, color=color)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xlabel(f"budget ({settings['budget_unit']})")
    axes.set_ylabel("share of exact answers, or lm-eval's metric")
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(f"{settings['model']}, {settings['method']}")
    axes.legend(fontsize="small")
    return figure
