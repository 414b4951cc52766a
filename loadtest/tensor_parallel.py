# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on several GPUs beside one GPU, and beside dense attention on the same ones.

    python3 loadtest/tensor_parallel.py --ranks 2 --out tensor-parallel.json --commit HASH

Part `answers`: for each method the reference model with one rank and with several, and whether they
answer as one does. A third server has one rank that computes and adds projections as several do
(`ranks_in_one.py`): what it answers otherwise is the work of rounding alone.

Part `speed`: a Llama-3.1-8B shape with dummy weights, dense and sparse, with as many ranks, and the
time per output token at long separate prompts.

Servers of a part start at once. If one does not answer its first prompt within two minutes, the
stacks of all its threads are printed.
"""

import argparse
import json
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from compare_latency import gpu
from rank_servers import Line, Report, Server, started

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
# A model with fewer KV heads has no preset, and methods without one begin at longer prompts.
SELECTING = {"min_sparse_tokens": 512}
# Head maps that were found for one rank would lead to heads that another rank has.
UNMAPPED = {"layers": {"kind": "anchors", "anchors": [0, 1, 2, 3, 4], "reuse": "identity"}}
ANSWERING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("sparcas", "page_minmax", "psa", "psa_sketch", "lserve"), SELECTING),
    **dict.fromkeys(("kascade", "kascade_sketch"), SELECTING | UNMAPPED),
}
# Budgets a little below and above that of the preset: of tokens, a share of them, or of the mass.
NEARBY: dict[str, tuple[str, tuple[float, ...]]] = {
    "sparcas": ("tokens", (248, 252, 260, 264)),
    "page_minmax": ("tokens", (224, 240, 272, 288)),
    "lserve": ("tokens", (448, 576)),
    **dict.fromkeys(("kascade", "kascade_sketch"), ("fraction", (0.095, 0.098, 0.102, 0.105))),
    "psa": ("epsilon", (0.945, 0.948, 0.952, 0.955)),
    "psa_sketch": ("epsilon", (0.975, 0.978, 0.982, 0.985)),
}
TOKENS = (16, 80)
# Rounding may prefer either of two logits that differ by less: two bf16 steps of logits below 32.
TIE = 0.25
ANSWER_TOKENS = 16
# What each of the ranks, and the only one, have counted alike.
COUNTERS = ("decode_steps", "prefill_batches", "plane_reuse")


def first_difference(one: list[int], two: list[int]) -> int | None:
    """Index of the first token that differs, or that one of the answers lacks; None if equal."""
    pairs = zip_longest(one, two)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


class Prompt(NamedTuple):
    """Token ids, and how many tokens of the answer are compared."""

    ids: list[int]
    tokens: int


def repeating(count: int, length: int, vocab: int) -> list[Prompt]:
    """Random passages that repeat, so that many of their pages score nearly alike."""
    source = random.Random(f"{count}/{length}")
    prompts = []
    for _ in range(count):
        segment = [source.randrange(300, vocab) for _ in range(source.randrange(40, 200))]
        prompts.append(Prompt((segment * (length // len(segment) + 1))[:length], ANSWER_TOKENS))
    return prompts


def prompts_of(path: Path) -> list[Prompt]:
    """Prompts of a JSON file: a list of pairs, as ``tests/gpu/rank_questions.py`` writes them."""
    return [Prompt(ids, tokens) for ids, tokens in json.loads(path.read_text())]


def ask_all(servers: list[Server], prompts: list[Prompt]) -> list[list[dict[str, Any]]]:
    """Greedy answers of each server to each prompt, prompt by prompt."""
    return [
        [server.generate([ids], tokens)[0]["meta_info"] for server in servers]
        for ids, tokens in prompts
    ]


def compare(
    asked: list[list[dict[str, Any]]], prompts: list[Prompt], wider: list[dict[str, Any]]
) -> dict[str, Any]:
    """Answers of several ranks, and of one that adds as they do, beside those of one.

    ``asked``: what one rank, several ranks, and the one that adds alike answer; ``wider``: of
    :func:`wider_gaps`.

    ``ok``: several begin 95 % of their answers as one does, and diverge at near ties, at gaps of
    at most ``TIE``, or where one that adds alike says the same. No answer ends early.
    """
    lengths = [tokens for _, tokens in prompts]
    ranks = differences([(a, b) for a, b, _ in asked], lengths)
    explained = all(gap["as_one_that_adds_alike"] for gap in wider)
    return {
        "prompts": len(prompts),
        "tokens": len(prompts[0].ids),
        **ranks,
        "by_rounding_alone": differences([(a, c) for a, _, c in asked], lengths),
        "beside_one_that_adds_alike": differences([(c, b) for _, b, c in asked], lengths),
        "wider": wider,
        "ok": ranks["same_first_token"] >= 0.95 and explained and not ranks["cut_short"],
    }


def wider_gaps(
    one: Server,
    asked: list[list[dict[str, Any]]],
    prompts: list[Prompt],
    nearby: tuple[float, ...],
) -> list[dict[str, Any]]:
    """Gaps above ``TIE``, and who else says there what several ranks say.

    That is the one that adds alike, and the only rank at some of the budgets ``nearby``: then what
    is selected is near a tie. It serves more requests for that.
    """
    found = []
    for (ids, tokens), (a, b, c) in zip(prompts, asked, strict=True):
        apart, gap = divergence(a, b)
        if gap is not None and gap > TIE:
            want = said(b)[: apart + 1]
            replies = {
                budget: said(one.generate([ids], tokens, budget=budget)[0]["meta_info"])
                for budget in nearby
            }
            same = [budget for budget, reply in replies.items() if reply[: apart + 1] == want]
            alike = said(c)[: apart + 1] == want
            found.append(
                {"gap": gap, "as_one_that_adds_alike": alike, "as_one_rank_at_budgets": same}
            )
    return found


def said(answer: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    return [token for _, token, *_ in answer["output_token_logprobs"]]


def divergence(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, float | None]:
    """Where two answers part, and the gap there; the end and None if they do not.

    A gap is between the two logits that the first server finds likeliest.
    """
    apart = first_difference(said(one), said(other))
    if apart is None or apart >= len(said(one)):
        return len(said(one)), None
    likeliest = [entry[0] for entry in one["output_top_logprobs"][apart]]
    # Logarithms of probabilities, which float32 rounds once more.
    return apart, round(likeliest[0] - likeliest[1], 4)


def differences(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]], lengths: list[int]
) -> dict[str, Any]:
    """How many answers of the second server are those of the first, and gaps where they diverge.

    ``lengths``: of the answers, in tokens.
    """
    tokens = [[said(answer) for answer in pair] for pair in pairs]
    apart = [first_difference(*pair) for pair in tokens]
    gaps = [gap for _, gap in (divergence(*pair) for pair in pairs) if gap is not None]
    return {
        "same_first_token": sum(at != 0 for at in apart) / len(pairs),
        "same_tokens": sum(at is None for at in apart) / len(pairs),
        "gaps_where_they_diverge": sorted(gaps),
        "cut_short": sum(
            any(len(answer) != length for answer in pair)
            for pair, length in zip(tokens, lengths, strict=True)
        ),
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


def with_one_kv_head(copies: int, folder: Path) -> Path:
    """The reference model with its first KV head alone, ``copies`` times; it answers nothing right.

    Ranks replicate one head, and each selects by the query heads that it has. One rank does the
    same if the model has that head as often as there are ranks.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    rows = config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": copies}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    weights = load_file(MODEL / "model.safetensors")
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name][:rows].repeat(copies, 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def blocks(state: dict[str, Any]) -> int | None:
    """Blocks that were attended to, all layers and heads of all ranks; None without progress."""
    progress = state["progress"]
    return progress and sum(layer["blocks"] for layer in progress.values())


def devices_of(ranks: int) -> str:
    """The first GPUs, as CUDA_VISIBLE_DEVICES has them."""
    return ",".join(map(str, range(ranks)))


def answers(args: argparse.Namespace, report: Report, logs: Path) -> bool:
    """Whether several ranks answer as one does, and count as it does, method by method."""
    methods, ranks = args.answering, args.ranks
    one, several = MODEL, MODEL
    if args.replicated:
        one, several = (with_one_kv_head(copies, logs / f"heads-{copies}") for copies in (ranks, 1))
    common = ["--max-total-tokens", "65536"]
    common += ["--max-running-requests", "8", "--mem-fraction-static", "0.5"]
    common += ["--cuda-graph-max-bs-decode", "2", "--attention-backend", "sparse"]
    common += ["--dtype", args.dtype, *shlex.split(args.flags)]
    asking = prompts_of(args.prompts) if args.prompts else repeating(40, 3000, 2000)
    lines: dict[str, Line] = {}
    for number, method in enumerate(methods):
        flags = [*common, "--sparse-method", method]
        unit, budgets = NEARBY[method]
        config = ANSWERING[method] | {"budget": {f"max_{unit}": max(budgets)}}
        flags += ["--sparse-config", json.dumps(config)]
        # Servers of one rank are spread over the GPUs.
        first, second = (str((2 * number + other) % ranks) for other in (0, 1))
        alone = [*flags, "--model-path", str(one)]
        together = [*flags, "--model-path", str(several), "--tp", str(ranks)]
        lines |= {
            f"{method} one": Line(first, alone),
            f"{method} several": Line(devices_of(ranks), together),
            f"{method} alike": Line(second, alone, in_one=ranks),
        }
    found: dict[str, Any] = {}
    with started(lines, report, logs, args.port) as servers:

        def ask(method: str) -> None:
            names = [f"{method} {which}" for which in ("one", "several", "alike")]
            if not servers.keys() >= set(names):
                return
            asked = [servers[name] for name in names]
            replies = ask_all(asked, asking)
            infos = [server.call("/server_info")["internal_states"][0] for server in asked[:2]]
            states = [info["sparse"] for info in infos]
            each = [{c: of[c] for c in COUNTERS} for of in (states[0], *states[1]["ranks"])]
            # Only now, since the only rank counts what it is asked for this, too.
            wider = wider_gaps(asked[0], replies, asking, NEARBY[method][1])
            found[method] = compare(replies, asking, wider) | {
                "counted": each[0],
                "counted_alike": each == each[:1] * (1 + ranks),
                "blocks": [blocks(state) for state in states],
                "ranks": states[1]["ranks"],
            }
            report.note(answers=dict(found))

        with ThreadPoolExecutor(len(methods)) as pool:
            list(pool.map(ask, methods))
    return len(found) == len(methods) and all(
        each["ok"] and each["counted_alike"] for each in found.values()
    )


def speed(args: argparse.Namespace, report: Report, logs: Path) -> bool:
    """Milliseconds per output token of several ranks, sparse beside dense."""
    (logs / "llama").mkdir()
    (logs / "llama" / "config.json").write_text(json.dumps(LLAMA))
    shape = ["--model-path", str(logs / "llama"), "--load-format", "dummy"]
    shape += ["--skip-tokenizer-init", "--max-running-requests", "8", "--tp", str(args.ranks)]
    shape += ["--mem-fraction-static", "0.85"]
    shape += ["--max-total-tokens", str(args.batch * (args.context + 512) + 8192)]
    sparse = ["--attention-backend", "sparse", "--sparse-method", args.method]
    lines = {
        "sparse": Line(devices_of(args.ranks), [*shape, *sparse]),
        "dense": Line(devices_of(args.ranks), [*shape, "--attention-backend", "flashinfer"]),
    }
    found = {}
    with started(lines, report, logs, args.port) as servers:
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
    parser.add_argument("--ranks", type=int, default=2, help="GPUs that a server has")
    parser.add_argument("--port", type=int, default=31100, help="of the first server")
    parser.add_argument(
        "--parts", nargs="+", choices=("answers", "speed"), default=["answers", "speed"]
    )
    parser.add_argument(
        "--answering", nargs="+", choices=ANSWERING, default=["sparcas"], metavar="METHOD",
        help="methods whose answers are compared",
    )  # fmt: skip
    parser.add_argument(
        "--replicated",
        action="store_true",
        help="a model whose one KV head all ranks have",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="of token ids and lengths of answers; random passages that repeat by default",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="auto",
        help="of the servers whose answers are compared; float32, on a CPU, hardly rounds",
    )  # fmt: skip
    parser.add_argument(
        "--flags", default="",
        help="further flags of these servers, as text: fp8 KV, n-grams",
    )  # fmt: skip
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
    report = Report(
        args.out, commit=args.commit, method=args.method, ranks=args.ranks, dtype=args.dtype,
        flags=args.flags, device=gpu("name"),
    )  # fmt: skip
    done = []
    if "answers" in args.parts:
        done.append(answers(args, report, logs))
    if "speed" in args.parts:
        done.append(speed(args, report, logs))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
