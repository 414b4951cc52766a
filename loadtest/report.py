# SPDX-License-Identifier: Apache-2.0
"""Capacity reports of several servers as one HTML page and one Markdown table.

python loadtest/report.py results    # writes results/capacity.html and capacity.md
"""

import argparse
import gzip
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from objectives import LEAST_SECONDS, MET, MISSED, UNDECIDED

Reports = list[dict[str, Any]]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .3rem .8rem; text-align: right }
th { border-bottom: 2px solid #888 } td { border-bottom: 1px solid #ddd } .name { text-align: left }
svg { max-width: 100%; height: auto }
.met { color: #064 } .missed { color: #900; font-weight: bold } .undecided { color: #555 }
.answer { white-space: nowrap }
"""
RULE = (
    "Capacity is the highest rate of Poisson arrivals at which the 99th percentile of the time "
    "between tokens stays within a limit, every request is answered, and the median time in the "
    "queue stays within 2 s. The limits are the same for every server. A rate is <b>met</b> if the "
    "whole 95 % interval of the percentile lies within the limit, <b>missed</b> if all of it lies "
    "above, or if answers or the queue failed, and <b>undecided</b> otherwise, as in every trial "
    f"under {LEAST_SECONDS:g} s. Beside each rate that arrived is the rate that was answered, from "
    "the first arrival to the last answer, and the median time in the queue."
)


def read_reports(paths: Iterable[Path]) -> Reports:
    """The reports among some JSON files, gzipped or not; that which the limits come from is first.

    Raises:
        ValueError: there is no report, or they cannot be compared.
    """
    reports = []
    for path in paths:
        try:
            raw = path.read_bytes()
            content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error})") from error
        if isinstance(content, dict) and "limits_from" in content and "trials" in content:
            reports.append(content)
    if not reports:
        raise ValueError("these files hold no report of capacity.py")
    first = reports[0]
    for report in reports[1:]:
        for name in ("scenario", "limits_s"):
            if report[name] != first[name]:
                raise ValueError(
                    f"{first['label']} and {report['label']} cannot be compared: {name} is "
                    f"{first[name]} and {report[name]}; measure both with the same --limit-from"
                )
        for name in ("seconds", "least_rate", "most_rate"):
            values = [each["settings"][name] for each in (first, report)]
            if values[0] != values[1]:
                raise ValueError(
                    f"{first['label']} and {report['label']} cannot be compared: {name} is "
                    f"{values[0]} and {values[1]}; measure both with the same "
                    f"--{name.replace('_', '-')}"
                )
    return sorted(reports, key=lambda r: (f"{r['label']}.json" != r["limits_from"], r["label"]))


def trial_at(report: dict[str, Any], rate: float | None) -> dict[str, Any] | None:
    """The trial at a rate."""
    return next((t for t in report["trials"] if t["rate"] == rate), None)


def answered(trial: dict[str, Any]) -> float:
    """Requests answered a second, from the first arrival to the last answer."""
    return float(trial["done"] / trial["seconds"])


def decisive(report: dict[str, Any], name: str) -> list[tuple[dict[str, Any], str]]:
    """The trials that answer for an objective, each with its verdict.

    The highest rate that met it, the lowest that missed it, and all below that are undecided.
    """
    found = report["capacity"][name]
    met, missed = found["met"], found["missed"]
    undecided = sorted(
        t["rate"] for t in report["trials"]
        if t["verdicts"][name] == UNDECIDED and (missed is None or t["rate"] < missed)
    )  # fmt: skip
    rates = [(met, MET), (missed, MISSED), *((rate, UNDECIDED) for rate in undecided)]
    trials = ((trial_at(report, rate), word) for rate, word in rates)
    return [(trial, word) for trial, word in trials if trial is not None]


def answer(report: dict[str, Any], name: str) -> str:
    """The result of an objective in words."""
    grouped: dict[str, list[str]] = {}
    for trial, word in decisive(report, name):
        grouped.setdefault(word, []).append(f"{trial['rate']:g}")
    return ", ".join(f"{', '.join(rates)} {word}" for word, rates in grouped.items()) or "no trial"


def samples(report: dict[str, Any], name: str) -> str:
    """What the result of an objective rests on: a line for each of its rates.

    The percentile, its interval and its gaps; the rate that was answered, the median time in the
    queue, and the answers where some are missing.
    """
    return "<br>".join(_sample(trial) for trial, _ in decisive(report, name)) or "-"


def _sample(trial: dict[str, Any]) -> str:
    said = "no gaps"
    if trial["gap_p99_s"] is not None:
        ends = trial["gap_p99_interval_s"]
        between = "" if ends is None else " [{:.1f}, {:.1f}]".format(*(1000 * end for end in ends))
        said = f"{1000 * trial['gap_p99_s']:.1f} ms{between}, {trial['gaps']:,} gaps"
    said += f", {answered(trial):.3g} answered/s"
    if trial["queued_p50_s"] is not None:
        said += f", queue {1000 * trial['queued_p50_s']:,.0f} ms"
    if trial["done"] < trial["sent"]:
        said += f", {trial['done']:,} of {trial['sent']:,} answered"
    return f"{trial['rate']:g}: {said}"


def ratio(report: dict[str, Any], base: dict[str, Any], name: str) -> str:
    """The range of the ratio of two servers' capacities, as far as the trials tell."""
    one, other = report["capacity"][name], base["capacity"][name]
    low = one["met"] / other["missed"] if one["met"] and other["missed"] else None
    high = one["missed"] / other["met"] if one["missed"] and other["met"] else None
    if low is None and high is None:
        return "-"
    if high is None:
        return f"above {low:.2f} x"
    if low is None:
        return f"below {high:.2f} x"
    return f"{low:.2f} to {high:.2f} x"


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _plots(reports: Reports) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    gaps, queues = figure.subplots(1, 2)
    for number, report in enumerate(reports):
        color, marker = f"C{number % 10}", "os^Dv<>P*X"[number % 10]
        trials = sorted(report["trials"], key=lambda t: t["rate"])
        for axes, key, scale in ((gaps, "gap_p99_s", 1000), (queues, "queued_p50_s", 1)):
            shown = [t for t in trials if t[key] is not None]
            rates, values = [t["rate"] for t in shown], [scale * t[key] for t in shown]
            axes.plot(rates, values, marker=marker, color=color, label=report["label"])
            if axes is gaps:
                ends = [t["gap_p99_interval_s"] or (t[key], t[key]) for t in shown]
                axes.vlines(rates, [scale * e[0] for e in ends], [scale * e[1] for e in ends],
                            color=color)  # fmt: skip
    for name, limit in reports[0]["limits_s"].items():
        gaps.axhline(1000 * limit, color="grey", linestyle="--", linewidth=0.8)
        gaps.annotate(f"{name}: {1000 * limit:.1f} ms", (0.01, 1000 * limit), va="bottom",
                      xycoords=("axes fraction", "data"), fontsize="small")  # fmt: skip
    queues.axhline(2, color="grey", linestyle="--", linewidth=0.8)
    gaps.set(ylabel="time between tokens, P99, ms", yscale="log")
    queues.set(ylabel="time in the queue, median, s", title="dashed: 2 s")
    for axes in (gaps, queues):
        axes.set_xlabel("requests a second")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend()
    return _svg(figure)


def _cell(value: Any, scale: float = 1, digits: int = 2) -> str:
    return "<td>-</td>" if value is None else f"<td>{value * scale:.{digits}f}</td>"


def _table(reports: Reports) -> str:
    heads = "".join(
        f"<th>{name} ({1000 * limit:.1f} ms): requests/s</th>"
        "<th>at each: P99 [95 % interval]</th><th>beside the first</th>"
        for name, limit in reports[0]["limits_s"].items()
    )
    rows = []
    for report in reports:
        row = f"<td class=name>{html.escape(report['label'])}</td>"
        row += _cell(report["unloaded"]["step_s"], 1000)
        row += _cell(report["unloaded"]["first_token_s"], 1000, 0)
        for name in report["limits_s"]:
            beside = "" if report is reports[0] else ratio(report, reports[0], name)
            row += "".join(
                f"<td class=answer>{text}</td>"
                for text in (
                    answer(report, name).replace(", ", ",<br>"),
                    samples(report, name),
                    beside,
                )
            )
        rows.append(f"<tr>{row}</tr>")
    return (
        "<table><tr><th class=name>server</th><th>decode step alone, ms</th>"
        f"<th>first token alone, ms</th>{heads}</tr>{''.join(rows)}</table>"
    )


def _trials(report: dict[str, Any]) -> str:
    rows = []
    for trial in sorted(report["trials"], key=lambda t: t["rate"]):
        marks = "".join(
            f"<td class='name {word}'>{word}</td>" for word in trial["verdicts"].values()
        )
        ends = trial["gap_p99_interval_s"]
        interval = "-" if ends is None else f"{1000 * ends[0]:.2f} to {1000 * ends[1]:.2f}"
        rows.append(
            f"<tr>{_cell(trial['rate'])}{_cell(answered(trial))}"
            f"<td>{trial['done']} of {trial['sent']}</td>"
            f"<td>{trial['gaps']:,}</td>{_cell(trial['gap_p50_s'], 1000)}"
            f"{_cell(trial['gap_p99_s'], 1000)}<td>{interval}</td>"
            f"{_cell(trial['first_token_p50_s'], 1000, 0)}{_cell(trial['queued_p50_s'], 1, 3)}"
            f"{_cell(trial['tokens_per_second'], 1, 0)}{marks}</tr>"
        )
    parts = (report.get("device"), report.get("commit"), f"sglang {report['sglang']}",
             report.get("flags"), f"trials of {report['settings']['seconds']:g} s")  # fmt: skip
    where = " · ".join(str(part) for part in parts if part)
    heads = "".join(f"<th class=name>{html.escape(name)}</th>" for name in report["limits_s"])
    return (
        f"<h2>{html.escape(report['label'])}</h2><p>{html.escape(where)}</p>"
        "<table><tr><th>requests/s</th><th>answered/s</th><th>done</th><th>gaps</th>"
        "<th>between tokens P50, ms</th><th>P99, ms</th><th>95 % interval, ms</th>"
        "<th>first token P50, ms</th><th>queue P50, s</th><th>tokens/s</th>"
        f"{heads}</tr>{''.join(rows)}</table>"
    )


def page(reports: Reports) -> str:
    """The page; `reports` are those of :func:`read_reports`."""
    first = reports[0]
    about = f"{first['scenario']}: {first['about']}"
    limits = " and ".join(f"{n} {1000 * limit:.1f} ms" for n, limit in first["limits_s"].items())
    source = f"Limits, from {first['limits_from']}: {limits}."
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Capacity</title>"
        f"<style>{STYLE}</style><h1>Capacity</h1><p>{html.escape(about)}</p><p>{RULE}</p>"
        f"<p>{html.escape(source)}</p>"
        f"{_table(reports)}{_plots(reports)}{''.join(map(_trials, reports))}</html>\n"
    )


def markdown(reports: Reports) -> str:
    """The table for a Markdown page: the rates that met and missed each objective."""
    limits = reports[0]["limits_s"]
    heads = [
        f"{name} ({1000 * limit:.1f} ms): requests/s | at each: P99 [95 % interval] | "
        f"beside {reports[0]['label']}"
        for name, limit in limits.items()
    ]
    lines = ["| | decode step alone | " + " | ".join(heads) + " |"]
    lines.append("| --- | ---: |" + " --- | --- | --- |" * len(limits))
    for report in reports:
        row = [report["label"], f"{1000 * report['unloaded']['step_s']:.2f} ms"]
        for name in limits:
            beside = "" if report is reports[0] else ratio(report, reports[0], name)
            row += [answer(report, name), samples(report, name), beside]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def write_report(folder: Path, reports: Reports | None = None) -> Path:
    """Write `capacity.html` and `capacity.md`; of the reports in the folder if none are given.

    Raises:
        ValueError: there are none, or they cannot be compared.
    """
    reports = reports or read_reports(sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]))
    (folder / "capacity.md").write_text(markdown(reports) + "\n", encoding="utf-8")
    path = folder / "capacity.html"
    path.write_text(page(reports), encoding="utf-8")
    return path


def main() -> None:
    """Write the page and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="folder with reports of capacity.py")
    args = parser.parse_args()
    try:
        print(write_report(args.results))
    except ValueError as error:
        parser.error(f"{args.results}: {error}")


if __name__ == "__main__":
    main()
