# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse warmup`: the real server, started without weights and ended."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from live_server import MODEL
from typer.testing import CliRunner

from sglang_sparse import warmup
from sglang_sparse.cli import app

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

FLAGS = ["--attention-backend", "sparse", "--sparse-method", "sparcas"]


def test_warmup_starts_the_server_without_weights_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tmp_path / "model"
    model.mkdir()
    for file in MODEL.glob("*.json"):
        shutil.copy(file, model)
    assert json.loads((model / "config.json").read_text())
    assert not list(model.glob("*.safetensors"))
    done = CliRunner().invoke(app, ["warmup", "--model-path", str(model), *FLAGS])
    assert done.exit_code == 0, done.output
    assert "the server was up after" in done.output


def test_a_server_that_ends_by_itself_fails_the_warmup(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["warmup", "--model-path", str(tmp_path), *FLAGS])
    assert done.exit_code == 2
    assert "error: the server ended with status" in done.output


def test_a_server_that_takes_too_long_is_ended_where_sigint_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in a shell's background; what is started inherits it. To wait so long would fail this test.
    monkeypatch.setattr(warmup, "_END_SECONDS", 3600)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        line = ["warmup", "--timeout", "1", "--model-path", str(MODEL), *FLAGS]
        done = CliRunner().invoke(app, line)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 2
    assert "the server did not answer within 1 s" in done.output
