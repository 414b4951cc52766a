# SPDX-License-Identifier: Apache-2.0
"""The launcher behind `make serve`."""

import ast
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from sglang_sparse import serve_reference
from sglang_sparse.serve_reference import (
    FACT,
    FILLER,
    FILLER_REPEATS,
    QUESTION,
    example_lines,
    server_command,
    server_url,
)

MODEL = Path("configs/reference/model")


def test_the_server_runs_sparsely_on_the_reference_model() -> None:
    command = server_command([], model=MODEL)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert command[command.index("--model-path") + 1] == str(MODEL)
    assert command[command.index("--attention-backend") + 1] == "sparse"
    assert command[command.index("--sparse-method") + 1] == "sparcas"
    assert "--device" not in command


def test_arguments_of_the_user_win() -> None:
    command = server_command(["--port", "31000", "--host=0.0.0.0"], model=MODEL)
    assert server_url(command) == "http://127.0.0.1:31000"
    assert server_url(server_command([], model=MODEL)) == "http://127.0.0.1:30000"


def test_the_curl_line_survives_a_shell() -> None:
    line, _ = example_lines("http://127.0.0.1:30000")
    body, separator, curl = line.rpartition(" | ")
    assert separator
    assert shlex.split(curl)[:3] == ["curl", "-s", "http://127.0.0.1:30000/v1/chat/completions"]
    run = subprocess.run(["bash", "-c", body], capture_output=True, text=True, check=True)
    request = json.loads(run.stdout)
    assert request["model"] == "reference"
    [message] = request["messages"]
    assert message["content"] == FACT + FILLER * FILLER_REPEATS + QUESTION


def test_the_client_line_survives_a_shell() -> None:
    _, line = example_lines("http://127.0.0.1:30000")
    program = shlex.split(line)[-1]
    ast.parse(program)
    assert "base_url='http://127.0.0.1:30000/v1'" in program


def test_a_missing_model_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_reference, "configs_dir", lambda: tmp_path)
    assert serve_reference.main([]) == 2
    assert capsys.readouterr().err.startswith(f"error: no model at {tmp_path}")
