# SPDX-License-Identifier: Apache-2.0
"""The model card says what the study's files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_sparse.research import card

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"


@pytest.fixture(scope="module")
def results() -> card.Results:
    return card.Results(MODEL / "study")


def test_tables_in_the_card_are_those_of_the_study(results: card.Results) -> None:
    text = (MODEL / "README.md").read_text()
    assert card.fill(text, card.tables(results)) == text


def test_every_cell_has_its_interval_and_enough_samples(results: card.Results) -> None:
    for cell in results.cells.values():
        assert cell["count"] >= 200
        assert cell["low"] <= cell["exact"] <= cell["high"] + 1e-9


def test_targets_at_4k_are_met(results: card.Results) -> None:
    for task in card.RETRIEVAL:
        dense = results.cells[(("dense", 0, 0, "max"), task, 4096)]["exact"]
        sparse = results.cells[(("sparcas", 256, 0, "max"), task, 4096)]["exact"]
        window = results.cells[(("window", 0, 0, "max"), task, 4096)]["exact"]
        assert dense >= (0.80 if task == "variable_tracking" else 0.95)
        assert dense - sparse <= 0.02
        assert window < 0.30


def test_long_range_reading_is_spread(results: card.Results) -> None:
    by_layer, by_head = card.drops(results)
    assert sum(drop >= 5 for drop in by_layer) >= 3
    assert sum(drop >= 5 for row in by_head for drop in row) >= 6


def test_plots_are_there_and_small() -> None:
    text = (MODEL / "README.md").read_text()
    plots = re.findall(r"\]\((study/\w+\.png)\)", text)
    assert len(plots) == 2
    assert all(0 < (MODEL / plot).stat().st_size < 80_000 for plot in plots)


def test_a_card_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="no '<!-- dense -->'"):
        card.fill("# A card", {"dense": "| a |"})
