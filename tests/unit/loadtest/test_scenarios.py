# SPDX-License-Identifier: Apache-2.0
"""What users of a load test send, and when."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from scripts import LOADTEST

import arrivals  # isort: skip
import scenarios  # isort: skip


NAMES = sorted(path.stem for path in (LOADTEST / "scenarios").glob("*.json"))


def test_poisson_arrivals_have_the_rate_and_spread_of_their_process() -> None:
    times = list(arrivals.poisson(5.0, 2000, seed=1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == pytest.approx(10000, abs=4 * math.sqrt(10000))
    # Exponential gaps: mean and deviation are equal.
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05)
    assert times == list(arrivals.poisson(5.0, 2000, seed=1))
    assert max(times) < 2000


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_gives_conversations_that_share_what_it_says(name: str) -> None:
    scenario = scenarios.Scenario.load(name)
    users = [scenarios.Conversations(scenario, "m", seed) for seed in (1, 2)]
    for user in users:
        answers: list[str] = []
        bodies = []
        for body in user.requests(answers):
            bodies.append(body)
            answers.append("an answer")
        assert len(bodies) == scenario.turns
        low, high = scenario.output
        if scenario.api == "generate":
            [body] = bodies
            assert low <= body["sampling_params"]["max_new_tokens"] <= high
            ids, least, most = body["input_ids"], *scenario.document
            assert least <= len(ids) - len(ids[most:]) <= most
            assert scenario.vocab[0] <= min(ids) <= max(ids) <= scenario.vocab[1]
            assert any(ids[: len(d)] == d for d in user.documents)
            continue
        assert all(low <= body["max_tokens"] <= high for body in bodies)
        assert [len(body["messages"]) for body in bodies] == [2 * t + 1 for t in range(len(bodies))]
    if scenario.documents:
        assert users[0].documents == users[1].documents
        assert len({str(d) for d in users[0].documents}) == scenario.documents
    assert 0 <= users[0].think_seconds() <= scenario.think[1] / 10


def test_the_five_kinds_of_use_are_there() -> None:
    assert set(NAMES) >= {
        "shared_documents", "multi_turn_chat", "long_decode", "mixed_lengths", "bursts"
    }  # fmt: skip


def test_a_scenario_that_is_not_there_or_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shared_documents"):
        scenarios.Scenario.load("nothing")
    (tmp_path / "x.json").write_text(json.dumps({"name": "x", "about": "", "tokens": 1}))
    with pytest.raises(ValueError, match=r"\['tokens'\]"):
        scenarios.Scenario.load(str(tmp_path / "x.json"))
