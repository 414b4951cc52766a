# SPDX-License-Identifier: Apache-2.0
"""Tables by columns have the cells that they were made from."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse.research import tables
from sglang_sparse.research.tables import by_columns, cells_of, from_columns, pack

ONE, OTHER = {"kind": "dense"}, {"kind": "window", "budget": 3}
CELLS = [
    {"task": task, "policy": policy, "exact": exact}
    for task, policy, exact in (("a", ONE, 1.0), ("b", OTHER, 0.5), ("a", OTHER, 0.0))
]


def test_a_packed_table_has_the_same_cells() -> None:
    table = {"count": 2, "cells": CELLS}
    packed = pack(table)
    assert cells_of(packed) == cells_of(table) == CELLS
    assert packed["policies"] == [ONE, OTHER]
    assert packed["count"] == 2
    assert pack(packed) == packed


def test_cells_without_policies_are_packed_too() -> None:
    cells = [{"arm": arm, "exact": 0.25} for arm in ("dense", "found")]
    packed = pack({"cells": cells})
    assert packed == {"columns": ["arm", "exact"], "cells": [["dense", 0.25], ["found", 0.25]]}
    assert cells_of(packed) == cells
    assert pack(packed) == packed


def test_cells_with_other_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="and one has"):
        pack({"cells": [*CELLS, {"task": "c"}]})


KEYS = st.sampled_from(["a", "b", "rows"])
CONTENT = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=20,
)


@given(content=CONTENT)
def test_lists_of_like_objects_come_back_from_columns(content: Any) -> None:
    assert from_columns(json.loads(json.dumps(by_columns(content)))) == content


def test_lists_of_like_objects_are_columns_at_any_depth() -> None:
    inner = [{"us": 1.0, "of": 2}, {"us": 3.0, "of": 4}]
    found = by_columns({"rows": [{"turns": inner}, {"turns": []}], "one": [{"us": 1}], "two": 5})
    table = {"columns": ["us", "of"], "rows": [[1.0, 2], [3.0, 4]]}
    assert found["rows"] == {"columns": ["turns"], "rows": [[table], [[]]]}
    assert (found["one"], found["two"]) == ([{"us": 1}], 5)
    with pytest.raises(ValueError, match="a table already"):
        by_columns(table)


def test_the_command_rewrites_files_and_may_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"cells.json": {"cells": CELLS}, "rows.json": {"rows": CELLS}}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    paths = [str(tmp_path / name) for name in contents]
    monkeypatch.setattr("sys.argv", ["tables", *paths])
    for _ in range(2):
        tables.main()
    cells, rows = (json.loads(Path(path).read_text()) for path in paths)
    assert cells_of(cells) == CELLS
    assert rows != contents["rows.json"]
    assert from_columns(rows) == contents["rows.json"]
