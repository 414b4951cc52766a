# SPDX-License-Identifier: Apache-2.0
"""One HTML page of the capacity reports in a folder: a table and plots, no other files needed.

python loadtest/report.py results              # writes results/capacity.html
python loadtest/report.py results docs/results.md    # and the table between its markers
"""

from __future__ import annotations

import argparse
import html
import io
import json
from pathlib import Path
from typing import Any

from render_latency import fill

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .3rem .8rem; text-align: right }
th { border-bottom: 2px solid #888 } td { border-bottom: 1px solid #ddd } .name { text-align: left }
svg { max-width: 100%; height: auto } .met { color: #080 } .missed { color: #a00 }
"""


def _reports(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    reports = [r for r in found if isinstance(r, dict) and "capacity" in r and "trials" in r]
    # Dense first: the others are read against it.
    return sorted(reports, key=lambda r: (r["label"] != "dense", r["label"]))


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _plots(reports: list[dict[str, Any]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    gaps, queues = figure.subplots(1, 2)
    for number, report in enumerate(reports):
        trials = sorted(report["trials"], key=lambda t: t["rate"])
        color = f"C{number}"
        for axes, key, scale in ((gaps, "gap_p99_s", 1000), (queues, "queued_p50_s", 1)):
            points = [(t["rate"], scale * t[key]) for t in trials if t[key] is not None]
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=report["label"])
        for name, limit in report["limits_s"].items():
            style = ":" if name == "strict" else "--"
            gaps.axhline(1000 * limit, color=color, linestyle=style, linewidth=0.8)
    queues.axhline(2, color="grey", linestyle="--", linewidth=0.8)
    gaps.set(ylabel="time between tokens, P99, ms", title="dotted: 5 x, dashed: 25 x")
    queues.set(ylabel="time in the queue, median, s", title="dashed: 2 s")
    for axes in (gaps, queues):
        axes.set_xlabel("requests a second")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend()
    gaps.set_yscale("log")
    bars = Figure(figsize=(10, 3), layout="constrained")
    axes = bars.add_subplot()
    names = list(reports[0]["capacity"])
    width = 0.8 / len(reports)
    for number, report in enumerate(reports):
        places = [i + number * width for i in range(len(names))]
        shown = axes.bar(places, [report["capacity"][n] for n in names], width,
                         label=report["label"])  # fmt: skip
        axes.bar_label(shown, fmt="%g")
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names)
    axes.set_ylabel("capacity, requests a second")
    axes.margins(y=0.12)
    axes.legend()
    return _svg(bars) + _svg(figure)


def failed_at(trials: list[dict[str, Any]], name: str) -> float | None:
    """The lowest rate that failed an objective; None if all met it."""
    return min((t["rate"] for t in trials if not t["within"][name]), default=None)


def _cell(value: Any, scale: float = 1, digits: int = 2) -> str:
    return "<td>-</td>" if value is None else f"<td>{value * scale:.{digits}f}</td>"


def _table(reports: list[dict[str, Any]]) -> str:
    names = list(reports[0]["capacity"])
    heads = "".join(
        f"<th>{name}: requests/s</th><th>lowest that failed</th><th>beside the first</th>"
        for name in names
    )
    rows = []
    for report in reports:
        row = f"<td class=name>{html.escape(report['label'])}</td>"
        row += _cell(report["unloaded"]["step_s"], 1000)
        row += _cell(report["unloaded"]["first_token_s"], 1000, 0)
        for name in names:
            base, rate = reports[0]["capacity"][name], report["capacity"][name]
            row += _cell(rate) + _cell(failed_at(report["trials"], name))
            row += f"<td>{rate / base:.2f} x</td>" if base else "<td>-</td>"
        rows.append(f"<tr>{row}</tr>")
    return (
        "<table><tr><th class=name>server</th><th>decode step alone, ms</th>"
        f"<th>first token alone, ms</th>{heads}</tr>{''.join(rows)}</table>"
    )


def _trials(report: dict[str, Any]) -> str:
    rows = []
    for trial in sorted(report["trials"], key=lambda t: t["rate"]):
        marks = " ".join(
            f"<span class={'met' if met else 'missed'}>{name} {'met' if met else 'missed'}</span>"
            for name, met in trial["within"].items()
        )
        rows.append(
            f"<tr>{_cell(trial['rate'])}<td>{trial['done']} of {trial['sent']}</td>"
            f"{_cell(trial['gap_p50_s'], 1000)}{_cell(trial['gap_p99_s'], 1000)}"
            f"{_cell(trial['first_token_p50_s'], 1000, 0)}{_cell(trial['queued_p50_s'], 1, 3)}"
            f"{_cell(trial['tokens_per_second'], 1, 0)}<td class=name>{marks}</td></tr>"
        )
    where = " · ".join(
        str(part)
        for part in (
            report.get("device"),
            report.get("commit"),
            f"sglang {report['sglang']}",
            report.get("flags"),
        )
        if part
    )
    return (
        f"<h2>{html.escape(report['label'])}</h2><p>{html.escape(where)}</p>"
        "<table><tr><th>requests/s</th><th>done</th><th>between tokens P50, ms</th><th>P99, ms</th>"
        "<th>first token P50, ms</th><th>queue P50, s</th><th>tokens/s</th>"
        f"<th class=name>objectives</th></tr>{''.join(rows)}</table>"
    )


def page(reports: list[dict[str, Any]]) -> str:
    """The page; `reports` are those of `capacity.py`, at least one."""
    scenario = reports[0]
    about = f"{scenario['scenario']}: {scenario['about']}"
    rule = (
        "Capacity is the highest rate of Poisson arrivals at which the 99th percentile of the time "
        "between tokens stays under 5 x (strict) or 25 x (relaxed) the decode step of a single "
        "request on that server, and the median time in the queue under 2 s."
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Capacity</title>"
        f"<style>{STYLE}</style><h1>Capacity</h1><p>{html.escape(about)}</p><p>{rule}</p>"
        f"{_table(reports)}{_plots(reports)}{''.join(map(_trials, reports))}</html>\n"
    )


def markdown(reports: list[dict[str, Any]]) -> str:
    """The table for a page: of each objective the highest rate that met it, and what failed."""
    names = list(reports[0]["capacity"])
    lines = ["| | decode step alone | " + " | ".join(f"{n}: requests/s" for n in names) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(names))
    for report in reports:
        row = [report["label"], f"{1000 * report['unloaded']['step_s']:.2f} ms"]
        for name in names:
            base, rate = reports[0]["capacity"][name], report["capacity"][name]
            failed = failed_at(report["trials"], name)
            text = f"{rate:g}" + ("" if failed is None else f", not {failed:g}")
            if report is not reports[0] and base:
                text += f" ({rate / base:.2f} x)"
            row.append(text)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def write_report(folder: Path) -> Path:
    """Write `capacity.html` beside the reports.

    Raises:
        ValueError: the folder holds none.
    """
    reports = _reports(folder)
    if not reports:
        raise ValueError(f"{folder} holds no report of capacity.py")
    path = folder / "capacity.html"
    path.write_text(page(reports), encoding="utf-8")
    return path


def main() -> None:
    """Write the page, and fill in a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="folder with reports of capacity.py")
    parser.add_argument("readme", type=Path, nargs="?", help="file with the table's markers")
    args = parser.parse_args()
    try:
        print(write_report(args.results))
    except ValueError as error:
        parser.error(str(error))
    if args.readme is not None:
        fill(args.readme, "capacity", markdown(_reports(args.results)))


if __name__ == "__main__":
    main()
