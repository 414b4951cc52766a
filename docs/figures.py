# SPDX-License-Identifier: Apache-2.0
"""README's picture and rows of results, and PSA's tables, from the committed raw files."""

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

from latency_tables import report_of

from sglang_sparse.research.tables import cells_of, from_columns

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "loadtest" / "results"
_BENCH = ROOT / "kernels" / "bench" / "results" / "h200"
_PSA_RUNS = ("psa-9404f71.json.gz", "psa-again-9404f71.json.gz")
# What the picture shows of the shipped presets.
LINES = ("dense", "psa", "sparcas", "page_minmax", "kascade_sketch", "lserve")
BATCHES = (1, 16)
_MS, _S = "ms_per_token", "first_token_s"


def _cells(folder: str, label: str) -> list[dict[str, Any]]:
    return cells_of(report_of(RESULTS / folder, label))


def picture() -> str:
    """Milliseconds per output token over the context, dense and sparse, as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[str, Any] = {
        "svg.hashsalt": "sglang-sparse",
        "svg.fonttype": "none",
        "font.size": 9,
        # Each text names all of them, and matplotlib's own list is long.
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(8, 3), layout="constrained")
        for axes, batch in zip(figure.subplots(1, 2), BATCHES, strict=True):
            for name in LINES:
                points = sorted(
                    (cell["context"] / 1000, cell["ms_per_token"])
                    for cell in _cells("h200-shipped", name)
                    if cell["shared_prompt"] and cell["batch"] == batch
                )
                dense = name == "dense"
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    label="dense (FlashInfer)" if dense else name,
                    color="black" if dense else None,
                    linewidth=2 if dense else 1.2,
                )
            axes.set_ylim(bottom=0)
            axes.set_xlabel("context, thousand tokens")
            axes.set_title("one request" if batch == 1 else f"{batch} requests", fontsize=10)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("ms per output token")
        figure.axes[1].legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _smaller(buffer.getvalue())


def _smaller(text: str) -> str:
    """An SVG of matplotlib's that looks the same in half of the bytes."""
    # Tenths of a point are finer than a screen.
    text = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)
    # Nothing refers to a group, nothing is outside of the axes, and some turn by nothing.
    text = re.sub(r'(?<=<g) id="[^"]*"| transform="rotate\(-0 [^"]*"| clip-path="[^"]*"', "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub("<metadata>.*</metadata>|<!DOCTYPE[^>]*>|<clipPath.*?</clipPath>", "", text)
    font = re.search(r"font-family: [^;\"]*(?=;)", text)
    assert font is not None
    text = text.replace(f"{font[0]}; ", "")
    text = re.sub(' d="[^"]*"', lambda path: re.sub("(?<! d) ?([A-Zz]) ?", r"\1", path[0]), text)
    while (fewer := re.sub(r"<g ?>((?:(?!</?g\b).)*)</g>", r"\1", text)) != text:
        text = fewer
    # Each style and each name once, by a number.
    styles = dict.fromkeys(re.findall(r' style="([^"]*)"', text))
    rules = f"svg{{{font[0]}}}"
    for number, style in enumerate(styles):
        text = text.replace(f' style="{style}"', f' class="s{number}"')
        rules += f".s{number}{{{style}}}"
    for number, name in enumerate(dict.fromkeys(re.findall(r'<path id="(\w+)"', text))):
        text = text.replace(name, f"m{number}")
    text = text.replace("</style>", f"{rules}</style>")
    text = text.replace("<defs> </defs>", "")
    return re.sub(r" *(<(?:path|use|text)\b)", r"\n\1", text).rstrip() + "\n"


def _cell(folder: str, label: str, context: int, batch: int, shared: bool) -> dict[str, Any]:
    wanted = {"context": context, "batch": batch, "shared_prompt": shared}
    return next(cell for cell in _cells(folder, label) if wanted.items() <= cell.items())


def _pair(folder: str, label: str, cell: tuple[int, int, bool], key: str) -> tuple[float, float]:
    """A figure of a dense server and of a sparse one, of the same run."""
    return _cell(folder, "dense", *cell)[key], _cell(folder, label, *cell)[key]


def headline() -> str:
    """README's five rows: dense, sparse, and how many times faster, each of one run."""
    path = RESULTS / "h200-turns" / "1k-first.json.gz"
    turns = json.loads(gzip.decompress(path.read_bytes()))
    short = next(c for c in turns["cells"] if (c["context"], c["batch"]) == (1000, 16))["servers"]
    rows = [
        (
            "ms per token, 1,000 tokens, 16 requests",
            "sparcas",
            (short["dense"][_MS], short["sparcas"][_MS]),
        ),
        (
            "ms per token, 120,000 tokens, 1 request",
            "page_minmax",
            _pair("h200-shipped", "page_minmax", (120_000, 1, True), _MS),
        ),
        (
            "ms per token, 120,000 tokens, 16 requests on one prompt",
            "sparcas",
            _pair("h200-shipped", "sparcas", (120_000, 16, True), _MS),
        ),
        (
            "ms per token, 120,000 tokens, 6 requests with prompts of their own",
            "kascade_sketch",
            _pair("h200-shipped", "kascade_sketch", (120_000, 6, False), _MS),
        ),
        (
            "seconds to the first token, 120,000 tokens",
            "kascade_sketch",
            _pair("h200-shipped", "kascade_sketch", (120_000, 6, False), _S),
        ),
    ]
    lines = [
        "| measured | method | dense | sparse | times faster |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for what, method, (dense, sparse) in rows:
        lines.append(f"| {what} | `{method}` | {dense:.2f} | {sparse:.2f} | {dense / sparse:.2f} |")
    return "\n".join(lines)


def _psa_runs() -> list[list[dict[str, Any]]]:
    """The cases of each run; a file holds one run or several."""
    runs = []
    for name in _PSA_RUNS:
        content = from_columns(json.loads(gzip.decompress((_BENCH / name).read_bytes())))
        reports = content if isinstance(content, list) else [content]
        runs += [report["rows"] for report in reports]
    return runs


def _psa_case(row: dict[str, Any]) -> str:
    requests = "1 request" if row["batch"] == 1 else f"{row['batch']} requests"
    length, kind = row["case"].split(", ", 1)
    share = kind.rpartition("in ")[2].replace("%", " %")
    even = f"stops alike, mass in {share}" if row["batch"] > 1 else f"mass in {share}"
    return f"{length}, {requests}, {'one long among short' if 'long' in kind else even}"


def psa_served() -> str:
    """Milliseconds per token of `psa` and dense, from the run of its newest kernels."""
    dense = {(c["context"], c["batch"]): c[_MS] for c in _cells("h200-psa", "dense")}
    psa = {(c["context"], c["batch"]): c[_MS] for c in _cells("h200-psa", "psa")}
    lines = ["| context | batch | dense | psa |", "| ---: | ---: | ---: | ---: |"]
    for context, batch in sorted(dense.keys() & psa.keys()):
        ms, ratio = psa[context, batch], dense[context, batch] / psa[context, batch]
        lines.append(
            f"| {context:,} | {batch} | {dense[context, batch]:.2f} | {ms:.2f} ({ratio:.2f} x) |"
        )
    return "\n".join(lines)


def psa_dense() -> str:
    """How many times faster than dense a step of `psa` is, in every cell of the first run."""
    lines = ["| case | small turn | medium turn | large turn |", "| --- | --- | --- | --- |"]
    for row in _psa_runs()[0]:
        cells = [
            f"{row['flashinfer_dense_us'] / turn['us']['step']:.2f} x "
            f"({turn['blocks']['mean']:.0f}; {turn['expected']['moved_by']:.0%})"
            for turn in row["turns"]
        ]
        lines.append(f"| {_psa_case(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def psa_fixed() -> str:
    """How much longer `psa` takes than a fixed budget of as many blocks: worst of all runs."""
    runs = _psa_runs()
    lines = [
        "| case | blocks | stops move by | same stops | stops move |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for row in runs[0]:
        if row["batch"] == 1:
            continue
        for number, turn in enumerate(row["turns"]):
            same = [
                other["turns"][number]["us"]
                for run in runs
                for other in run
                if other["case"] == row["case"]
            ]
            cells = [
                f"{max(us[key] / us['fixed_attend'] for us in same):.2f} "
                f"({max(us[key] / us['fixed_as_served'] for us in same):.2f})"
                for key in ("attend_same_query", "attend")
            ]
            blocks, moved = turn["blocks"]["mean"], turn["expected"]["moved_by"]
            lines.append(
                f"| {_psa_case(row)} | {blocks:.0f} | {moved:.0%} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def psa_preset() -> str:
    """Accuracy and KV touched of the reference model's presets, as their study wrote it."""
    report = ROOT / "configs" / "reference" / "psa-report" / "presets" / "table.md"
    return report.read_text(encoding="utf-8").rstrip("\n")
