# SPDX-License-Identifier: Apache-2.0
"""What ranks counted, added up, with the exchange between them faked."""

from typing import Any

import pytest

from sglang_sparse import ranks, server_info


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch):
    """Give the values of the ranks behind the first one."""

    def behind(*values: Any) -> None:
        monkeypatch.setattr(ranks, "gather", lambda mine: [mine, *values])

    return behind


def test_sums_are_those_of_all_lists(others) -> None:
    first, second = {0: {"steps": 2, "blocks": 7}}, {0: {"steps": 2, "blocks": 4}}
    others(second)
    assert ranks.reached(first) == {0: {"steps": 4, "blocks": 11}}
    others(None)
    assert ranks.reached(first) is None
    assert first == {0: {"steps": 2, "blocks": 7}}


def test_a_wrong_page_of_any_rank_shows(others) -> None:
    block = {"fidelity": None, "plane_check": {"pages": 9, "wrong": 0}, "method": "psa"}
    others(*({"plane_check": {"pages": 9, "wrong": wrong}} for wrong in (2, 1)))
    whole = server_info._over_ranks(block, reached={3: {"blocks": 5}})
    assert whole["plane_check"] == {"pages": 9, "wrong": 3}
    assert whole["progress"] == {"3": {"blocks": 5}}
    assert [part["plane_check"]["wrong"] for part in whole["ranks"]] == [0, 2, 1]
    assert whole["method"] == "psa"


def test_errors_of_kernels_are_the_worst_and_means_are_over_all_pairs(others) -> None:
    one, other = (
        {"0": {"pairs": pairs, "mass": mass, "kernel_error": error}}
        for pairs, mass, error in ((1.0, 0.9, 0.125), (3.0, 0.5, 0.25))
    )
    others({"fidelity": other})
    whole = server_info._over_ranks({"fidelity": one}, reached=None)
    assert whole["fidelity"] == {"0": {"pairs": 4.0, "mass": 0.6, "kernel_error": 0.25}}
