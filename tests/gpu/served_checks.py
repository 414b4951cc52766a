# SPDX-License-Identifier: Apache-2.0
"""What servers of the reference model answer: a full budget as dense, a batch as its rows alone.

Greedy answers of a GPU are compared up to ties. Logits are bf16: below 32 neighbouring values lie
1/8 apart, and two kernels may round each of two logits by one such step. Answers may therefore part
where dense puts the two tokens within `TIE` of each other, and nowhere else. Where they are the
same, their log-probabilities differ by about as much as dense differs from itself when it answers
in a batch.

With a budget below the context, rounding may also change which of two tokens with nearly equal
scores is attended to. `SELECTED` leaves room for that, and none for a row that sees the keys, the
budget or the selection of another one.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client import call
from drafting import CHAINS, DRAFT_MODEL, EAGLE, EAGLE3
from local import METHODS, SPARSE, has_gpu

TOKENS = 24
LENGTHS = (1003, 1751, 2503, 3251, 3989)
SHORT = 40  # tokens of a row that runs dense beside sparse ones
TIE = 2 / 8
NOISE_FACTOR = 3.0
TOP = 64

# A request may ask for the whole context.
WHOLE: dict[str, tuple[dict[str, Any], float]] = {
    "sparcas": ({"tokens": 256, "max_tokens": 32768}, 32768),
    "page_minmax": ({"tokens": 256, "max_tokens": 32768}, 32768),
    "kascade": ({"max_fraction": 1.0}, 1.0),
    "kascade_sketch": ({"max_fraction": 1.0}, 1.0),
    # The estimator by which a share of one is the whole context.
    "psa": (
        {"max_epsilon": 1.0, "cap": 16384, "estimator": "observed_min", "margin": 0},
        1.0,
    ),
    "psa_sketch": ({"max_epsilon": 1.0, "cap": 4096}, 1.0),  # the most that it can rank
    "lserve": ({"tokens": 256, "max_tokens": 32768}, 32768),
}
# What else a method takes to attend to everything: windows of the whole context.
FURTHER: dict[str, dict[str, Any]] = {"lserve": {"heads": {"local": 32768}}}
# Sparse prompts that attend to everything, by method.
PROMPTS: dict[str, dict[str, Any]] = {
    "kascade_sketch": {"kind": "tile_topk", "fraction": 1.0, "min_tokens": 256},
    "lserve": {"kind": "block_bounds", "fraction": 1.0, "min_tokens": 256},
}
DRAFTS = int(CHAINS[-1])
# N-grams; a model that drafts for itself, and sees its own tokens one place off, so that most
# drafts are accepted; and models that `drafters.py` makes: one drafts nearly as the served model,
# one repeats tokens.
WITH_DRAFTS, WITH_A_DRAFT_MODEL = " with drafts", " with a draft model"
WITH_EAGLE, WITH_EAGLE3 = " with EAGLE", " with EAGLE3"
DRAFTED = (WITH_DRAFTS, WITH_A_DRAFT_MODEL, WITH_EAGLE, WITH_EAGLE3)
WITH_HOST_KV = " with KV in host memory"
WITH_REUSE, RESIDENT = " with reuse" + WITH_HOST_KV, " with KV on the device"
# Frames for what a step of eight requests touches, and not for the blocks of all prompts.
_OF_A_NUMBER = 2 if has_gpu() else 4
HOST_KV = {
    "kind": "host",
    "device_bytes": (136 << 20) * _OF_A_NUMBER,
    "host_bytes": (256 << 20) * _OF_A_NUMBER,
}
HOST_KV_FLAGS = ["--context-length", "4608", "--max-total-tokens", "65536"]
LEAST_ACCEPTED = 2.0  # tokens of a verification, on average
WITH_SPARSE_PROMPTS = " with sparse prompts"


def configurations() -> dict[str, list[str]]:
    """Flags of every server of the checks, by its name."""
    # Of SGLang's dense backends the one that sparse servers have inside.
    backend = ["--attention-backend", "flashinfer"] if has_gpu() else []
    found = {"dense": [*backend, "--page-size", "64"]}
    for method in METHODS:
        config: dict[str, Any] = {"min_sparse_tokens": 64, "budget": WHOLE[method][0]}
        config |= FURTHER.get(method, {})
        found[method] = [*SPARSE[:2], "--sparse-method", method]
        found[method] += ["--sparse-config", json.dumps(config)]
    return found | dict(prompting(found, "kascade_sketch"))


def prompting(found: dict[str, list[str]], *methods: str) -> Iterator[tuple[str, list[str]]]:
    """The servers of some methods, with sparse prompts."""
    for method in methods:
        config = json.loads(found[method][-1]) | {"prefill": PROMPTS[method]}
        flags = [*found[method][:-1], json.dumps(config), "--chunked-prefill-size", "2048"]
        yield method + WITH_SPARSE_PROMPTS, flags


def prompting_configurations() -> dict[str, list[str]]:
    """Servers whose prompts select blocks, beside dense."""
    found = configurations()
    return {"dense": found["dense"], **dict(prompting(found, "lserve"))}


def drafting_configurations(models: Path = Path("drafters")) -> dict[str, list[str]]:
    """Servers that draft chains, by n-grams or a model, beside dense without speculation.

    Args:
        models: folder of the draft models `eagle` and `eagle3`.
    """
    found = configurations()
    drafting = {
        name + how: [*found[name], *(flag.replace("{MODELS}", str(models)) for flag in flags)]
        for how, flags, names in (
            (WITH_DRAFTS, CHAINS, ("page_minmax", "kascade")),
            (WITH_A_DRAFT_MODEL, DRAFT_MODEL, ("page_minmax", "sparcas")),
            (WITH_EAGLE, EAGLE, ("sparcas",)),
            (WITH_EAGLE3, EAGLE3, ("page_minmax",)),
        )
        for name in names
    }
    return {"dense": found["dense"], **drafting}


def placed_configurations() -> dict[str, list[str]]:
    """Servers with all KV in host memory, beside dense and twins with it on the device."""
    found = configurations()
    placed = {"dense": found["dense"]}
    for method in ("page_minmax", "psa"):
        config = json.loads(found[method][-1]) | {"layers": {"kind": "every"}}
        for where, more in ((WITH_HOST_KV, {"placement": HOST_KV}), (RESIDENT, {})):
            text = json.dumps(config | more)
            placed[method + where] = [*found[method][:-1], text, *HOST_KV_FLAGS]
    # Layers that reuse a selection are fetched for ahead.
    flags = placed["page_minmax" + WITH_HOST_KV]
    at = flags.index("--sparse-config") + 1
    config = json.loads(flags[at])
    config |= {"layers": {"kind": "anchors", "anchors": [0, 2, 4], "first": "selection"}}
    placed["page_minmax" + WITH_REUSE] = [*flags[:at], json.dumps(config), *flags[at + 1 :]]
    return placed


@dataclass(frozen=True)
class Tolerance:
    """What answers may differ by, in nats.

    Attributes:
        tie: between the two tokens where they part.
        mean: of the log-probabilities on average, if that is more than `NOISE_FACTOR` times noise.
    """

    tie: float
    mean: float


EQUAL = Tolerance(tie=TIE, mean=0.01)
SELECTED = Tolerance(tie=4 * TIE, mean=0.05)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, the log-probability of each, and those of the most likely tokens there.

    ``verifications`` counts the steps that verified drafts.
    """

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]
    verifications: int = 0


@dataclass
class Outcome:
    """What was compared, and what was wrong."""

    checked: int = 0
    failures: list[str] = field(default_factory=list)
    ties: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def check(self, holds: bool, what: str) -> None:
        """Count one check, and keep what failed."""
        self.checked += 1
        if not holds:
            self.failures.append(what)


def answers(
    url: str, prompts: list[list[int]], budget: float | None = None, tokens: int = TOKENS
) -> list[Answer]:
    """Greedy answers to token prompts, sent as one batch."""
    return [answer_of(reply) for reply in replies(url, prompts, budget, tokens)]


def replies(
    url: str, prompts: list[list[int]], budget: float | None = None, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """The same as the server sends them."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if budget is not None:
        sampling["custom_params"] = {"sparse": {"budget": budget}}
    body = {"input_ids": prompts, "sampling_params": sampling}
    body |= {"return_logprob": True, "top_logprobs_num": TOP}
    found: list[dict[str, Any]] = call(url, "/generate", body, timeout=600)
    return found


def answer_of(reply: dict[str, Any]) -> Answer:
    """A reply with log-probabilities and the most likely tokens."""
    meta = reply["meta_info"]
    chosen = meta["output_token_logprobs"]
    top = [{token: p for p, token, _ in row} for row in meta["output_top_logprobs"]]
    said, logprobs = [t for _, t, _ in chosen], [p for p, _, _ in chosen]
    return Answer(said, logprobs, top, meta.get("spec_verify_ct", 0))


def flush(url: str) -> None:
    """Empty the prefix cache; SGLang refuses until the last request is put away."""
    for _ in range(40):
        try:
            call(url, "/flush_cache", {})
            return
        except RuntimeError:
            time.sleep(0.5)
    call(url, "/flush_cache", {})


def alone(url: str, prompts: list[list[int]], budget: float | None = None) -> list[Answer]:
    """Answers to prompts, each asked by itself, on a cache that was empty at first."""
    flush(url)
    return [answers(url, [prompt], budget)[0] for prompt in prompts]


def arriving(url: str, prompts: list[list[int]], budget: float | None = None) -> list[Answer]:
    """Answers to prompts that arrive one after the other, while earlier ones are decoded."""
    flush(url)

    def ask(number: int) -> Answer:
        time.sleep(0.02 * number)
        return answers(url, [prompts[number]], budget, TOKENS)[0]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, range(len(prompts))))


def parting(want: Answer, got: Answer) -> tuple[int, float]:
    """Where two answers part, and by how much `want` prefers its own token there.

    Returns:
        The number of tokens that are the same from the first on, and the difference of the two
        log-probabilities: 0 where the answers are the same, infinite if the other token is not
        among the most likely ones.
    """
    for at, (one, other) in enumerate(zip(want.tokens, got.tokens, strict=True)):
        if one != other:
            return at, want.logprobs[at] - want.top[at].get(other, -math.inf)
    return len(want.tokens), 0.0


def changes(want: Answer, got: Answer) -> list[float]:
    """Differences of the log-probabilities, up to where the answers part."""
    same, _ = parting(want, got)
    pairs = zip(want.logprobs[:same], got.logprobs[:same], strict=True)
    return [abs(one - other) for one, other in pairs]


def compare(
    outcome: Outcome,
    what: str,
    want: Sequence[Answer],
    got: Sequence[Answer],
    noise: float,
    tolerance: Tolerance = EQUAL,
) -> None:
    """Check that answers are the same up to ties, and their log-probabilities up to noise.

    Args:
        outcome: is added to.
        what: for the failures.
        want: answers to compare with.
        got: as many.
        noise: mean difference of dense's log-probabilities, alone and in a batch.
        tolerance: see the module.
    """
    differences = []
    for number, (one, other) in enumerate(zip(want, got, strict=True)):
        same, gap = parting(one, other)
        outcome.ties += same < len(one.tokens) and gap <= tolerance.tie
        outcome.check(
            gap <= tolerance.tie,
            f"{what}: prompt {number} parts at token {same}, which is {gap:.3f} less likely",
        )
        differences += changes(one, other)
    mean = statistics.fmean(differences) if differences else math.inf
    most = max(NOISE_FACTOR * noise, tolerance.mean)
    outcome.check(
        mean <= most, f"{what}: log-probabilities differ by {mean:.4f} on average, over {most:.4f}"
    )
    outcome.facts[what] = {"tokens": len(differences), "mean_difference": mean}


def sparse_state(url: str) -> dict[str, Any]:
    """The `sparse` block of `/server_info`."""
    state: dict[str, Any] = call(url, "/server_info")["internal_states"][0]["sparse"]
    return state


def check_dense(outcome: Outcome, url: str, prompts: list[list[int]]) -> tuple[list[Answer], float]:
    """Dense's answers, each alone, and how much they change in a batch."""
    want, together = alone(url, prompts), arriving(url, prompts)
    found = [change for one, other in zip(want, together, strict=True)
             for change in changes(one, other)]  # fmt: skip
    noise = statistics.fmean(found) if found else 0.0
    outcome.facts["dense in a batch"] = {"tokens": len(found), "mean_difference": noise}
    return want, noise


def check_twins(
    outcome: Outcome, method: str, urls: dict[str, str], prompts: list[list[int]], noise: float
) -> None:
    """Compare KV in host memory with KV on the device at the servers' own budget."""
    pair = urls[method + RESIDENT], urls[method + WITH_HOST_KV]
    before = sparse_state(pair[1])["frames"]["loads"]
    want, got = (alone(url, prompts) for url in pair)
    compare(outcome, f"{method}{WITH_HOST_KV}, own budget", want, got, noise, SELECTED)
    loads = sparse_state(pair[1])["frames"]["loads"] - before
    outcome.check(loads > 0, f"{method}: nothing was loaded at its own budget")


def check_method(
    outcome: Outcome,
    name: str,
    url: str,
    prompts: list[list[int]],
    dense: tuple[list[Answer], float],
    graphs: bool,
) -> None:
    """A full budget against dense, and batches against their rows alone, on one server.

    Args:
        outcome: is added to.
        name: of `configurations`.
        url: of its server.
        prompts: token ids.
        dense: from :func:`check_dense`.
        graphs: whether decode graphs and the overlap scheduler must be on.
    """
    want, noise = dense
    budget = WHOLE[name.split()[0]][1]
    before = sparse_state(url)["decode_steps"]["sparse"]
    # Sparse prompts read their own chunk as fp8 KV holds it; dense ones before it is rounded.
    sparse_prompts = name.endswith(WITH_SPARSE_PROMPTS)
    rounded = sparse_prompts and sparse_state(url)["kv_cache_dtype"] == "fp8_e4m3"
    near = SELECTED if rounded else EQUAL
    each = alone(url, prompts, budget)
    compare(outcome, f"{name}, full budget", want, each, noise, near)
    # The equality means nothing unless these steps went through selection.
    state, drafted = sparse_state(url), name.endswith(DRAFTED)
    steps, least = state["decode_steps"]["sparse"] - before, len(prompts) * (TOKENS - 1)
    least = -(-least // DRAFTS) if drafted else least
    outcome.check(steps >= least, f"{name}: {steps} sparse decode steps, expected {least}")
    together = arriving(url, prompts, budget)
    compare(outcome, f"{name}, full budget in batches", want, together, noise, near)
    # Every third prompt, and one that is short enough to run dense in the same batch. What drafts
    # attend to follows from the token that they are behind, so from what was drafted before.
    some = [*prompts[::3], prompts[0][:SHORT]]
    if not drafted:
        singly = alone(url, some)
        flush(url)
        batches = {"one batch": answers(url, some), "arriving": arriving(url, some)}
        for how, got in batches.items():
            compare(outcome, f"{name}, {how} against alone", singly, got, noise, SELECTED)
    info = call(url, "/server_info")
    captured, overlap = state["graphs"]["decode"], not info.get("disable_overlap_schedule")
    outcome.facts[name] = {
        "decode_graphs": captured,
        "overlap": overlap,
        "kv_cache_dtype": state["kv_cache_dtype"],
    }
    if name.endswith(WITH_HOST_KV):
        outcome.facts[name]["frames"] = frames = state["frames"]
        outcome.check(frames["loads"] > 0, f"{name}: nothing was loaded")
        outcome.check(frames["unserved"] == 0, f"{name}: {frames['unserved']} blocks had no frame")
    if drafted:
        # The first token is the prefill's.
        decoded, verified = sum(len(a.tokens) - 1 for a in each), sum(a.verifications for a in each)
        outcome.facts[name]["accepted"] = accepted = decoded / max(1, verified)
        # Answers are right whatever is drafted; a draft model that attends wrongly shows here.
        fewest = LEAST_ACCEPTED if name.endswith(WITH_A_DRAFT_MODEL) else 1.0
        outcome.check(accepted > fewest, f"{name}: {accepted:.2f} tokens a verification")
    if graphs:
        outcome.check(captured == "captured", f"{name}: decode graphs are {captured}")
        outcome.check(overlap, f"{name}: the overlap scheduler is off")
