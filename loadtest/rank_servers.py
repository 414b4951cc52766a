# SPDX-License-Identifier: Apache-2.0
"""Servers on several GPUs that start at once, and the report of what they answered.

They run without custom all-reduce, and without NVLink multicast.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
LAUNCH = ["-m", "sglang.launch_server"]
COMMON = ["--disable-custom-all-reduce", "--cuda-graph-backend-prefill=disabled"]
ANSWER_SECONDS = 120


class Line(NamedTuple):
    """How to start a server: its GPUs, as CUDA_VISIBLE_DEVICES has them, and its flags.

    ``in_one``: ranks whose arithmetic a server of one rank has, see ``ranks_in_one.py``.
    """

    devices: str
    flags: list[str]
    in_one: int = 1


@dataclass
class Server:
    """One running server."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def call(self, path: str, body: Any = None, timeout: float = 600) -> Any:
        """One HTTP call."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else None

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        timeout: float = 600,
        budget: float | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy answers with the two likeliest tokens of each step."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        if budget is not None:
            sampling["custom_params"] = {"sparse": {"budget": budget}}
        body = {
            "input_ids": prompts,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answers: list[dict[str, Any]] = self.call("/generate", body, timeout)
        return answers

    def stacks(self) -> str:
        """Ask every process of the server for its stacks, and return what they write."""
        before = self.log.stat().st_size
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.process.pid:  # of the server's process group
                os.kill(int(status.parent.name), signal.SIGUSR1)
        time.sleep(5)
        return self.log.read_bytes()[before:].decode(errors="replace")

    def close(self) -> None:
        """End the server and everything that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(name: str, port: int, line: Line, logs: Path) -> Server:
    """Start a server whose processes write their stacks on SIGUSR1."""
    site = logs / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1, all_threads=True)\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = os.environ | SAFE | {"CUDA_VISIBLE_DEVICES": line.devices, "PYTHONPATH": path}
    program = LAUNCH
    if line.in_one > 1:
        program = [str(Path(__file__).with_name("ranks_in_one.py"))]
        environment["RANKS_IN_ONE"] = str(line.in_one)
    log = logs / f"{name}.log"
    command = [sys.executable, *program, "--port", str(port), *COMMON, *line.flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--skip-server-warmup"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log)


def wait_until_up(server: Server, deadline: float) -> bool:
    """True once it listens; False if it ended, or at the deadline."""
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            server.call("/model_info", timeout=5)
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


def first_answer(server: Server, began: float) -> dict[str, Any]:
    """How long the first prompt takes; with stacks if it is not answered."""
    up = wait_until_up(server, time.monotonic() + 300)
    found: dict[str, Any] = {"up_seconds": time.monotonic() - began if up else None}
    if not up:
        return found | {"answered": False, "log": server.log.read_text()[-3000:]}
    asked = time.monotonic()
    try:
        server.generate([list(range(100, 400))], 4, timeout=ANSWER_SECONDS)
    except (urllib.error.URLError, OSError) as error:
        stacks = server.stacks()
        print(f"{server.name}: no answer: {error}\n{stacks[-8000:]}", flush=True)
        return found | {"answered": False, "stacks": stacks[-60000:]}
    return found | {"answered": True, "first_answer_seconds": time.monotonic() - asked}


class Report:
    """What was found so far; it is written after each part. Threads may share it."""

    def __init__(self, path: Path, **known: Any) -> None:
        self.path, self.found = path, known
        self._lock = threading.Lock()

    def note(self, **found: Any) -> None:
        """Add to the report, write it, and say it in short."""
        with self._lock:
            self.found |= found
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        for name, value in found.items():
            print(name, str(value)[:400], flush=True)


@contextmanager
def started(
    lines: dict[str, Line], report: Report, logs: Path, first_port: int
) -> Iterator[dict[str, Server]]:
    """Servers by name; yields those that answered a prompt, and ends all."""
    began, servers = time.monotonic(), {}
    try:
        for index, (name, line) in enumerate(lines.items()):
            servers[name] = start(name, first_port + 50 * index, line, logs)

        def answers(server: Server) -> bool:
            found = first_answer(server, began)
            report.note(**{f"start of {server.name}": found})
            return bool(found["answered"])

        with ThreadPoolExecutor(len(servers)) as pool:
            answered = list(pool.map(answers, servers.values()))
        yield {name: servers[name] for name, done in zip(servers, answered, strict=True) if done}
    finally:
        for server in servers.values():
            server.close()
