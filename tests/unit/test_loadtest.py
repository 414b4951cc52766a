# SPDX-License-Identifier: Apache-2.0
"""Parts of the load tests that need no server."""

from __future__ import annotations

import http.server
import itertools
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import quantile_test
from scripts import LOADTEST

import arrivals  # isort: skip
import capacity  # isort: skip
import capacity_gpus  # isort: skip
import client  # isort: skip
import crossover  # isort: skip
import decode_latency  # isort: skip
import local  # isort: skip
import objectives  # isort: skip
import profile_decode  # isort: skip
import rates  # isort: skip
import report  # isort: skip
import scenarios  # isort: skip
import short  # isort: skip
import soak  # isort: skip

NAMES = sorted(path.stem for path in (LOADTEST / "scenarios").glob("*.json"))
LIMITS = {"strict": 0.05, "relaxed": 0.25}
RATES = rates.grid(0.25, 256)


def outcome(rate: float, gap: float, **changes: Any) -> dict[str, Any]:
    """Of a trial of a minute, with an interval of a hundredth on both sides."""
    return {
        "rate": rate, "arrival_seconds": 60, "sent": 100, "done": 100, "unfinished": 0,
        "failed": 0, "gaps": 9000, "gap_p50_s": gap / 2, "gap_p99_s": gap,
        "gap_p99_interval_s": [0.99 * gap, 1.01 * gap], "first_token_p50_s": gap,
        "queued_p50_s": 0.1, "tokens_per_second": 16 * rate,
    } | changes  # fmt: skip


def queueing_server(capacity_a_second: float) -> Any:
    """A server whose tokens slow down as its load nears what it can do."""

    def run(rate: float) -> dict[str, Any]:
        load = rate / capacity_a_second
        if load >= 1:
            return outcome(rate, 10.0, queued_p50_s=5.0)
        return outcome(rate, 0.01 / (1 - load))

    return run


def searched(speed: float, **changes: Any) -> list[dict[str, Any]]:
    options = {"seconds": 1000, "longest": 0} | changes
    trials = rates.search(queueing_server(speed), LIMITS, RATES, **options)
    for trial in trials:
        trial["verdicts"] = {n: objectives.verdict(trial, limit) for n, limit in LIMITS.items()}
    return trials


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


def test_statistics_are_counted_from_locusts_final_report(tmp_path: Path) -> None:
    times = {"E2E": {"120": 98, "15000": 2}, "TTFT": {"7": 1}}
    entries = [
        {"method": kind, "name": "n", "num_requests": sum(counts.values()), "num_failures": 1,
         "response_times": counts}
        for kind, counts in times.items()
    ]  # fmt: skip
    (tmp_path / "stats.json").write_text(json.dumps(entries))
    assert short.summary(tmp_path / "stats.json") == {
        "E2E": {"count": 100, "failed": 1, "p50": 120, "p99": 15000},
        "TTFT": {"count": 1, "failed": 1, "p50": 7, "p99": 7},
    }


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


class Script(http.server.BaseHTTPRequestHandler):
    """Streams what the test wrote, with a pause before each event."""

    lines: tuple[tuple[float, str], ...] = ()
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        for pause, line in self.lines:
            time.sleep(pause)
            self.wfile.write(f"data: {line}\n\n".encode())
            self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def streamed(lines: list[tuple[float, str]], api: str, status: int = 200) -> client.Record:
    handler = type("Handler", (Script,), {"lines": tuple(lines), "status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        record = client.stream(url, api, {"model": "m"}, name="n", timeout=5)
        server.shutdown()
    return record


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}], "usage": None})


def test_a_stream_is_timed_by_its_chunks_and_counted_by_its_usage() -> None:
    usage = {
        "prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}
    }  # fmt: skip
    role = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    lines = [(0, role), (0.2, delta("a")), (0.1, delta("b")), (0.1, delta("c"))]
    lines += [(0, json.dumps({"choices": [], "usage": usage})), (0, "[DONE]")]
    record = streamed(lines, "chat")
    assert record.error is None
    assert record.text == "abc"
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 4, 3)
    assert record.first_token == pytest.approx(0.2, abs=0.09)
    assert record.gaps == pytest.approx([0.1, 0.1], abs=0.09)
    assert record.time_per_token == pytest.approx((record.total - record.first_token) / 2)
    assert record.to_json()["tokens_per_second"] == pytest.approx(3 / record.total)


def test_generate_streams_are_read_off_their_last_event() -> None:
    def event(count: int, kind: str | None) -> str:
        meta = {
            "prompt_tokens": 5, "completion_tokens": count, "cached_tokens": 1, "queue_time": 0.25,
            "finish_reason": kind and {"type": kind},
        }  # fmt: skip
        return json.dumps({"text": "x" * count, "meta_info": meta})

    lines = [(0.0, event(1, None)), (0.0, event(2, None)), (0.0, event(2, "length")), (0, "[DONE]")]
    record = streamed(lines, "generate")
    assert (record.error, record.output_tokens, record.queued) == (None, 2, 0.25)
    assert streamed([(0.0, event(1, "abort"))], "generate").error == "aborted"
    waiting = json.dumps({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
    assert streamed([(0.0, waiting)], "generate").error == "aborted"


def test_failures_are_recorded_and_not_raised() -> None:
    refused = streamed([(0, "no")], "chat", status=400)
    assert str(refused.error).startswith("status 400")
    assert streamed([(0, json.dumps({"error": "broken"}))], "chat").error == "broken"
    assert "Refused" in str(client.stream("http://127.0.0.1:9", "chat", {}, name="n").error)


@pytest.mark.parametrize(
    ("script", "line", "words"),
    [
        (capacity, "--out x --label x --base-url http://127.0.0.1:9", ["--base-url", "no SGLang"]),
        (capacity, "--out x --start nonsense", ["--start", "'nonsense'", "sparcas"]),
        (capacity, "--out x --start dense --scenario nothing", ["--scenario", "shared_documents"]),
        (soak, "--out x --method nonsense", ["--method", "'nonsense'", "kascade_sketch"]),
        (soak, "--out x --base-url http://127.0.0.1:9", ["--base-url", "no SGLang server answers"]),
        (decode_latency, "--label x --out x --base-url http://127.0.0.1:9", ["no SGLang server"]),
        (capacity, "--out x --start sparcas dense", ["dense first", "--limit-from"]),
        (
            capacity_gpus,
            "--out x 0=sparcas",
            ["--limit-from is missing", "no server here is dense"],
        ),
        (capacity_gpus, "--out x 0=nothing", ["'0=nothing' is not GPU=LABEL", "kascade_sketch"]),
        (report, "/nowhere", ["/nowhere", "no report"]),
    ],
)
def test_wrong_arguments_end_with_one_line(
    script: Any, line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *line.split()])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in told for word in words), told


def test_locust_refuses_an_unknown_scenario_before_it_starts() -> None:
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST / "locustfile.py"), "--headless"]
    command += ["--scenario", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no scenario 'nothing'; there are bursts, long_decode" in done.stderr


def test_what_a_soak_asks_for_is_in_the_servers_unit() -> None:
    def asked(least: float, most: float) -> list[Any]:
        state = {"request_budget": {"unit": "u", "least": least, "most": most}}
        return [options and options.get("budget") for options in soak.options_of(state)]

    assert asked(49, 256) == [None, None, None, 49, 152]
    assert asked(1e-6, 0.5) == [None, None, None, 1e-6, pytest.approx(0.25, abs=1e-5)]


def test_growth_is_told_from_warming_up_and_wobble() -> None:
    warming = [100.0 * min(i, 5) for i in range(40)]
    assert soak.growth_mib(warming) == 0
    wobble = [500 + 10 * (i % 3) for i in range(40)]
    assert abs(soak.growth_mib(wobble)) <= 10
    assert soak.growth_mib([500 + 5.0 * i for i in range(40)]) == pytest.approx(100)


def capacity_report(label: str, speed: float, **changes: Any) -> dict[str, Any]:
    trials = searched(speed)
    return {
        "label": label, "scenario": "s", "about": "<what>", "sglang": "0", "trials": trials,
        "unloaded": {"step_s": 0.01, "first_token_s": 0.1}, "limits_s": LIMITS,
        "limits_from": "dense.json", "settings": {"seconds": 60},
        "capacity": {
            name: {"met": objectives.highest_met(trials, name),
                   "missed": objectives.lowest_missed(trials, name)}
            for name in LIMITS
        },
    } | changes  # fmt: skip


def test_the_page_holds_a_table_plots_and_every_trial(tmp_path: Path) -> None:
    speeds = {"dense": 10.0, "sparcas": 20.0}
    for label, speed in speeds.items():
        (tmp_path / f"{label}.json").write_text(json.dumps(capacity_report(label, speed)))
    (tmp_path / "other.json").write_text("{}")
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 1
    assert page.index("<h2>dense") < page.index("<h2>sparcas")
    assert "&lt;what&gt;" in page
    # In words, in cells of their own.
    for word in ("met", "missed", "undecided"):
        assert f"<td class='name {word}'>{word}</td>" in page
    assert "strict 50.0 ms and relaxed 250.0 ms" in page
    table = (tmp_path / "capacity.md").read_text()
    assert table.splitlines()[0].count("|") == table.splitlines()[2].count("|")
    dense, sparcas = table.splitlines()[2:]
    assert "| 7 met, 10 missed, 8 undecided | 33.3 ms [33.0, 33.7], 9,000 gaps |" in dense
    assert "| 14 met, 20 missed, 16 undecided | 33.3 ms [33.0, 33.7], 9,000 gaps |" in sparcas
    # 14 of at most 10, 20 of at least 7.
    assert "| 1.40 to 2.86 x |" in sparcas
    with pytest.raises(ValueError, match="no report"):
        report.write_report(tmp_path / "nothing")


def test_reports_of_several_folders_make_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    paths = []
    for label, speed in {"page_minmax": 20.0, "dense": 10.0}.items():
        (tmp_path / label).mkdir()
        paths.append(tmp_path / label / f"{label}.json")
        paths[-1].write_text(json.dumps(capacity_report(label, speed)))
    line = ["capacity", "--out", str(tmp_path / "page"), "--combine", *map(str, paths)]
    monkeypatch.setattr(sys, "argv", line)
    capacity.main()
    table = (tmp_path / "page" / "capacity.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == ["dense", "page_minmax"]
    assert (tmp_path / "page" / "capacity.html").exists()
    other = capacity_report("page_minmax", 20.0, limits_s={"strict": 0.04, "relaxed": 0.2})
    paths[0].write_text(json.dumps(other))
    with pytest.raises(SystemExit) as ended:
        capacity.main()
    assert ended.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "page_minmax and dense cannot be compared: limits_s" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"met": 14.0, "missed": None}, "above 1.40 x"),
        ({"met": None, "missed": 20.0}, "below 2.86 x"),
        ({"met": None, "missed": None}, "-"),
    ],
)
def test_a_ratio_says_no_more_than_is_known(change: dict[str, Any], words: str) -> None:
    base = capacity_report("dense", 10.0)
    one = capacity_report("sparcas", 20.0, capacity={"strict": change})
    assert report.ratio(one, base, "strict") == words


def test_the_crossover_lies_where_the_last_loss_ends() -> None:
    dense = {(1000, 1): 5.0, (8000, 1): 5.0, (16000, 1): 6.0, (32000, 1): 7.0}
    late = {(1000, 1): 4.0, (8000, 1): 7.0, (16000, 1): 7.0, (32000, 1): 6.0}
    assert crossover.crossover(dense, late, 1) == 24000
    assert crossover.rounded_up(24000) == 24576
    assert crossover.crossover(dense, dict.fromkeys(dense, 4.0), 1) == 1000
    assert crossover.crossover(dense, dict.fromkeys(dense, 8.0), 1) is None
    assert crossover.crossover(dense, late, 2) is None


def test_a_profile_counts_time_that_launches_share_once() -> None:
    times = ((100.0, 40.0), (130.0, 30.0), (135.0, 5.0), (200.0, 20.0))
    events = [{"cat": "kernel", "name": "k", "ts": ts, "dur": dur} for ts, dur in times]
    found = profile_decode.summary([{"cat": "cpu_op", "name": "o", "ts": 0, "dur": 9}, *events])
    assert found["span_us"] * profile_decode.STEPS == 120
    assert found["busy_us"] * profile_decode.STEPS == 60 + 20
    assert found["gap_us"] * profile_decode.STEPS == 40
    assert found["launches"] * profile_decode.STEPS == len(times)
    assert found["kernels"][0]["us"] * profile_decode.STEPS == 95


def test_a_server_gets_a_port_that_no_client_gets_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert local.PORTS.stop <= 32_768  # where Linux' clients begin
    with socket.socket() as taken:
        port = local.free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(local, "PORTS", range(port, port + 1))
        with pytest.raises(RuntimeError, match=f"no free port from {port} to {port}"):
            local.free_port()
