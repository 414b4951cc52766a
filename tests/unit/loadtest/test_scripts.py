# SPDX-License-Identifier: Apache-2.0
"""Arguments, statistics and ports of the load-test scripts."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import LOADTEST

from sglang_sparse.research import rounding_study

import capacity  # isort: skip
import capacity_gpus  # isort: skip
import crossover  # isort: skip
import decode_latency  # isort: skip
import local  # isort: skip
import profile_decode  # isort: skip
import report  # isort: skip
import short  # isort: skip
import soak  # isort: skip
import tensor_parallel  # isort: skip


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


@pytest.mark.parametrize(
    ("script", "line", "words"),
    [
        (capacity, "--out x --label x --base-url http://127.0.0.1:9", ["--base-url", "no SGLang"]),
        (capacity, "--out x --start nonsense", ["--start", "'nonsense'", "sparcas"]),
        (capacity, "--out x --start dense --scenario nothing", ["--scenario", "shared_documents"]),
        (soak, "--out x --method nonsense", ["--method", "'nonsense'", "kascade_sketch"]),
        (soak, "--out x --base-url http://127.0.0.1:9", ["--base-url", "no SGLang server answers"]),
        (decode_latency, "--label x --out x --base-url http://127.0.0.1:9", ["no SGLang server"]),
        (decode_latency, "--label x --out x --separate 10x2/3", ["'10x2/3' is not CONTEXTxBATCH"]),
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


def test_requests_of_a_batch_take_a_cells_prompts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[list[list[int]], int]] = []

    def generate(url: str, prompts: list[list[int]], tokens: int) -> tuple[float, list[int]]:
        sent.append((prompts, tokens))
        return tokens / 1000, [7] * len(prompts)

    monkeypatch.setattr(decode_latency, "generate", generate)
    cell = decode_latency.Cell.separate("50x5/2")
    found = decode_latency.measure("", cell, vocab=1000, repeats=2)
    first, second = sent[0][0][0], sent[1][0][0]
    assert (len(first), len(second)) == (50, 50)
    assert first != second
    assert [tokens for _, tokens in sent[:2]] == [1, 1]
    assert all(prompts == [first, second, first, second, first] for prompts, _ in sent[2:])
    assert found["ms_per_token"] == pytest.approx(1)
    assert (found["prompts"], found["shared_prompt"]) == (2, False)
    # A larger batch with as many prompts finds them in the cache.
    assert decode_latency.Cell.separate("50x2").documents(1000) == [first, second]
    assert decode_latency.Cell.separate("50x9").prompts == 9


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


BOUNDED: dict[str, Any] = {
    "slots": 8, "free_slots": 8,
    "snapshots": {"slots": 4, "kept": 4, "taken": 9, "restored": 3},
}  # fmt: skip


def test_a_server_of_bounded_states_is_asked_for_nothing_that_it_refuses() -> None:
    assert soak.options_of(BOUNDED) == (None,)
    assert {"mode": "dense"} in soak.refused_of(BOUNDED)
    sparse = {"request_budget": {"unit": "u", "least": 49, "most": 256}}
    assert soak.refused_of(sparse) == ({"budget": -1},)


@pytest.mark.parametrize(
    ("changes", "left", "kept"),
    [
        ({}, 0, True),
        ({"free_slots": 7}, 0, False),
        ({"snapshots": {"slots": 4, "kept": 4, "taken": 3, "restored": 3}}, 0, False),
        ({"snapshots": {"slots": 4, "kept": 4, "taken": 9, "restored": 0}}, 0, False),
        ({}, 1, False),
    ],
)
def test_slots_that_do_not_return_after_a_soak_are_told(
    changes: dict[str, Any], left: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr(soak, "call", lambda url, path, body: flushed.append(path))
    monkeypatch.setattr(soak, "sparse_state", lambda url: {"snapshots": {"kept": left}})
    found, facts = soak.slots_kept("url", BOUNDED | changes)
    assert found is kept
    assert flushed == ["/flush_cache"]
    assert facts["snapshots"]["kept_by_a_flush"] == left


def test_growth_is_told_from_warming_up_and_wobble() -> None:
    warming = [100.0 * min(i, 5) for i in range(40)]
    assert soak.growth_mib(warming) == 0
    wobble = [500 + 10 * (i % 3) for i in range(40)]
    assert abs(soak.growth_mib(wobble)) <= 10
    assert soak.growth_mib([500 + 5.0 * i for i in range(40)]) == pytest.approx(100)


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


@pytest.mark.parametrize(
    ("one", "two", "first"),
    [([1, 2], [1, 2], None), ([1, 2], [3, 2], 0), ([1, 2], [1], 1), ([1], [1, 2], 1)],
)
def test_an_answer_that_ends_early_differs_where_it_ends(
    one: list[int], two: list[int], first: int | None
) -> None:
    assert tensor_parallel.first_difference(one, two) == first


class Answering:
    """Answers every prompt with the same tokens, each likelier by ``gap`` than any other.

    Some budgets have answers of their own.
    """

    def __init__(
        self, tokens: list[int], gap: float = 0.1, at: dict[float, list[int]] | None = None
    ) -> None:
        self.tokens, self.gap, self.at = tokens, gap, at or {}

    def generate(
        self, prompts: list[list[int]], tokens: int, budget: float = 0
    ) -> list[dict[str, Any]]:
        said = self.at.get(budget, self.tokens)
        return [
            {
                "meta_info": {
                    "output_token_logprobs": [[-0.1, token] for token in said],
                    "output_top_logprobs": [[[-0.1, 1], [-0.1 - self.gap, 2]] for _ in said],
                }
            }
            for _ in prompts
        ]


def compared(one: Any, several: Any, alike: Any, prompts: list[Any]) -> dict[str, Any]:
    asked = tensor_parallel.ask_all([one, several, alike], prompts)
    wider = tensor_parallel.wider_gaps(one, asked, prompts, ())
    return tensor_parallel.compare(asked, prompts, wider)


def test_the_study_of_rounding_has_the_prompts_of_the_ranks() -> None:
    prompts = tensor_parallel.repeating(3, 500, 2048)
    assert rounding_study.repeating(3, 500, 2048) == [prompt.ids for prompt in prompts]


def test_ranks_whose_answers_end_early_are_not_equal() -> None:
    whole, cut = Answering([7] * 16), Answering([7] * 15)
    prompts = tensor_parallel.repeating(2, 50, 1000)
    assert compared(whole, whole, whole, prompts)["ok"]
    for pair in ((whole, cut), (cut, whole), (cut, cut)):
        found = compared(*pair, whole, prompts)
        assert (found["ok"], found["cut_short"]) == (False, 2)


def test_ranks_diverge_at_near_ties_or_where_one_that_adds_alike_does() -> None:
    prompts = tensor_parallel.repeating(2, 50, 1000)
    other = Answering([7, *[8] * 15])
    later = Answering([7, 7, *[8] * 14])
    for gap, near in ((0.2, True), (0.3, False)):
        one = Answering([7] * 16, gap=gap)
        for alike in (one, other, later):
            found = compared(one, other, alike, prompts)
            assert (found["ok"], found["same_first_token"], found["same_tokens"]) == (
                near or alike is other,
                1,
                0,
            )
            assert found["by_rounding_alone"]["same_tokens"] == (alike is one)
            assert found["beside_one_that_adds_alike"]["same_tokens"] == (alike is other)
    first = Answering([8, *[7] * 15])
    assert not compared(one, first, first, prompts)["ok"]


def test_wide_gaps_come_with_the_budgets_at_which_one_rank_answers_alike() -> None:
    prompts = tensor_parallel.repeating(2, 50, 1000)
    other = [7, 7, 8, *[9] * 13]
    one = Answering([7] * 16, gap=0.3, at={240: [7, 7, 8, 1], 272: [8] * 16})
    asked = tensor_parallel.ask_all([one, Answering(other), one], prompts)
    found = tensor_parallel.wider_gaps(one, asked, prompts, (240, 272, 288))
    gap = {"gap": 0.3, "as_one_that_adds_alike": False, "as_one_rank_at_budgets": [240]}
    assert found == [gap] * 2
    near = Answering([7] * 16, gap=0.2, at=one.at)
    asked = tensor_parallel.ask_all([near, Answering(other), near], prompts)
    assert tensor_parallel.wider_gaps(near, asked, prompts, (240,)) == []


def test_answers_are_compared_as_far_as_the_right_ones_go(tmp_path: Path) -> None:
    short, long = Answering([7] * 3), Answering([7] * 5)
    (tmp_path / "prompts.json").write_text("[[[1, 2], 3]]")
    prompts = tensor_parallel.prompts_of(tmp_path / "prompts.json")
    assert compared(short, short, short, prompts)["ok"]
    assert compared(short, long, short, prompts)["cut_short"] == 1
