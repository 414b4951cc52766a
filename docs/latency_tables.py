# SPDX-License-Identifier: Apache-2.0
"""Decode tables of docs/results.md, from the JSON files of `loadtest/compare_latency.py`.

    python docs/latency_tables.py FOLDER    # prints the table of any such folder

The folder holds `dense.json` and one file for each sparse method; they may be compressed
(`dense.json.gz`). `docs/generate.py` writes the tables of the committed folders.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from sglang_sparse.research.tables import cells_of

RESULTS = Path(__file__).parents[1] / "loadtest" / "results"
GIB = 2**30


def report_of(folder: Path, label: str) -> dict[str, Any]:
    """The report of one configuration, compressed or not."""
    plain = folder / f"{label}.json"
    if plain.exists():
        content = plain.read_bytes()
    else:
        content = gzip.decompress((folder / f"{label}.json.gz").read_bytes())
    report: dict[str, Any] = json.loads(content)
    return report


def cells(report: dict[str, Any]) -> dict[tuple[int, int, bool], dict[str, Any]]:
    """Cells of one report by (context, batch, shared prompt)."""
    return {(c["context"], c["batch"], c["shared_prompt"]): c for c in cells_of(report)}


def table(folder: Path) -> str:
    """The Markdown tables, sparse methods beside dense, with the ratio to dense."""
    dense = report_of(folder, "dense")
    names = {path.name.split(".")[0] for path in folder.glob("*.json*")} - {"dense"}
    sparse = [report_of(folder, name) for name in sorted(names)]
    labels = [report["label"] for report in sparse]
    lines = ["| context | batch | prompts | dense | " + " | ".join(labels) + " |"]
    lines.append("| ---: | ---: | --- | ---: |" + " ---: |" * len(sparse))
    for key, cell in cells(dense).items():
        if not any(key in cells(report) for report in sparse):
            continue
        context, batch, shared = key
        row = [f"{context:,}", str(batch), "one, shared" if shared else "separate"]
        row.append(f"{cell['ms_per_token']:.2f}")
        for report in sparse:
            other = cells(report).get(key)
            ratio = "" if other is None else cell["ms_per_token"] / other["ms_per_token"]
            row.append("-" if other is None else f"{other['ms_per_token']:.2f} ({ratio:.2f} x)")
        lines.append("| " + " | ".join(row) + " |")
    lines += first_tokens(dense, sparse)
    lines += [
        "",
        "| | KV tokens that fit | planes | GPU memory in use after it |",
        "| --- | ---: | ---: | ---: |",
    ]
    for report in (dense, *sparse):
        planes = sum((report.get("sparse") or {}).get("plane_bytes", {}).values())
        used = report.get("memory_used_mib")
        lines.append(
            f"| {report['label']} | {report['max_total_num_tokens']:,} | "
            + (f"{planes / GIB:.2f} GiB" if planes else "none")
            + f" | {'not measured' if used is None else f'{used / 1024:.1f} GiB'} |"
        )
    return "\n".join(lines)


def first_tokens(dense: dict[str, Any], sparse: list[dict[str, Any]]) -> list[str]:
    """Seconds to the first token of uncached prompts; empty if none was timed.

    Each prompt was sent alone, so a report may hold more or fewer of them than the dense one.
    """
    alone, *others = (
        {key[0]: cell["first_token_s"] for key, cell in cells(report).items() if not key[2]}
        for report in (dense, *sparse)
    )
    contexts = sorted(n for n in alone if any(n in other for other in others))
    if not contexts:
        return []
    heads = ["context", "dense, s", *(f"{report['label']}, s" for report in sparse)]
    lines = ["", "| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    for n in contexts:
        row = [f"{n:,}", f"{alone[n]:.2f}"]
        row += [f"{o[n]:.2f} ({o[n] / alone[n]:.3f})" if n in o else "-" for o in others]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def decode_table(folder: str) -> str:
    """The table of a committed folder, by its name."""
    return table(RESULTS / folder)


def main() -> None:
    """Print the table of a folder."""
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/latency_tables.py FOLDER")
    print(table(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
