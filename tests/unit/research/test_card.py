# SPDX-License-Identifier: Apache-2.0
"""The model card says what the study's files say."""

import re
from pathlib import Path

import pytest

from sglang_sparse.research import card
from sglang_sparse.tasks import wilson

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"


@pytest.fixture(scope="module")
def results() -> card.Results:
    return card.Results(MODEL / "study")


def test_tables_in_the_card_are_those_of_the_study(results: card.Results) -> None:
    text = (MODEL / "README.md").read_text()
    assert card.fill(text, card.tables(results)) == text


def test_intervals_of_the_study_follow_from_its_counts(results: card.Results) -> None:
    for cell in results.cells.values():
        right = cell["exact"] * cell["count"]
        assert right == pytest.approx(round(right), abs=1e-9), "a share of whole answers"
        low, high = wilson(round(right), cell["count"])
        assert (cell["low"], cell["high"]) == pytest.approx((low, high), abs=1e-9)


def test_what_a_layer_and_a_head_lose_is_the_mean_over_tasks_in_points() -> None:
    results = card.Results.__new__(card.Results)
    one = {"dense": 1.0, "layers": [0.5, 1.0], "heads": [[0.75, 1.0], [1.0, 0.5]]}
    two = {"dense": 0.5, "layers": [0.5, 0.25], "heads": [[0.25, 0.5], [0.0, 0.5]]}
    results.ablation = {"ablation": {"tasks": {"one": one, "two": two}}}
    assert card.drops(results) == ([25.0, 12.5], [[25.0, 0.0], [25.0, 25.0]])


def test_plots_are_there_and_small() -> None:
    text = (MODEL / "README.md").read_text()
    plots = re.findall(r"\]\((study/\w+\.png)\)", text)
    assert len(plots) == 1
    assert all(0 < (MODEL / plot).stat().st_size < 80_000 for plot in plots)


def test_a_card_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="no '<!-- dense -->'"):
        card.fill("# A card", {"dense": "| a |"})
