# SPDX-License-Identifier: Apache-2.0
"""Times of starts are read off a server's log and the clock."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import scripts  # noqa: F401 - makes the folder of scripts importable

import start_time  # isort: skip

LINE = "sglang-sparse: 3 kernels were on disk, 7 were compiled by 4 processes, in 9.1 s"


def args(logs: Path) -> Namespace:
    return Namespace(logs=logs, model=logs, port=1, max_batch=16)


def serve(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    @contextmanager
    def server(command: list[str], port: int, log: Path) -> Iterator[str]:
        log.write_text(text)
        yield "url"

    monkeypatch.setattr(start_time, "running_server", server)
    monkeypatch.setenv("TRITON_CACHE_DIR", "of the shell")


@pytest.mark.parametrize("rank", ["", " TP0"])
def test_a_start_lasts_from_loaded_weights_to_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str
) -> None:
    loaded = f"{datetime.now() - timedelta(seconds=40):%Y-%m-%d %H:%M:%S}"
    log = f"[{loaded}{rank}] Load weight begin.\n[{loaded}{rank}] Load weight end. elapsed=1\n"
    log += f"[{loaded}] Capture target decode CUDA graph end. elapsed=2.25 s, mem usage=0.1 GB\n"
    log += f"[{loaded}] sglang-sparse: bid_kernel was compiled at its launch, which took 1.5 s\n"
    serve(monkeypatch, f"{log}[{loaded}{rank}] {LINE}\n")
    found: dict[str, Any] = start_time.start("kascade_sketch", args(tmp_path), tmp_path / "cache")
    assert 39.9 < found["seconds"] < 45
    assert found["total_seconds"] < 5
    assert found["capture_seconds"] == 2.25
    assert found["late"] == {"bid_kernel": 1.5}
    assert found["kernels"] == LINE.removeprefix("sglang-sparse: ")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache")


def test_a_log_without_loaded_weights_is_no_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, "nothing\n")
    with pytest.raises(RuntimeError, match="does not say when weights were loaded"):
        start_time.start("dense", args(tmp_path), tmp_path)
