# SPDX-License-Identifier: Apache-2.0
"""What ranks counted, added up, with the exchange between them faked."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sparse import ranks, server_info


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch):
    """Give the values of the ranks behind the first one."""

    def behind(*values: Any) -> None:
        monkeypatch.setattr(ranks, "gather", lambda mine: [mine, *values])

    return behind


def test_sums_are_those_of_all_heads_each_counted_once(others) -> None:
    first, second = {0: {"steps": 2, "blocks": 7}}, {0: {"steps": 2, "blocks": 4}}
    backend = SimpleNamespace(holds_replicas=False)
    others((True, first), (False, second), (True, second))
    assert ranks.reached(backend, first) == {0: {"steps": 4, "blocks": 11}}
    others((False, None))
    assert ranks.reached(backend, first) is None
    assert first == {0: {"steps": 2, "blocks": 7}}


def test_a_wrong_page_of_any_rank_shows(others) -> None:
    """Also of one whose heads a lower rank has, since its planes are its own."""
    check = {"pages": 9, "wrong": 0}
    block = {"fidelity": None, "plane_check": check, "method": "psa"}
    others(
        (False, {"plane_check": {"pages": 9, "wrong": 2}}), (True, {"plane_check": {"wrong": 1}})
    )
    whole = server_info._over_ranks(block, replica=False, reached={3: {"blocks": 5}})
    assert whole["plane_check"] == {"pages": 9, "wrong": 3}
    assert whole["progress"] == {"3": {"blocks": 5}}
    assert [part["plane_check"]["wrong"] for part in whole["ranks"]] == [0, 2, 1]
    assert whole["method"] == "psa"


def test_errors_of_kernels_are_the_worst_and_means_are_over_all_pairs(others) -> None:
    one, other = (
        {"0": {"pairs": pairs, "mass": mass, "kernel_error": error}}
        for pairs, mass, error in ((1.0, 0.9, 0.25), (3.0, 0.5, 0.125))
    )
    others((False, {"fidelity": other}), (True, {"fidelity": other}))
    whole = server_info._over_ranks({"fidelity": one}, replica=False, reached=None)
    assert whole["fidelity"] == {"0": {"pairs": 4.0, "mass": 0.6, "kernel_error": 0.25}}
