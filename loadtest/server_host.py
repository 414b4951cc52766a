# SPDX-License-Identifier: Apache-2.0
"""A process that has imported SGLang and forks servers, so that each starts without importing.

Most of a server's start is importing, which happens three times, since it spawns three processes.
Here they are forked instead, from a process that has only imported and has not touched CUDA.
Servers that are started by their commands cover what is special to spawning: pickled arguments,
and a plugin that each process loads by itself.

    python server_host.py    # a JSON object a line on stdin; a process id a line on stdout
"""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path

# What the three processes of a server import; the registry imports every model.
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)


def import_sglang() -> None:
    """Import what servers need; `OMP_NUM_THREADS` is read here, not when one is forked."""
    for name in MODULES:
        import_module(name)


def fork_server(args: list[str], env: dict[str, str], log: str) -> int:
    """Fork a server from this process, which has imported SGLang and has no threads.

    Args:
        args: of `sglang.launch_server`.
        env: added to the environment.
        log: file for what it prints.

    Returns:
        Its process id, which is also that of its group.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            _become_server(args, env, log)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(1)
    os.setpgid(pid, pid)
    return pid


def _become_server(args: list[str], env: dict[str, str], log: str) -> None:
    """Turn this freshly forked process into ``python -m sglang.launch_server``."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_method("fork", force=True)
    sys.argv = ["sglang.launch_server", *args]
    del sys.modules["sglang.launch_server"]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _serve_requests() -> None:
    """Fork a server for each line, until stdin ends; then end all of them."""
    import_sglang()
    import_module("sglang.srt.plugins").load_plugins()  # looks for each hook in every module
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes away ended children
    servers = []
    for line in sys.stdin:
        servers.append(fork_server(**json.loads(line)))
        print(servers[-1], flush=True)
    for pid in servers:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Host:
    """The forking process, for programs that must not fork, such as tests, which have threads."""

    def __init__(self, env: dict[str, str]) -> None:
        """Start it; ``env`` is that of every server."""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,  # an interrupt is for the tests, which then close it
        )

    def fork(self, args: list[str], env: dict[str, str], log: Path) -> int:
        """Process id (and group) of a server with these arguments; waits for the imports."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"args": args, "env": env, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it and all of its servers."""
        self._process.communicate()


if __name__ == "__main__":
    _serve_requests()
