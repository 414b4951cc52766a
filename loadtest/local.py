# SPDX-License-Identifier: Apache-2.0
"""Servers on this machine with the model that the repository ships, for the short versions."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compare_latency import wait_until_up

MODEL = Path(__file__).parents[1] / "configs" / "reference" / "model"
COMMON = [
    *("--model-path", str(MODEL), "--served-model-name", "reference", "--host", "127.0.0.1"),
    *("--max-total-tokens", "32768", "--max-running-requests", "8", "--random-seed", "1"),
    # Cached tokens are in OpenAI's usage only if asked for.
    *("--enable-metrics", "--enable-cache-report", "--sleep-on-idle"),
]
CPU = ["--device", "cpu", "--disable-overlap-schedule", "--dtype", "float32"]
SPARSE = ["--attention-backend", "sparse", "--sparse-config", '{"min_sparse_tokens": 512}']
CONFIGURATIONS = {
    "dense": ["--page-size", "64"],
    "sparcas": [*SPARSE, "--sparse-method", "sparcas"],
    "page_minmax": [*SPARSE, "--sparse-method", "page_minmax"],
}


@dataclass(frozen=True)
class Local:
    """A server of :func:`local_server`."""

    url: str
    pid: int
    log: Path


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


@contextmanager
def local_server(name: str, logs: Path, env: dict[str, str] | None = None) -> Iterator[Local]:
    """Start one of `CONFIGURATIONS`, yield it once it answers, end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *COMMON]
    command += [*([] if _has_gpu() else CPU), *CONFIGURATIONS[name]]
    log, url = logs / f"server-{name}.log", f"http://127.0.0.1:{port}"
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings, **(env or {})},
            start_new_session=True,
        )
        try:
            wait_until_up(server, url, log)
            yield Local(url, server.pid, log)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
