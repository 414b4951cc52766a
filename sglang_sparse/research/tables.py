# SPDX-License-Identifier: Apache-2.0
"""Raw tables by columns: a third of their size, with the same content.

``python -m sglang_sparse.research.tables FILE ...`` rewrites a study's JSON files for the
repository: ``columns`` names the entries of each cell, and policies, where cells have them, are
places in ``policies``. Of files without cells, each list of like objects becomes ``columns`` and
``rows``, at any depth.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
Key = tuple[str, int]
_NAMES = {"columns", "rows"}


def pack(table: dict[str, Any]) -> dict[str, Any]:
    """A table whose ``cells`` are objects, by columns; one that is so already, as it is."""
    cells = table["cells"]
    if "columns" in table or not cells:
        return table
    columns, policies = list(cells[0]), []
    rows = []
    for cell in cells:
        if list(cell) != columns:
            raise ValueError(f"cells have {columns}, and one has {list(cell)}")
        if "policy" in cell:
            if cell["policy"] not in policies:
                policies.append(cell["policy"])
            cell = cell | {"policy": policies.index(cell["policy"])}
        rows.append([*cell.values()])
    named = {"policies": policies} if policies else {}
    return table | named | {"columns": columns, "cells": rows}


def cells_of(table: dict[str, Any]) -> list[Cell]:
    """The cells of a table as objects, however it is stored."""
    if "columns" not in table:
        return list(table["cells"])
    cells = [dict(zip(table["columns"], row, strict=True)) for row in table["cells"]]
    if "policies" not in table:
        return cells
    return [cell | {"policy": table["policies"][cell["policy"]]} for cell in cells]


def by_columns(content: Any) -> Any:
    """JSON whose lists of like objects are tables: what keys they have, and the values of each.

    Raises:
        ValueError: an object has the keys of such a table, so it would be taken for one.
    """
    if isinstance(content, dict):
        if content.keys() == _NAMES:
            raise ValueError(f"an object with {sorted(_NAMES)} is a table already")
        return {key: by_columns(value) for key, value in content.items()}
    if not isinstance(content, list):
        return content
    if len(content) > 1 and all(isinstance(one, dict) for one in content):
        columns = list(content[0])
        if columns and all(list(one) == columns for one in content):
            rows = [[by_columns(value) for value in one.values()] for one in content]
            return {"columns": columns, "rows": rows}
    return [by_columns(one) for one in content]


def from_columns(content: Any) -> Any:
    """What :func:`by_columns` was given; other JSON as it is."""
    if isinstance(content, list):
        return [from_columns(one) for one in content]
    if not isinstance(content, dict):
        return content
    if content.keys() != _NAMES:
        return {key: from_columns(value) for key, value in content.items()}
    rows = ([from_columns(value) for value in row] for row in content["rows"])
    return [dict(zip(content["columns"], row, strict=True)) for row in rows]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def policy_key(policy: dict[str, Any]) -> Key:
    """What tells two policies of the tables apart: its kind and its budget."""
    return policy["kind"], 0 if policy["kind"] in ("dense", "window") else policy["budget"]


def main() -> None:
    """Rewrite files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        content = from_columns(json.loads(path.read_text()))
        has_cells = isinstance(content, dict) and "cells" in content
        packed = pack(content) if has_cells else by_columns(content)
        path.write_text(json.dumps(packed, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
