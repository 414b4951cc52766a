# SPDX-License-Identifier: Apache-2.0
"""Servers of load tests: ended with the script that started them, and not taken for each other."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scripts  # noqa: F401 - makes the folder of scripts importable

import compare_latency  # isort: skip
from compare_latency import running_server  # isort: skip

# Answers every request, as a server's `/health`.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
SCRIPT = """
import sys, time
from pathlib import Path
from compare_latency import running_server

port = int(sys.argv[1])
with running_server([sys.executable, "-c", sys.argv[2], str(port)], port, Path(sys.argv[3])):
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_script_that_is_stopped_ends_its_server(port: int, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", SCRIPT, str(port), SERVER, str(tmp_path / "log")]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "up\n"
        assert answers(port)
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=30) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while answers(port) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not answers(port)


def test_another_servers_port_is_refused(port: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(port)]
    handler = signal.getsignal(signal.SIGTERM)
    with running_server(command, port, tmp_path / "first"):
        with (
            pytest.raises(RuntimeError, match=f"port {port} is taken"),
            running_server(command, port, tmp_path / "second"),
        ):
            pass
        assert answers(port)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_folders_of_reports_and_logs_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, logs = tmp_path / "new" / "reports", tmp_path / "new" / "logs"
    seen: list[tuple[str, bool]] = []

    def measured(label: str, args: object) -> None:
        seen.append((label, out.is_dir() and logs.is_dir()))

    monkeypatch.setattr(compare_latency, "run", measured)
    line = ["--configurations", "dense", "--out", str(out), "--logs", str(logs)]
    monkeypatch.setattr(sys, "argv", ["compare_latency.py", *line])
    compare_latency.main()
    assert seen == [("dense", True)]
