# SPDX-License-Identifier: Apache-2.0
"""Write a kernel table of docs/results.md from `bench.py`'s JSON, which may be compressed.

``python kernels/bench/render.py kernels/bench/results/h200/bench.json.gz docs/results.md kernels``

The table goes between the markers ``<!-- kernels:begin -->`` and ``<!-- kernels:end -->``.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from sglang_sparse.research.tables import from_columns

SHAPES = ((32_768, 1), (131_072, 1), (32_768, 16), (131_072, 16))


def measured(rows: dict[tuple[str, int, int], Any]) -> list[tuple[int, int]]:
    """The shapes that the run reached."""
    return [shape for shape in SHAPES if any(key[1:] == shape for key in rows)]


def cell(row: dict[str, Any] | None) -> str:
    """Microseconds, then the share of copy bandwidth or the speed over dense."""
    if row is None:
        return "-"
    if "speedup_over_dense" in row:
        return f"{row['us']:.1f} ({row['speedup_over_dense']:.1f} x dense)"
    return f"{row['us']:.1f} ({row['of_copy_bandwidth']:.0%})"


def table(report: dict[str, Any]) -> str:
    """The Markdown table: an operator or step a line, a shape a column."""
    rows = {(r["name"], r["context"], r["batch"]): r for r in report["rows"]}
    names = dict.fromkeys(r["name"] for r in report["rows"] if r["context"] >= SHAPES[0][0])
    shapes = measured(rows)
    lines = ["| µs | " + " | ".join(f"{c // 1024}K x {b}" for c, b in shapes) + " |"]
    lines.append("| --- |" + " ---: |" * len(shapes))
    for name in names:
        if "dense, " not in name and any((name, *shape) in rows for shape in shapes):
            cells = (cell(rows.get((name, *shape))) for shape in shapes)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if any("launches" in row for row in report["rows"]):
        lines += ["", *launch_table(rows)]
    copied = report["copy_bytes_per_second"] / 1e12
    lines += ["", f"{report['device']}, commit {report['commit']}, copy {copied:.2f} TB/s."]
    return "\n".join(lines)


def short(kernel: str) -> str:
    """A kernel's name without its namespace and what all names end with."""
    return kernel.split("::")[-1].removesuffix("Kernel").removesuffix("_kernel")


def launch_table(rows: dict[tuple[str, int, int], dict[str, Any]]) -> list[str]:
    """Kernels of a layer's step, launches and microseconds each, at the first and last shape."""
    shapes = measured(rows)
    first, last = shapes[0], shapes[-1]
    titles = " | ".join(f"µs a launch, {c // 1024}K x {b}" for c, b in (first, last))
    counted = " / ".join(f"{c // 1024}K x {b}" for c, b in (first, last))
    lines = [f"| step | launches a layer, {counted} | {titles} |", "| --- | ---: | --- | --- |"]
    for name in dict.fromkeys(name for name, *_ in rows if name.endswith(": step")):
        cells, counts = [], []
        for shape in (first, last):
            found = rows.get((name, *shape), {}).get("launches", [])
            cells.append(
                ", ".join(f"{short(kernel['name'])} {kernel['us']:.1f}" for kernel in found)
            )
            counts.append(f"{sum(kernel['launches'] for kernel in found):.2g}")
        count = " / ".join(counts)
        lines.append(f"| {name.removesuffix(': step')} | {count} | {cells[0]} | {cells[1]} |")
    return lines


def main() -> None:
    """Replace what stands between the markers of a name."""
    source, page, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    packed = source.read_bytes()
    content = gzip.decompress(packed) if source.suffix == ".gz" else packed
    report = from_columns(json.loads(content))
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{table(report)}\n{end}{after}")


if __name__ == "__main__":
    main()
