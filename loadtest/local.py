# SPDX-License-Identifier: Apache-2.0
"""Servers on this machine with the model that the repository ships, for short load tests."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import server_host
from compare_latency import METHODS, wait_until_up

MODEL = Path(__file__).parents[1] / "configs" / "reference" / "model"
COMMON = [
    *("--model-path", str(MODEL), "--served-model-name", "reference", "--host", "127.0.0.1"),
    *("--max-total-tokens", "32768", "--max-running-requests", "8", "--random-seed", "1"),
    # Cached tokens are in OpenAI's usage only if asked for.
    *("--enable-metrics", "--enable-cache-report", "--sleep-on-idle"),
]
CPU = ["--device", "cpu", "--disable-overlap-schedule", "--dtype", "float32"]
PORTS = range(20_000, 32_000)
SPARSE = ["--attention-backend", "sparse", "--sparse-config", '{"min_sparse_tokens": 512}']
CONFIGURATIONS = {
    "dense": ["--page-size", "64"],
    **{method: [*SPARSE, "--sparse-method", method] for method in METHODS},
}


@dataclass(frozen=True)
class Local:
    """A server of :func:`local_servers`."""

    url: str
    pid: int
    log: Path


# OpenMP's spin-waits turn any other load on two cores into minutes.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


class _Forked:
    """The part of the interface of `subprocess.Popen` that is used, for a forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def poll(self) -> int | None:
        """None while it runs."""
        self._ended = self._ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return 1 if self._ended else None

    def wait(self) -> None:
        """Return once it has ended."""
        if not self._ended:
            os.waitpid(self.pid, 0)


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU; asked without importing torch."""
    return Path("/dev/nvidiactl").exists()


def free_port() -> int:
    """A TCP port that is free, and that no client gets while a server starts.

    The system gives clients ports from the range above, even the client that polls the server.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop - 1}: end some servers")


@contextmanager
def local_servers(
    settings: dict[str, dict[str, str]],
    logs: Path,
    *,
    fork: bool = False,
    configurations: dict[str, list[str]] = CONFIGURATIONS,
) -> Iterator[dict[str, Local]]:
    """Start servers at once, yield them when all answer, and end them.

    Args:
        settings: further environment of servers, by name.
        logs: folder for their output.
        fork: fork them from this process (:mod:`server_host`), which needs `ENVIRONMENT` in its
            environment.
        configurations: flags of each server, by name.
    """
    running: dict[str, tuple[Any, str, Path]] = {}
    try:
        for name, env in settings.items():
            port = free_port()
            arguments = ["--port", str(port), *COMMON, *([] if has_gpu() else CPU)]
            arguments += configurations[name]
            log = logs / f"server-{name}.log"
            server: Any
            if fork:
                server = _Forked(server_host.fork_server(arguments, env, str(log)))
            else:
                with log.open("wb") as output:
                    server = subprocess.Popen(
                        [sys.executable, "-m", "sglang.launch_server", *arguments],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **ENVIRONMENT, **env},
                        start_new_session=True,
                    )
            running[name] = server, f"http://127.0.0.1:{port}", log
        for server, url, log in running.values():
            wait_until_up(server, url, log)
        yield {name: Local(url, s.pid, log) for name, (s, url, log) in running.items()}
    finally:
        for server, _, _ in running.values():
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
