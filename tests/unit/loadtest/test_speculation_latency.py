# SPDX-License-Identifier: Apache-2.0
"""Drafts on repetitive text: prompts, flags, slopes, and the table, against a small HTTP server."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import scripts  # noqa: F401  # the load tests

import speculation_latency  # isort: skip
from speculation_latency import SERVERS, measure, passages, table

STEP, ACCEPTED = 0.002, 4


class Server(BaseHTTPRequestHandler):
    """Answers in a time that follows from the verifications, of four tokens each."""

    protocol_version = "HTTP/1.0"
    drafts = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        steps = tokens // ACCEPTED if self.drafts else tokens
        time.sleep(STEP * steps)
        meta = {"completion_tokens": tokens} | ({"spec_verify_ct": steps} if self.drafts else {})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([{"meta_info": meta}] * len(rows)).encode())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_prompt_is_one_passage_over_and_over_and_no_two_are_alike() -> None:
    prompts = passages(1000, 3, 64, 2000)
    assert [len(prompt) for prompt in prompts] == [1000] * 3
    assert all(p[i] == p[i + 64] for p in prompts for i in range(936))
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert passages(1000, 3, 64, 2000) == prompts


@pytest.mark.parametrize(("drafts", "accepted"), [(True, ACCEPTED), (False, 1.0)])
def test_a_token_costs_the_time_of_a_step_over_what_it_accepts(
    url: str, monkeypatch: pytest.MonkeyPatch, drafts: bool, accepted: float
) -> None:
    monkeypatch.setattr(Server, "drafts", drafts)
    found = measure(url, [[1, 2], [3, 4]], 1)
    assert found["tokens_per_verification"] == accepted
    # Never faster than the server sleeps; a busy machine may be slower.
    assert found["ms_per_token"] > 1000 * STEP / accepted * 0.9


def arguments(monkeypatch: pytest.MonkeyPatch, line: str) -> Any:
    """What the command line says, without starting a server."""
    seen: list[Any] = []
    empty = {"servers": {"sparse": {"cells": []}}}
    monkeypatch.setattr(speculation_latency, "measure_all", lambda args: seen.append(args) or empty)
    monkeypatch.setattr(sys, "argv", ["speculation_latency", *line.split()])
    speculation_latency.main()
    return seen[0]


def test_servers_differ_by_attention_and_by_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    args = arguments(monkeypatch, f"--out {tmp_path} --draft-model small --drafts 6")
    found = speculation_latency.configurations(args)
    assert args.servers == SERVERS == list(found)
    for name, flags in found.items():
        assert ("sparse" in flags) == name.startswith("sparse")
        assert ("NGRAM" in flags) == name.endswith("-ngrams")
        assert ("STANDALONE" in flags) == ("small" in flags) == name.endswith("-draft-model")
        if "STANDALONE" in flags:
            assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    with pytest.raises(SystemExit):
        arguments(monkeypatch, f"--out {tmp_path} --servers dense")
    assert "sparse is missing" in capsys.readouterr().err


def test_the_table_compares_with_sparse() -> None:
    def server(ms: float, tokens: float) -> dict[str, Any]:
        cell = {"ms_per_token": ms, "tokens_per_verification": tokens}
        return {"cells": [{"context": 32000, "batch": 8} | cell]}

    report = {"servers": {"sparse": server(6.0, 1.0), "sparse-ngrams": server(3.0, 2.5)}}
    *_, plain, drafted = table(report).splitlines()
    assert plain == "| 32,000, 8 | sparse | 6.00 | 1.00 | 1.00 |"
    assert drafted == "| 32,000, 8 | sparse-ngrams | 3.00 | 2.50 | 2.00 |"
