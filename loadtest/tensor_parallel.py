# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on two GPUs beside one GPU, and beside dense attention on the same two.

    python3 loadtest/tensor_parallel.py --out tensor-parallel.json --commit HASH

Starts four servers at once on two GPUs: the reference model with one rank and with two, and a
Llama-3.1-8B shape with dummy weights, dense and sparse, with two ranks. First it checks that each
server answers a prompt. If one does not within two minutes, the stacks of all its threads are
printed. Then it compares the answers of two ranks with those of one. Last it measures the time per
output token at long separate prompts.

Servers run without custom all-reduce, and without NVLink multicast.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "configs" / "reference" / "model"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
COMMON = ["--disable-custom-all-reduce", "--cuda-graph-backend-prefill=disabled"]
ANSWER_SECONDS = 120
TOKENS = (16, 80)
# Rounding may prefer either of two logits that differ by less: two bf16 steps of logits below 32.
TIE = 0.25
ANSWER_TOKENS = 16


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
        self, prompts: list[list[int]], tokens: int, timeout: float = 600
    ) -> list[dict[str, Any]]:
        """Greedy answers with the two likeliest tokens of each step."""
        body = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
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


def start(name: str, port: int, devices: str, args: list[str], logs: Path) -> Server:
    """Start a server whose processes write their stacks on SIGUSR1."""
    site = logs / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1, all_threads=True)\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = os.environ | SAFE | {"CUDA_VISIBLE_DEVICES": devices, "PYTHONPATH": path}
    log = logs / f"{name}.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *COMMON, *args]
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


def first_difference(one: list[int], two: list[int]) -> int | None:
    """Index of the first token that differs, or that one of the answers lacks; None if equal."""
    pairs = zip_longest(one, two)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def compare(one: Server, two: Server, count: int, length: int, vocab: int) -> dict[str, Any]:
    """Greedy answers of two ranks beside those of one; an answer that ends early is a failure."""
    source = random.Random(f"{count}/{length}")
    prompts = []
    for _ in range(count):
        segment = [source.randrange(300, vocab) for _ in range(source.randrange(40, 200))]
        prompts.append((segment * (length // len(segment) + 1))[:length])
    same_first = same_all = cut_short = 0
    gaps = []
    for prompt in prompts:
        a, b = (server.generate([prompt], ANSWER_TOKENS)[0]["meta_info"] for server in (one, two))
        tokens = [[x[1] for x in answer["output_token_logprobs"]] for answer in (a, b)]
        cut_short += any(len(answer) != ANSWER_TOKENS for answer in tokens)
        apart = first_difference(*tokens)
        same_first += apart != 0
        same_all += apart is None
        if apart is not None and apart < len(tokens[0]):
            likeliest = [entry[0] for entry in a["output_top_logprobs"][apart]]
            gaps.append(likeliest[0] - likeliest[1])
    close = same_first / count >= 0.95 and all(gap <= TIE for gap in gaps)
    return {
        "prompts": count,
        "tokens": length,
        "same_first_token": same_first / count,
        "same_sixteen_tokens": same_all / count,
        "gaps_where_they_diverge": sorted(gaps),
        "cut_short": cut_short,
        "ok": close and not cut_short,
    }


def step_ms(server: Server, context: int, batch: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per output token of `batch` separate prompts, their KV computed before."""
    source = random.Random(f"{context}/{batch}")
    prompts = [[source.randrange(10, 128000) for _ in range(context)] for _ in range(batch)]
    first = []
    for prompt in prompts:
        began = time.perf_counter()
        server.generate([prompt], 1)
        first.append(time.perf_counter() - began)
    server.generate(prompts, TOKENS[0])
    slopes = []
    for _ in range(repeats):
        seconds = []
        for tokens in TOKENS:
            began = time.perf_counter()
            server.generate(prompts, tokens)
            seconds.append(time.perf_counter() - began)
        slopes.append(1000 * (seconds[1] - seconds[0]) / (TOKENS[1] - TOKENS[0]))
    return {
        "context": context,
        "batch": batch,
        "ms_per_token": statistics.median(slopes),
        "all_ms_per_token": slopes,
        "first_token_seconds": first,
    }


def main() -> int:
    """Run everything; the report is written after each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--method", default="kascade_sketch")
    parser.add_argument("--context", type=int, default=120_000)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="tensor-parallel-"))
    (logs / "llama").mkdir()
    (logs / "llama" / "config.json").write_text(json.dumps(LLAMA))
    reference = ["--model-path", str(MODEL), "--max-total-tokens", "65536"]
    reference += ["--max-running-requests", "8", "--mem-fraction-static", "0.2"]
    sparse = ["--attention-backend", "sparse", "--sparse-method"]
    shape = ["--model-path", str(logs / "llama"), "--load-format", "dummy"]
    shape += ["--skip-tokenizer-init", "--max-running-requests", "8", "--tp", "2"]
    shape += ["--mem-fraction-static", "0.85"]
    shape += ["--max-total-tokens", str(args.batch * (args.context + 512) + 8192)]
    one_rank = [*reference, *sparse, "sparcas"]
    lines = {
        "reference-1": ("0", one_rank),
        "reference-2": ("0,1", [*one_rank, "--tp", "2"]),
        "sparse-2": ("0,1", [*shape, *sparse, args.method]),
        "dense-2": ("0,1", [*shape, "--attention-backend", "flashinfer"]),
    }
    report: dict[str, Any] = {"commit": args.commit, "method": args.method, "starts": {}}
    servers: dict[str, Server] = {}

    def write() -> None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    try:
        began = time.monotonic()
        for index, (name, (devices, flags)) in enumerate(lines.items()):
            servers[name] = start(name, 31100 + 50 * index, devices, flags, logs)
        for name, server in servers.items():
            found = report["starts"][name] = first_answer(server, began)
            print(name, {key: found[key] for key in found if key not in ("stacks", "log")})
            if "log" in found:
                print(found["log"])
            write()
        answered = {name for name, found in report["starts"].items() if found["answered"]}
        if {"reference-1", "reference-2"} <= answered:
            pair = servers["reference-1"], servers["reference-2"]
            report["answers"] = compare(*pair, count=40, length=3000, vocab=2000)
            print("answers", report["answers"], flush=True)
            report["ranks"] = pair[1].call("/server_info")["internal_states"][0]["sparse"]["ranks"]
            write()
        for name in ("reference-1", "reference-2"):
            servers[name].close()
        for name in ("sparse-2", "dense-2"):
            if name in answered:
                report[name] = step_ms(servers[name], args.context, args.batch, args.repeats)
                print(name, report[name]["ms_per_token"], flush=True)
                write()
            servers[name].close()
        if {"sparse-2", "dense-2"} <= answered:
            ratio = report["dense-2"]["ms_per_token"] / report["sparse-2"]["ms_per_token"]
            report["times_faster"] = ratio
            print(f"sparse is {ratio:.2f} times faster than dense on two GPUs")
            write()
    finally:
        for server in servers.values():
            server.close()
    return 0 if report.get("answers", {}).get("ok") and "times_faster" in report else 1


if __name__ == "__main__":
    sys.exit(main())
