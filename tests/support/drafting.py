# SPDX-License-Identifier: Apache-2.0
"""Servers with draft tokens, and starts of such servers that are refused."""

import json
from importlib.metadata import version
from typing import Any

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
from local import MODEL  # isort: skip  # packages leave its weights out

SPARSE = ["--attention-backend", "sparse", "--sparse-method"]
SPARCAS, PSA = [*SPARSE, "sparcas"], [*SPARSE, "psa"]
# SGLang keeps room for ten million n-grams otherwise, which takes 1.6 GiB.
CHAIN = [
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-ngram-capacity", "1000000"),
]
CHAINS = [*CHAIN, "--speculative-num-draft-tokens", "4"]
# The model drafts for itself. It sees its own tokens one place off, so some drafts are rejected.
DRAFT_MODEL = [
    *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(MODEL)),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
]
# Folders that `drafters.py` writes.
EAGLE = [
    *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "{MODELS}/eagle"),
    *DRAFT_MODEL[4:],
]
EAGLE3 = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "{MODELS}/eagle3"),
    *DRAFT_MODEL[4:],
]
# SGLang compiles its n-gram corpus, whose sources once lacked an include that GCC 12 needs.
COMPILER = {"CXX": "c++ -include cstddef"} if version("sglang") == "0.5.17" else {}
SMALL_MODEL = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "small"]

Servers = dict[str, tuple[list[str], dict[str, str]]]


def drafting_servers(choosy: dict[str, Any], kept: dict[str, Any]) -> Servers:
    """Arguments and environment; budgets are ``choosy``, states are ``kept`` over steps."""
    return {
        # Chains of draft tokens; a cadence and a refresh that verification does not wait for.
        "page_minmax-chains": (
            [
                *SPARSE,
                "page_minmax",
                *("--sparse-config", json.dumps(choosy | {"min_sparse_tokens": 512})),
                *CHAINS,
                *("--enable-metrics", "--disable-cuda-graph"),
            ],
            COMPILER | {"SGLANG_SPARSE_PROBE": "1", "SGLANG_SPARSE_VERIFY": "1"},
        ),
        "sparcas-chains": (
            [
                *SPARSE,
                "sparcas",
                *("--sparse-config", json.dumps(choosy | kept)),
                *CHAINS,
                *("--chunked-prefill-size", "1024", "--max-total-tokens", "8192"),
            ],
            COMPILER | {"SGLANG_SPARSE_VERIFY": "1"},
        ),
        "sparcas-drafted": (
            [
                *SPARSE,
                "sparcas",
                *("--sparse-config", json.dumps(choosy | {"page_size": 32})),
                *DRAFT_MODEL,
                *("--chunked-prefill-size", "1024"),
            ],
            {"SGLANG_SPARSE_VERIFY": "1"},
        ),
        # The tree of these two holds pairs of tokens.
        "sparcas-eagle": (
            [
                *SPARSE,
                "sparcas",
                *("--sparse-config", json.dumps(choosy | {"page_size": 32})),
                *EAGLE,
                *("--chunked-prefill-size", "1024"),
            ],
            {"SGLANG_SPARSE_VERIFY": "1"},
        ),
        "page_minmax-eagle3": (
            [*SPARSE, "page_minmax", "--sparse-config", json.dumps(choosy), *EAGLE3],
            {"SGLANG_SPARSE_VERIFY": "1"},
        ),
    }


# Arguments, and words of the line that ends the start. A flag is refused before the algorithm.
DRAFT_FLAG_REFUSALS: dict[str, tuple[list[str], list[str]]] = {
    "draft tokens from a tree of a draft model": (
        [*SPARCAS, *SMALL_MODEL, "--speculative-eagle-topk", "4"],
        ["--speculative-eagle-topk", "4", "planes do not follow"],
    ),
    "drafts of several layers": (
        [*SPARCAS, *EAGLE, "--enable-multi-layer-eagle"],
        ["--enable-multi-layer-eagle", "several layers in turn", "unset"],
    ),
    "a draft model with a window": (
        [*SPARCAS, *EAGLE3, "--speculative-draft-window-size", "1024"],
        ["--speculative-draft-window-size 1024", "a draft model with a window", "unset"],
    ),
    "drafts that are accepted by their probabilities": (
        [*SPARCAS, *EAGLE, "--speculative-use-rejection-sampling"],
        ["--speculative-use-rejection-sampling", "other rules of acceptance", "unset"],
    ),
}
DRAFTING_REFUSALS: dict[str, tuple[list[str], list[str]]] = {
    "draft tokens from a tree of n-grams": (
        [*SPARCAS, "--speculative-algorithm", "NGRAM"],
        ["--speculative-ngram-max-bfs-breadth 10", "allowed: 1", "planes do not follow"],
    ),
    "another kind of speculation": (
        [*SPARCAS, "--speculative-algorithm", "DFLASH"],
        ["--speculative-algorithm DFLASH", "NGRAM or STANDALONE or EAGLE or EAGLE3 or unset"],
    ),
    "layers of the model that draft": (
        [*SPARCAS, "--speculative-algorithm", "NEXTN"],
        ["--speculative-algorithm NEXTN", "EAGLE3 or unset", "layers of the served model"],
    ),
    "drafts of a length that SGLang would choose": (
        [*SPARCAS, "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "small"],
        ["--speculative-eagle-topk unset", "allowed: 1 with --speculative-algorithm EAGLE"],
    ),
    "a draft model that nobody names": (
        [*SPARCAS, "--speculative-algorithm", "STANDALONE"],
        ["--speculative-draft-model-path unset", "vocabulary"],
    ),
    "a draft model that attends sparsely": (
        [*SPARCAS, *SMALL_MODEL, "--speculative-draft-attention-backend", "sparse"],
        ["--speculative-draft-attention-backend sparse", "draft models attend densely"],
    ),
    "draft tokens under a budget that ends by one query": (
        [*PSA, *CHAIN],
        ["--speculative-algorithm", "budget.kind=mass", "tokens or fraction"],
    ),
}
