# SPDX-License-Identifier: Apache-2.0
"""Start a dense and sparse servers in turn on one GPU, and measure each with `decode_latency.py`.

    python loadtest/compare_latency.py --out loadtest/results/h200
    python docs/latency_tables.py loadtest/results/h200

All servers run on one machine with the same model shape, dummy weights and prompts. Their flags
differ only in the attention. Each report also holds the GPU, the commit and the GPU memory in use
at its end.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from decode_latency import add_arguments, measure_server
from profile_decode import profile

HERE = Path(__file__).parent
# Short rows are measured sparse too, so that the crossover can be read off.
SPARSE = ["--attention-backend", "sparse", "--sparse-config", '{"min_sparse_tokens": 4096}']
METHODS = ("sparcas", "page_minmax", "kascade", "kascade_sketch", "psa", "psa_sketch", "lserve")
CONFIGURATIONS = {
    "dense": ["--attention-backend", "flashinfer"],
    **{method: [*SPARSE, "--sparse-method", method] for method in METHODS},
}
# The same selections with KV on the device and in host memory; measured only if they are named.
PAGES: dict[str, dict[str, object]] = {
    "page_minmax": {"layers": {"kind": "every"}, "page_size": 16, "min_sparse_tokens": 2048},
    "page_minmax_reuse": {
        "layers": {"kind": "anchors", "anchors": [0, 2, 8, 13, 14], "first": "selection"},
        "page_size": 16,
        "min_sparse_tokens": 2048,
    },
    "psa": {"budget": {"cap": 2048}, "page_size": 32, "min_sparse_tokens": 2048},
}
# Frames and planes take alike of the device: `psa` has half the planes.
FRAMES_GIB = {"page_minmax": 16, "page_minmax_reuse": 16, "psa": 19}
ON_HOST = {"kind": "host", "host_bytes": 96 << 30}
PLACEMENTS = {
    f"{method}_{where}": [
        *("--attention-backend", "sparse", "--sparse-method", method.removesuffix("_reuse")),
        *("--sparse-config", json.dumps(pages | placement)),
    ]
    for method, pages in PAGES.items()
    for where, placement in {
        "on_device": {},
        "on_host": {"placement": ON_HOST | {"device_bytes": FRAMES_GIB[method] << 30}},
    }.items()
}
START_SECONDS = 400


def server_command(model: Path, port: int, max_batch: int, attention: list[str]) -> list[str]:
    """Command line of one server; without a tokenizer, since prompts are token ids."""
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--port", str(port)),
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--mem-fraction-static", "0.85", "--random-seed", "1"),
        *("--max-running-requests", str(2 * max_batch)),
        *("--cuda-graph-max-bs-decode", str(max_batch)),
        "--cuda-graph-backend-prefill=disabled",
        *attention,
    ]


def wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when the server answers; raise RuntimeError with the end of its log otherwise."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (OSError, HTTPException):  # refused, or ended half-way through its start
            time.sleep(1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")


def output_of(*command: str) -> str | None:
    """First line that a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0]


def gpu(field: str) -> str | None:
    """One field of `nvidia-smi`, of the GPU that the servers run on."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = f"--query-gpu={field}"
    return output_of("nvidia-smi", f"--id={first}", query, "--format=csv,noheader,nounits")


@contextmanager
def _stopped_by_exit() -> Iterator[None]:
    """Inside, SIGTERM ends this process by SystemExit, so that what it started is ended, too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running_server(command: list[str], port: int, log: Path) -> Iterator[str]:
    """Start a server by its command, see :func:`server_command`; yield its address.

    It ends with the context, also where SIGTERM ends this process. Call it from the main thread.

    Raises:
        RuntimeError: it did not start, or another server has its port: that one would be measured.
    """
    url = f"http://127.0.0.1:{port}"
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError(f"port {port} is taken: end the server there, or name another port")
    with _stopped_by_exit(), log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_up(server, url, log)
            yield url
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def run(label: str, args: argparse.Namespace) -> None:
    """Start the server of one configuration, measure it, end it, complete its report."""
    out = args.out / f"{label}.json"
    cells = [tuple(map(int, cell.split("x"))) for cell in args.profile]
    batch = max(
        [*args.batches, *(cell.batch for cell in args.separate), *(size for _, size in cells)]
    )
    attention = [*(CONFIGURATIONS | PLACEMENTS)[label], *shlex.split(args.flags)]
    command = server_command(args.model, args.port, batch, attention)
    with running_server(command, args.port, args.logs / f"{label}.log") as url:
        measure_server(url, label, args, out)
        used = gpu("memory.used")
        profiles = [profile(url, *cell, args.vocab) for cell in cells]
    report = json.loads(out.read_text())
    report["memory_used_mib"] = None if used is None else int(used)
    report["device"] = gpu("name")
    report["commit"] = args.commit or output_of("git", "rev-parse", "--short", "HEAD")
    # The path of the repository on the measuring machine has no place in a report.
    report["command"] = [word.replace(f"{HERE.parent}{os.sep}", "") for word in command[1:]]
    if profiles:
        report["profiles"] = profiles
    out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure the named configurations, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS),
                        choices=[*CONFIGURATIONS, *PLACEMENTS])  # fmt: skip
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument(
        "--logs", type=Path, help="folder of the servers' logs; the same by default"
    )
    parser.add_argument(
        "--profile", nargs="*", default=[], metavar="CONTEXTxBATCH", help="steps to take apart"
    )
    parser.add_argument("--flags", default="", help="further flags of every server")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    add_arguments(parser)
    args = parser.parse_args()
    args.logs = args.logs or args.out
    for folder in (args.out, args.logs):
        folder.mkdir(parents=True, exist_ok=True)
    for label in args.configurations:
        print(f"== {label}", flush=True)
        run(label, args)


if __name__ == "__main__":
    main()
