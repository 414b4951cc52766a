# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse warmup`: a start of the server that only compiles what a later one needs.

It starts SGLang's own server with random weights, waits until it has answered its first request,
and ends it. So whatever a start compiles lies on disk then: this package's kernels and those of
SGLang and FlashInfer. A model's config and tokenizer are enough; no weights are read.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

_POLL_SECONDS = 0.5
_END_SECONDS = 60


def server_command(args: Sequence[str], port: int) -> list[str]:
    """Command of a server with random weights; `args` are those of `sglang.launch_server`."""
    command = [sys.executable, "-m", "sglang.launch_server", *args]
    return [*command, "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port)]


def warm_up(args: Sequence[str], *, timeout: float) -> float:
    """Start a server, wait until it answers, end it.

    Args:
        args: as for `sglang.launch_server`.
        timeout: seconds to wait.

    Returns:
        Seconds until it answered.

    Raises:
        RuntimeError: the server ended by itself, or took longer than `timeout`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    # In a session of its own, so that its processes can be ended together.
    server = subprocess.Popen(server_command(args, port), start_new_session=True)
    try:
        while not _answers(port):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with status {server.returncode}")
            if time.monotonic() - start > timeout:
                raise RuntimeError(f"the server did not answer within {timeout:.0f} s")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - start
    finally:
        _end(server)


def _answers(port: int) -> bool:
    # It answers 200 here once it has generated a token.
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server, first by SIGTERM, then all that is left of its session."""
    if server.poll() is None:
        server.terminate()  # shells let what they start in the background ignore SIGINT
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
