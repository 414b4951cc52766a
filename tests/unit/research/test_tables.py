# SPDX-License-Identifier: Apache-2.0
"""Tables by columns have the cells that they were made from."""

from __future__ import annotations

import pytest

from sglang_sparse.research.tables import cells_of, pack

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
