# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse requests in turns, against servers that answer as fast as they are told."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
import beside_dense  # isort: skip

Serve = Callable[..., str]
STEP_S = 0.01
SPARSE = {"method": "sparcas", "implementation": "cpu"}


@pytest.fixture
def asked() -> list[str]:
    """What was asked for, in order."""
    return []


@pytest.fixture
def serve(asked: list[str]) -> Iterator[Serve]:
    """``serve(name, sparse, cut)``: the address of a server that streams sparse tokens faster.

    ``cut`` tokens are missing at the end of each answer.
    """
    running: list[ThreadingHTTPServer] = []

    def start(name: str = "own", sparse: Any = SPARSE, cut: int = 0) -> str:
        class Server(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                info = {"version": "0.5.x", "device": "cpu", "internal_states": [{}]}
                info["internal_states"] = [{"sparse": sparse} if sparse else {}]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(info).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                params = body["sampling_params"]
                dense = params.get("custom_params") == {"sparse": {"mode": "dense"}}
                asked.append(f"{name} {'dense' if dense or not sparse else 'sparse'}")
                self.send_response(200)
                self.end_headers()
                time.sleep(0.05)  # what comes before the first token does not count
                for token in range(1, params["max_new_tokens"] + 1 - cut):
                    meta = {"prompt_tokens": 10, "completion_tokens": token}
                    event = {"text": "", "meta_info": meta}
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    time.sleep(STEP_S if dense or not sparse else STEP_S / 5)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def run(monkeypatch: pytest.MonkeyPatch, *line: str) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_dense", *line])
    beside_dense.main()


def test_a_report_says_what_was_measured_where_and_how_far_it_spreads(
    serve: Serve, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "report.json"
    run(monkeypatch, "--base-url", serve(), "--dense-url", serve("other", None),
        "--contexts", "50", "60", "--tokens", "6", "--repeats", "3", "--commit", "abc",
        "--out", str(out))  # fmt: skip
    report = json.loads(out.read_text())
    cells = report.pop("cells")
    assert report.pop("cores") >= 1
    assert report.pop("device")
    assert report == SPARSE | {"sglang": "0.5.x", "commit": "abc", "tokens": 6}
    assert [cell["context"] for cell in cells] == [50, 60]
    for cell in cells:
        assert list(cell["ms"]) == ["dense", "sparse", "dense_server"]
        assert list(cell["times_faster"]) == ["dense", "dense_server"]
        for found in (*cell["ms"].values(), *cell["times_faster"].values()):
            low, high = found["quartiles"]
            assert low <= found["median"] <= high
            assert len(found["all"]) == 3
        # Sleeps last longer on a busy machine, but none is shorter.
        assert min(cell["ms"]["dense"]["all"]) >= 1000 * STEP_S
        assert cell["times_faster"]["dense"]["median"] > 1
        assert cell["times_faster"]["dense_server"]["median"] > 1
    # Each once before, and then in changing order.
    turns = ["own dense", "own sparse", "other dense"]
    assert asked == 2 * [*turns, *turns[::-1], *turns, *turns[::-1]]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_answers_that_end_early_end_the_measurement(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="an answer has 7 of 8 tokens"):
        run(monkeypatch, "--base-url", serve(cut=1), "--contexts", "50")


@pytest.mark.parametrize(
    ("sparse", "line", "told"),
    [
        (None, [], "serves without --attention-backend sparse"),
        (SPARSE, ["--repeats", "1"], "--repeats: at least 2 are needed"),
        (SPARSE, ["--tokens", "1"], "--tokens: at least 2 are needed"),
    ],
)
def test_what_cannot_be_measured_is_told(
    sparse: Any, line: list[str], told: str, serve: Serve, monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        run(monkeypatch, "--base-url", serve(sparse=sparse), *line)
    assert told in capsys.readouterr().err
