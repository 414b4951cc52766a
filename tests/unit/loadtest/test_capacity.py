# SPDX-License-Identifier: Apache-2.0
"""The search for the highest rate that a server meets an objective at."""

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_trials import LIMITS, RATES, outcome, queueing_server, searched
from scipy.stats import quantile_test

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
import capacity  # isort: skip
import capacity_gpus  # isort: skip
import client  # isort: skip
import objectives  # isort: skip
import rates  # isort: skip


def test_every_server_is_tried_at_rates_of_one_grid() -> None:
    assert rates.grid(1, 4) == [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]
    assert set(rates.grid(3, 20)) < set(RATES)
    for speed in (0.7, 7.3, 20.0, 111.0):
        trials = searched(speed)
        tried = [trial["rate"] for trial in trials]
        assert set(tried) <= set(RATES)
        assert len(set(tried)) == len(tried)
        # Two searches of 41 rates, which share trials.
        assert len(tried) <= 10


def test_the_search_brackets_the_rate_at_which_an_objective_fails() -> None:
    trials = searched(20.0)
    # 0.01 / (1 - load) reaches 0.05 at load 0.8 and 0.25 at 0.96: at 16 and 19.2 requests.
    assert objectives.highest_met(trials, "strict") == 14
    assert objectives.lowest_missed(trials, "strict") == 20
    assert [t["rate"] for t in trials if t["verdicts"]["strict"] == "undecided"] == [16]
    assert objectives.highest_met(trials, "relaxed") == 16
    assert objectives.lowest_missed(trials, "relaxed") == 20


def test_a_server_below_and_above_the_grid_has_no_end_there() -> None:
    slow, fast = searched(0.1), searched(1e9)
    assert objectives.highest_met(slow, "strict") is None
    assert objectives.lowest_missed(slow, "strict") == RATES[0]
    assert objectives.highest_met(fast, "strict") == RATES[-1]
    assert objectives.lowest_missed(fast, "strict") is None


def test_no_trial_begins_that_might_not_fit_in_the_time() -> None:
    assert searched(20.0, seconds=10, longest=11) == []
    some = searched(20.0)[:3]
    went_on = rates.search(
        queueing_server(20.0), LIMITS, RATES, seconds=1000, longest=0, trials=some
    )
    assert [t["rate"] for t in went_on] == [t["rate"] for t in searched(20.0)]


@pytest.mark.parametrize(("seconds", "tried"), [(1000, [24.0, 6.0]), (0, [])])
def test_named_rates_are_tried_once_in_their_order(seconds: float, tried: list[float]) -> None:
    found: list[float] = []

    def run(rate: float) -> dict[str, float]:
        found.append(rate)
        return {"rate": rate}

    known = [{"rate": 12.0}]
    rates.try_rates(run, (24.0, 12.0, 6.0), seconds=seconds, longest=1, trials=known)
    assert found == tried


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "met"),
        ({"gap_p99_interval_s": [0.04, 0.051]}, "undecided"),
        ({"gap_p99_interval_s": [0.0501, 0.06]}, "missed"),
        ({"gap_p99_interval_s": None}, "undecided"),
        ({"queued_p50_s": 2.01}, "missed"),
        ({"failed": 1}, "missed"),
        ({"unfinished": 1}, "met"),
        ({"unfinished": 2}, "missed"),
        ({"gap_p99_s": None, "gap_p99_interval_s": None}, "missed"),
        ({"arrival_seconds": 3}, "undecided"),
        ({"arrival_seconds": 3, "failed": 1}, "undecided"),
        ({"sent": 0, "gap_p99_s": None, "gap_p99_interval_s": None}, "undecided"),
    ],
)
def test_an_objective_asks_for_gaps_queue_answers_and_enough_samples(
    change: dict[str, Any], word: str
) -> None:
    assert objectives.verdict(outcome(1.0, 0.049) | change, 0.05) == word


def test_percentiles_are_ranks() -> None:
    values = [float(v) for v in random.Random(3).sample(range(1, 101), 100)]
    assert objectives.percentile(values, 0.99) == 99
    assert objectives.percentile(values, 0.5) == 50
    assert objectives.percentile([7.0], 0.99) == 7


def gaps_of_a_minute(source: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Twenty streams whose gaps grow together, whenever the server pauses for all of them."""
    pauses = 1 + source.exponential(1.0, 300) * (source.random(300) < 0.05)
    times = np.repeat(np.arange(300) * 0.2, 20)
    return times, np.repeat(pauses, 20) * source.uniform(0.9, 1.1, 6000)


def test_the_interval_of_a_percentile_holds_it_where_streams_pause_together() -> None:
    many = [gaps_of_a_minute(np.random.default_rng(1000 + n))[1] for n in range(200)]
    truth = np.quantile(np.concatenate(many), 0.99)
    inside = naive = 0
    for seed in range(100):
        times, gaps = gaps_of_a_minute(np.random.default_rng(seed))
        low, high = objectives.percentile_interval(times, gaps) or (0, 0)
        assert low <= objectives.percentile(gaps, 0.99) <= high
        inside += low <= truth <= high
        # Order statistics, as if every gap were drawn by itself.
        ends = quantile_test(gaps, p=0.99).confidence_interval(0.95)
        naive += ends.low <= truth <= ends.high
    # Of a nominal 95: percentile bootstraps of twenty blocks lose some of it.
    assert inside >= 80
    assert inside > naive + 20


def test_too_few_gaps_or_seconds_have_no_interval() -> None:
    times, gaps = gaps_of_a_minute(np.random.default_rng(1))
    assert objectives.percentile_interval(times, gaps) is not None
    assert objectives.percentile_interval(times / 3, gaps) is None
    assert objectives.percentile_interval(times[::7], gaps[::7]) is None


def test_every_server_is_held_to_the_dense_servers_step(tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    path.write_text(json.dumps({"unloaded": {"step_s": 0.006}}))
    dense = objectives.Objective(report=path)
    assert dense.limits(0.002) == {"strict": pytest.approx(0.03), "relaxed": pytest.approx(0.15)}
    assert objectives.OWN.limits(0.002)["strict"] == pytest.approx(0.01)
    absolute = objectives.Objective(milliseconds=(200.0, 50.0))
    assert absolute.limits(0.002) == {"50 ms": 0.05, "200 ms": 0.2}
    assert (dense.source, absolute.source, objectives.OWN.source) == (
        "dense.json", "--limit-ms", None
    )  # fmt: skip
    objectives.OWN.check(sparse=False)
    dense.check(sparse=True)
    with pytest.raises(ValueError, match="--limit-from is missing"):
        objectives.OWN.check(sparse=True)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"--limit-from: .*dense\.json is no report"):
        dense.check(sparse=True)


def test_servers_beside_a_dense_one_wait_for_its_step(tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    objective = objectives.Objective(report=path)
    with pytest.raises(ValueError, match="is no report"):
        objective.wait(0)
    content = json.dumps({"unloaded": {"step_s": 0.006}})
    path.write_text(content[:9])  # half written
    threading.Timer(0.3, path.write_text, (content,)).start()
    objective.wait(30)
    assert objective.limits(1.0)["strict"] == pytest.approx(0.03)
    objectives.OWN.wait(0)


def test_presets_are_measured_as_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert capacity.as_shipped("psa") == ["--attention-backend", "sparse", "--sparse-method", "psa"]
    assert capacity.as_shipped("dense")[:2] == ["--attention-backend", "flashinfer"]
    lines = []

    class Process:
        returncode = 0

        def __init__(self, line: list[str], env: dict[str, str], **options: Any) -> None:
            lines.append((env["CUDA_VISIBLE_DEVICES"], " ".join(line)))

        def poll(self) -> int:
            return 0

        wait = poll

    monkeypatch.setattr(capacity_gpus.subprocess, "Popen", Process)
    line = ["capacity_gpus", "--out", str(tmp_path), "0=dense", "3=psa"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        capacity_gpus.main()
    assert ended.value.code == 0
    (gpu, dense), (other, psa) = lines
    assert (gpu, other) == ("0", "3")
    assert "--start dense" in dense
    assert "--limit-from" not in dense
    assert f"--limit-from {tmp_path / 'dense.json'}" in psa
    assert "--sparse-config" not in psa
    assert (
        psa.replace("31300", "31000").split("--limit-from")[0]
        == dense.replace("--start dense", "--start psa").partition(" --limit-from")[0] + " "
    )


def test_gaps_are_placed_in_the_time_of_their_trial() -> None:
    record = client.Record("n", started=103.0, first_token=0.5, gaps=[0.1, 0.2])
    assert capacity._samples(record, 100.0) == [
        (pytest.approx(3.6), 0.1), (pytest.approx(3.8), 0.2)
    ]  # fmt: skip
    assert capacity._samples(client.Record("n", started=103.0), 100.0) == []
