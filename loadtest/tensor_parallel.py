# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on two GPUs beside one GPU, and beside dense attention on the same two.

    python3 loadtest/tensor_parallel.py --out tensor-parallel.json --commit HASH

Part `answers`: for each method the reference model with one rank and with two, and whether two
answer as one does. Part `speed`: a Llama-3.1-8B shape with dummy weights, dense and sparse, with
two ranks, and the time per output token at long separate prompts. Servers of a part start at once.
If one does not answer its first prompt within two minutes, the stacks of all its threads are
printed.

Servers run without custom all-reduce, and without NVLink multicast.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
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
# Head maps that were found for one rank would lead to heads that another rank has.
UNMAPPED = {"layers": {"kind": "anchors", "anchors": [0, 1, 2, 3, 4], "reuse": "identity"}}
ANSWERING: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("sparcas", "page_minmax", "psa", "psa_sketch", "lserve")},
    **dict.fromkeys(("kascade", "kascade_sketch"), UNMAPPED),
}
COMMON = ["--disable-custom-all-reduce", "--cuda-graph-backend-prefill=disabled"]
ANSWER_SECONDS = 120
TOKENS = (16, 80)
# Rounding may prefer either of two logits that differ by less: two bf16 steps of logits below 32.
TIE = 0.25
ANSWER_TOKENS = 16
# What both ranks of two, and the only one, have counted alike.
COUNTERS = ("decode_steps", "prefill_batches", "plane_reuse")


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


class Report:
    """What was found so far; it is written after each part."""

    def __init__(self, path: Path, **known: Any) -> None:
        self.path, self.found = path, known

    def note(self, **found: Any) -> None:
        """Add to the report, write it, and say it in short."""
        self.found |= found
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        for name, value in found.items():
            print(name, str(value)[:400], flush=True)


@contextmanager
def started(
    lines: dict[str, tuple[str, list[str]]], report: Report, logs: Path
) -> Iterator[dict[str, Server]]:
    """Servers by their devices and flags; yields those that answered a prompt, and ends all."""
    began, servers = time.monotonic(), {}
    try:
        for index, (name, (devices, flags)) in enumerate(lines.items()):
            servers[name] = start(name, 31100 + 50 * index, devices, flags, logs)
        answered = {}
        for name, server in servers.items():
            found = first_answer(server, began)
            report.note(**{f"start of {name}": found})
            if found["answered"]:
                answered[name] = server
        yield answered
    finally:
        for server in servers.values():
            server.close()


def with_kv_heads(count: int, folder: Path) -> Path:
    """The reference model with its first ``count`` KV heads alone, which answers nothing right."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    rows = count * config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": count}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    weights = load_file(MODEL / "model.safetensors")
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name][:rows].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def blocks(state: dict[str, Any]) -> int | None:
    """Blocks that were attended to, all layers and heads of all ranks; None without progress."""
    progress = state["progress"]
    return progress and sum(layer["blocks"] for layer in progress.values())


def answers(methods: list[str], model: Path, report: Report, logs: Path) -> bool:
    """Whether two ranks answer as one does, and count as it does, method by method."""
    common = ["--model-path", str(model), "--max-total-tokens", "65536"]
    common += ["--max-running-requests", "8", "--mem-fraction-static", "0.5"]
    common += ["--cuda-graph-max-bs-decode", "2", "--attention-backend", "sparse"]
    lines: dict[str, tuple[str, list[str]]] = {}
    for method in methods:
        flags = [*common, "--sparse-method", method]
        flags += ["--sparse-config", json.dumps(ANSWERING[method])]
        lines |= {f"{method} 1": ("0", flags), f"{method} 2": ("0,1", [*flags, "--tp", "2"])}
    equal, ranks = {}, {}
    with started(lines, report, logs) as servers:
        for method in methods:
            if {f"{method} 1", f"{method} 2"} <= servers.keys():
                pair = servers[f"{method} 1"], servers[f"{method} 2"]
                equal[method] = compare(*pair, count=40, length=3000, vocab=2000)
                infos = [server.call("/server_info")["internal_states"][0] for server in pair]
                states = [info["sparse"] for info in infos]
                ranks[method] = states[1]["ranks"]
                each = [{name: of[name] for name in COUNTERS} for of in (states[0], *ranks[method])]
                equal[method] |= {"counted": each[0], "counted_alike": each == each[:1] * 3}
                equal[method]["blocks"] = [blocks(state) for state in states]
                report.note(answers=equal, ranks=ranks)
    return len(equal) == len(methods) and all(
        found["ok"] and found["counted_alike"] for found in equal.values()
    )


def speed(args: argparse.Namespace, report: Report, logs: Path) -> bool:
    """Milliseconds per output token of two ranks, sparse beside dense."""
    (logs / "llama").mkdir()
    (logs / "llama" / "config.json").write_text(json.dumps(LLAMA))
    shape = ["--model-path", str(logs / "llama"), "--load-format", "dummy"]
    shape += ["--skip-tokenizer-init", "--max-running-requests", "8", "--tp", "2"]
    shape += ["--mem-fraction-static", "0.85"]
    shape += ["--max-total-tokens", str(args.batch * (args.context + 512) + 8192)]
    sparse = ["--attention-backend", "sparse", "--sparse-method", args.method]
    lines = {
        "sparse": ("0,1", [*shape, *sparse]),
        "dense": ("0,1", [*shape, "--attention-backend", "flashinfer"]),
    }
    found = {}
    with started(lines, report, logs) as servers:
        for name, server in servers.items():
            found[name] = step_ms(server, args.context, args.batch, args.repeats)
            report.note(**{name: found[name]})
    if found.keys() != lines.keys():
        return False
    ratio = found["dense"]["ms_per_token"] / found["sparse"]["ms_per_token"]
    report.note(times_faster=round(ratio, 3))
    return True


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument(
        "--parts", nargs="+", choices=("answers", "speed"), default=["answers", "speed"]
    )
    parser.add_argument(
        "--answering", nargs="+", choices=ANSWERING, default=["sparcas"], metavar="METHOD",
        help="methods whose answers are compared",
    )  # fmt: skip
    parser.add_argument(
        "--kv-heads", type=int, help="heads of the answering model; fewer than ranks: replicated"
    )
    parser.add_argument("--method", default="kascade_sketch", help="the method that is timed")
    parser.add_argument("--context", type=int, default=120_000)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--logs", type=Path, help="folder of the servers' logs; a new one by default"
    )
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp(prefix="tensor-parallel-"))
    logs.mkdir(parents=True, exist_ok=True)
    report = Report(args.out, commit=args.commit, method=args.method)
    done = []
    if "answers" in args.parts:
        model = with_kv_heads(args.kv_heads, logs / "model") if args.kv_heads else MODEL
        done.append(answers(args.answering, model, report, logs))
    if "speed" in args.parts:
        done.append(speed(args, report, logs))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
