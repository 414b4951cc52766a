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

import pytest
from scripts import LOADTEST

import arrivals  # isort: skip
import capacity  # isort: skip
import client  # isort: skip
import crossover  # isort: skip
import decode_latency  # isort: skip
import local  # isort: skip
import profile_decode  # isort: skip
import report  # isort: skip
import scenarios  # isort: skip
import short  # isort: skip
import soak  # isort: skip

NAMES = sorted(path.stem for path in (LOADTEST / "scenarios").glob("*.json"))
LIMITS = {"strict": 0.05, "relaxed": 0.25}


def settings(**changes: Any) -> capacity.Settings:
    base = {
        "seconds": 1, "drain": 1, "first_rate": 1.0, "most_rate": 256.0,
        "bisections": 4, "limit": 60, "seed": 1,
    }  # fmt: skip
    return capacity.Settings(**(base | changes))


def queueing_server(capacity_a_second: float) -> Any:
    """A server whose tokens slow down as its load nears what it can do."""

    def run(rate: float) -> dict[str, Any]:
        load = rate / capacity_a_second
        gap = 0.01 / (1 - load) if load < 1 else 10.0
        return {
            "rate": rate, "sent": 100, "done": 100, "unfinished": 0, "failed": 0,
            "gap_p50_s": gap / 2, "gap_p99_s": gap, "first_token_p50_s": gap,
            "queued_p50_s": 0.1 if load < 1 else 5.0, "tokens_per_second": 16 * rate,
        }  # fmt: skip

    return run


def test_the_search_brackets_the_rate_at_which_an_objective_fails() -> None:
    trials = capacity.search(queueing_server(20.0), LIMITS, settings(bisections=6))
    # 0.01 / (1 - load) reaches 0.05 at load 0.8 and 0.25 at 0.96.
    assert 15.0 < capacity.best_rate(trials, "strict") <= 16.0
    assert 18.7 < capacity.best_rate(trials, "relaxed") <= 19.2
    assert len({trial["rate"] for trial in trials}) == len(trials)


def test_a_server_that_fails_the_first_rate_is_searched_below_it() -> None:
    trials = capacity.search(queueing_server(0.5), LIMITS, settings())
    assert 0.2 < capacity.best_rate(trials, "strict") <= 0.4
    assert (
        capacity.best_rate(capacity.search(queueing_server(1e-9), LIMITS, settings()), "strict")
        == 0
    )


def test_the_search_ends_at_the_highest_rate_it_may_ask_for() -> None:
    trials = capacity.search(queueing_server(1e9), LIMITS, settings(most_rate=6.0))
    assert [trial["rate"] for trial in trials] == [1, 2, 4, 6]
    assert capacity.best_rate(trials, "relaxed") == 6


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"gap_p99_s": 0.051}, False),
        ({"queued_p50_s": 2.01}, False),
        ({"failed": 1}, False),
        ({"unfinished": 1}, True),
        ({"unfinished": 2}, False),
        ({"gap_p99_s": None}, False),
    ],
)
def test_an_objective_asks_for_gaps_queue_and_every_answer(change: dict, met: bool) -> None:
    good = {
        "failed": 0, "unfinished": 0, "sent": 100, "gap_p99_s": 0.05, "queued_p50_s": 2.0
    }  # fmt: skip
    assert capacity.within(good | change, 0.05) is met


def test_percentiles_are_ranks() -> None:
    values = [float(v) for v in random.Random(3).sample(range(1, 101), 100)]
    assert capacity.percentile(values, 0.99) == 99
    assert capacity.percentile(values, 0.5) == 50
    assert capacity.percentile([7.0], 0.99) == 7


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
        (report, "/nowhere", ["/nowhere holds no report"]),
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


def test_the_page_holds_a_table_plots_and_every_trial(tmp_path: Path) -> None:
    for label, speed in (("dense", 10.0), ("sparcas", 20.0)):
        trials = capacity.search(queueing_server(speed), LIMITS, settings())
        content = {
            "label": label, "scenario": "s", "about": "<what>", "sglang": "0", "trials": trials,
            "unloaded": {"step_s": 0.01, "first_token_s": 0.1}, "limits_s": LIMITS,
            "capacity": {name: capacity.best_rate(trials, name) for name in LIMITS},
        }  # fmt: skip
        (tmp_path / f"{label}.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text("{}")
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 2
    assert page.index("<h2>dense") < page.index("<h2>sparcas")
    assert "2.00 x" in page
    assert "&lt;what&gt;" in page
    with pytest.raises(ValueError, match="no report"):
        report.write_report(tmp_path / "nothing")


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
