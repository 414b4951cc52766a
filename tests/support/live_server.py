# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server for end-to-end tests: started, asked over HTTP, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
from local import free_port
from machine import HAS_GPU
from prometheus_client.parser import text_string_to_metric_families
from server_host import Host

from sglang_sparse.config import configs_dir
from sglang_sparse.metrics import PREFIX

MODEL = (configs_dir() / "reference" / "model").resolve()
START_SECONDS = 240
OWN_LABELS = ("role", "variant", "unit", "le", "plane", "layer")
# How far the output of an attention kernel may lie from fp32 attention over the same list, as a
# share of its norm. In bf16 the weights and the output are rounded once each, by 2^-9 relatively;
# the sum of the weights follows them, and as much again is left for the order of the sums. In fp32
# each of a few thousand terms of two sums may be rounded by 2^-24.
KERNEL_ERROR = 4 * 2.0**-9 + 2.0**-9 if HAS_GPU else 2 * 4096 * 2.0**-24
# Masses are sums of as many fp32 probabilities.
MASS_ERROR = 4096 * 2.0**-24
LAUNCH_SERVER = [sys.executable, "-m", "sglang.launch_server"]
SGLANG = str(Path(sys.executable).with_name("sglang"))

BASE_ARGS = [
    *("--model-path", str(MODEL)),
    *("--served-model-name", "reference"),
    *("--host", "127.0.0.1"),
    *("--max-total-tokens", "32768"),
    *("--max-running-requests", "8"),
    *("--random-seed", "1"),
    # An idle scheduler spins otherwise, and starves the server under test.
    "--sleep-on-idle",
]
CPU_ARGS = ["--device", "cpu", "--disable-overlap-schedule", "--dtype", "float32"]


def base_args() -> list[str]:
    """Flags every server of the tests has; float32 on the CPU, where it is also the faster one."""
    return BASE_ARGS if HAS_GPU else [*BASE_ARGS, *CPU_ARGS]


def server_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment of a process that serves, also beside others on a small machine."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # Threads that wait for each other take longer than one where every core has a server.
    environment |= {"OMP_NUM_THREADS": "1", **extra}
    environment.pop("TRITON_INTERPRET", None)
    return environment


class LiveServer:
    """One server process, of ``python -m sglang.launch_server`` unless told otherwise.

    Attributes:
        url: its address.
        pid: its process id, which is also that of its group.
        log: path of what it printed.
    """

    def __init__(
        self,
        args: list[str],
        log: Path,
        env: dict[str, str] | None = None,
        command: Sequence[str] = LAUNCH_SERVER,
        host: Host | None = None,
        base: Sequence[str] | None = None,
    ) -> None:
        """Start it by its command, or let ``host`` fork it; ``base`` replaces `base_args`."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        args = [*(base_args() if base is None else base), "--port", str(port), *args]
        self._process: subprocess.Popen[bytes] | None = None
        if host is not None:
            self.pid = host.fork(args, env or {}, log)
            return
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, *args],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=server_environment(env or {}),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_until_up(self) -> LiveServer:
        """Return when it answers; raise RuntimeError with the end of its log if it never does."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.is_alive():
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.close()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def wait_until_ended(self) -> int | None:
        """Exit status of a server that is expected to refuse its flags; None of a forked one.

        Raises:
            TimeoutError: it still runs.
        """
        deadline = time.monotonic() + START_SECONDS
        while self.is_alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server still runs:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)
        return None if self._process is None else self._process.returncode

    def is_alive(self) -> bool:
        """True while the process runs."""
        if self._process is not None:
            return self._process.poll() is None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """End the server and everything that it started."""
        if self.is_alive():
            os.killpg(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def call(self, path: str, body: Any = None) -> Any:
        """One HTTP call; returns decoded JSON, or text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as response:
            text = response.read().decode()
        return json.loads(text) if text[:1] in "{[" and text else text

    def generate(self, prompts: list[list[int]], tokens: int, **body: Any) -> list[dict[str, Any]]:
        """Greedy answers to token prompts, as one batch, with the log-probability of each token."""
        request = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **body},
            "return_logprob": True,
        }
        answers: list[dict[str, Any]] = self.call("/generate", request)
        return answers

    def flush(self) -> None:
        """Empty the prefix cache; SGLang refuses until the last request is put away."""
        for attempt in range(20):
            try:
                self.call("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                if attempt == 19:
                    raise
                time.sleep(0.5)

    def sparse_state(self) -> dict[str, Any]:
        """The ``sparse`` block of ``/server_info``."""
        state: dict[str, Any] = self.call("/server_info")["internal_states"][0]["sparse"]
        return state

    def metrics(self) -> dict[tuple[str, str], float]:
        """Every sample of ours by its name and by the labels that are not SGLang's."""
        self.sparse_state()  # publishes what was counted
        found = {}
        for family in text_string_to_metric_families(self.call("/metrics")):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name != sample.name:
                    labels = (sample.labels[key] for key in OWN_LABELS if key in sample.labels)
                    found[name, "/".join(labels)] = sample.value
        return found


def token_ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Output token ids of each answer."""
    return [[token for _, token, _ in a["meta_info"]["output_token_logprobs"]] for a in answers]


def logprobs(answers: list[dict[str, Any]]) -> list[float]:
    """Log-probabilities of all output tokens, in order."""
    return [p for a in answers for p, _, _ in a["meta_info"]["output_token_logprobs"]]
