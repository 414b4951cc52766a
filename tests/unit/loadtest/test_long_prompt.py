# SPDX-License-Identifier: Apache-2.0
"""Long prompts: what is timed, what is linear, and the script against a small HTTP server."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import scripts  # noqa: F401  # the load tests

import long_prompt  # isort: skip
from long_prompt import Arrival, spread, step_ms, stream_batch

PER_TOKEN, STEP = 1e-5, 0.004


class Server(BaseHTTPRequestHandler):
    """Answers in a time that follows from the prompt's length."""

    protocol_version = "HTTP/1.0"
    cached = 0
    prompts: ClassVar[list[list[int]]] = []

    def do_GET(self) -> None:
        usage = {"weight": 15.0, "kvcache": 2.5}
        self._say(
            {"version": "0", "internal_states": [{"memory_usage": usage, "sparse": {"a": 1}}]}
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        type(self).prompts += rows
        time.sleep(PER_TOKEN * sum(map(len, rows)))
        meta = {"completion_tokens": tokens, "cached_tokens": type(self).cached}
        if not body.get("stream"):
            self._say([{"meta_info": meta}] * len(rows))
            return
        self._head()
        for token in range(1, tokens + 1):
            for row in range(len(rows)):
                chunk = {"index": row, "meta_info": meta | {"completion_tokens": token}}
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            time.sleep(STEP)
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self) -> None:
        self.send_response(200)
        self.end_headers()

    def _say(self, what: Any) -> None:
        self._head()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Server.cached = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_steps_are_timed_while_all_rows_decode() -> None:
    # Row 0 decodes slowly by itself until row 1 begins, and row 1 goes on alone.
    alone = [Arrival(float(t), 0, t) for t in range(1, 4)]
    both = [Arrival(3 + 0.1 * t, 0, 3 + t) for t in range(1, 11)]
    other = [Arrival(3 + 0.1 * t, 1, t) for t in range(1, 11)] + [Arrival(9.0, 1, 11)]
    assert step_ms([*alone, *both, *other], 2) == pytest.approx(100)
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        step_ms(alone, 2)
    with pytest.raises(RuntimeError, match="more tokens"):
        step_ms([*alone, Arrival(9.0, 1, 1), Arrival(10.0, 1, 2)], 2)


def test_linear_is_the_same_time_a_token() -> None:
    cells = [{"length": n, "first_token_s": n * s} for n, s in ((10, 9.0), (100, 1.0), (200, 1.1))]
    assert spread(cells, 100) == pytest.approx(0.1)
    assert spread(cells, 10) == pytest.approx(8.0)
    assert spread(cells, 200) is None


def test_a_server_is_measured(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "report.json"
    line = (
        f"x --base-url {url} --label small --out {out} --warm 10 --lengths 20000 40000 --tokens 6"
    )
    line += " --decode 100x3 --least 20000 --repeats 2"
    monkeypatch.setattr(sys, "argv", line.split())
    batches: list[list[Arrival]] = []

    def recorded(*args: Any) -> list[Arrival]:
        batches.append(stream_batch(*args))
        return batches[-1]

    monkeypatch.setattr(long_prompt, "stream_batch", recorded)
    long_prompt.main()
    report = json.loads(out.read_text())
    assert [cell["length"] for cell in report["cells"]] == [20000, 40000]
    for cell in report["cells"]:
        assert cell["first_token_s"] >= PER_TOKEN * cell["length"]
        assert len(cell["all_s"]) == 2
    assert report["per_token_spread"] >= 0
    (decode,) = report["decode"]
    (arrivals,) = batches
    for row in range(3):
        assert [a.tokens for a in arrivals if a.row == row] == list(range(1, 7))
    # The server sleeps between tokens; when this process reads them is not in its hands.
    assert arrivals[-1].seconds >= 5 * STEP
    assert decode["ms_per_token"] == step_ms(arrivals, 3)
    assert (decode["length"], decode["batch"]) == (100, 3)
    first, second = Server.prompts[-5:-3]  # before the batch of three
    assert first[: -long_prompt.QUESTION] == second[: -long_prompt.QUESTION]
    assert first != second
    assert len(second) == 100
    assert decode["second_question_s"] >= PER_TOKEN * 100
    assert report["memory"]["server"]["kvcache"] == 2.5
    assert report["sparse"] == {"a": 1}


def test_prompts_that_were_cached_are_not_called_first_tokens(url: str) -> None:
    Server.cached = 7
    with pytest.raises(RuntimeError, match="7 of 30 tokens were cached"):
        long_prompt.measure_first_token(url, 30, 100, 1)
