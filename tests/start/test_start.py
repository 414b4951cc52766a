# SPDX-License-Identifier: Apache-2.0
"""Starts that must be refused, each with one line, and what the flags look like to a user."""

import json
from importlib.metadata import version
from typing import Any

import pytest
from drafting import DRAFT_FLAG_REFUSALS, DRAFTING_REFUSALS
from live_server import base_args
from placed import PLACED_REFUSALS
from refused_models import MODELS
from start_driver import outcomes_of

from sglang_sparse import compat

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

SPARSE = ["--attention-backend", "sparse", "--sparse-method", "sparcas"]
HOST_TIER = [*SPARSE, "--enable-hierarchical-cache"]
ANCHORS = ["--attention-backend", "sparse", "--sparse-method", "kascade"]
CASCADE = ["--attention-backend", "sparse", "--sparse-method", "cascade"]
PSA = ["--attention-backend", "sparse", "--sparse-method", "psa"]

GEOMETRY = {
    "name": "other",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


HOST_TIER_CASES: dict[str, tuple[list[str], list[str]]] = (
    {
        "a storage backend behind the host's memory": (
            [*HOST_TIER, "--hicache-storage-backend", "file"],
            ["--hicache-storage-backend file", "unset"],
        ),
        "another way to copy KV to the host": (
            [*HOST_TIER, "--hicache-io-backend", "kernel_ascend"],
            ["--hicache-io-backend kernel_ascend", "kernel or direct"],
        ),
        "another layout of KV on the host": (
            [*HOST_TIER, "--hicache-mem-layout", "page_head"],
            ["--hicache-mem-layout page_head", "page_first"],
        ),
    }
    if version("sglang") == "0.5.17"
    else {"KV in host memory": (HOST_TIER, ["--enable-hierarchical-cache True", "sglang 0.5.17"])}
)


def preferring(params: Any) -> list[str]:
    """``--preferred-sampling-params`` of these."""
    return ["--preferred-sampling-params", json.dumps(params)]


def heads_config(**heads: Any) -> list[str]:
    """``--sparse-config`` of streaming heads."""
    return ["--sparse-config", json.dumps({"heads": {"kind": "streaming", **heads}})]


# name -> (extra flags, words that the one line must hold)
REFUSALS: dict[str, tuple[list[str], list[str]]] = {
    "unknown method": (
        ["--attention-backend", "sparse", "--sparse-method", "kaskade"],
        ["--sparse-method", "kaskade", "sparcas"],
    ),
    "no method": (["--attention-backend", "sparse"], ["--sparse-method", "sparcas"]),
    "flags without the backend": (
        ["--attention-backend", "torch_native", "--sparse-method", "sparcas"],
        ["--sparse-method", "sparcas", "--attention-backend sparse"],
    ),
    "unknown key": (
        [*SPARSE, "--sparse-config", '{"bugdet": {"tokens": 64}}'],
        ["--sparse-config", "bugdet", "budget"],
    ),
    "out of range": (
        [*SPARSE, "--sparse-config", '{"budget": {"kind": "tokens", "tokens": 0}}'],
        ["--sparse-config", "budget.tokens"],
    ),
    "budget below what is always kept": (
        [*SPARSE, "--sparse-config", '{"budget": {"kind": "tokens", "tokens": 20}}'],
        ["--sparse-config", "budget.tokens", "at least"],
    ),
    "a share of the mass above one": (
        [*PSA, "--sparse-config", '{"budget": {"epsilon": 1.5}}'],
        ["--sparse-config", "budget.epsilon is 1.5", "less than or equal to 1"],
    ),
    "no share of the mass": (
        [*PSA, "--sparse-config", '{"budget": {"epsilon": 0.0}}'],
        ["--sparse-config", "budget.epsilon is 0.0", "greater than 0"],
    ),
    "blocks that do not divide the page": (
        [*PSA, "--sparse-config", '{"page_size": 16, "score": {"logical_page": 32}}'],
        ["--sparse-config", "score.logical_page 32 does not divide page_size 16"],
    ),
    "a cap under the sink and recent pages": (
        [*PSA, "--sparse-config", '{"budget": {"cap": 64}}'],
        ["--sparse-config", "budget.cap 64 cannot hold", "at least 80"],
    ),
    "rows that never get long enough": (
        [*SPARSE, "--context-length", "514"],
        [
            "--sparse-method sparcas: its min_sparse_tokens is 512",
            "has 511 tokens (context length 514)",
            "allowed: min_sparse_tokens from 1 to 511",
            """add --sparse-config '{"min_sparse_tokens": 257}'""",
        ],
    ),
    "a KV pool that no row gets long enough in": (
        [*SPARSE, "--max-total-tokens", "576"],
        ["--sparse-method sparcas", "has 510 tokens (KV pool of 576 tokens)"],
    ),
    "anchors of another model": (
        ["--model-path", "{TMP}/shallow", *ANCHORS],
        [
            "--sparse-method kascade: it has no preset for {TMP}/shallow (5 layers",
            "`sglang-sparse calibrate kascade --model {TMP}/shallow --output kascade.json ",
        ],
    ),
    "another model's geometry": (
        [*SPARSE, "--sparse-config", json.dumps({"model": GEOMETRY})],
        ["--sparse-config", "4 layers"],
    ),
    "missing preset file": (
        [*SPARSE, "--sparse-config", "no/such/file.json"],
        ["--sparse-config", "no/such/file.json"],
    ),
    "damaged preset file": (
        [*SPARSE, "--sparse-config", "{TMP}/damaged.json"],
        ["--sparse-config", "damaged.json"],
    ),
    "page size that planes cannot use": (
        [*SPARSE, "--sparse-config", '{"page_size": 48}'],
        ["--sparse-config", "page_size", "48"],
    ),
    "another page size by SGLang's flag": (
        [*SPARSE, "--page-size", "128"],
        ["--page-size", "128", "64"],
    ),
    "disaggregation": (
        [*SPARSE, "--disaggregation-mode", "prefill"],
        ["--disaggregation-mode", "prefill", "null"],
    ),
    **HOST_TIER_CASES,
    "mixed chunks": ([*SPARSE, "--enable-mixed-chunk"], ["--enable-mixed-chunk", "unset"]),
    "LoRA": ([*SPARSE, "--enable-lora"], ["--enable-lora", "unset"]),
    "deterministic inference": (
        [*SPARSE, "--enable-deterministic-inference"],
        ["--enable-deterministic-inference", "unset"],
    ),
    "torch.compile": ([*SPARSE, "--enable-torch-compile"], ["--enable-torch-compile", "unset"]),
    "copies of the model": ([*SPARSE, "--dp-size", "2"], ["--dp-size", "2", "1"]),
    "ranks on several hosts": (
        [*SPARSE, "--nnodes", "2", "--dist-init-addr", "127.0.0.1:9"],
        ["--nnodes", "2", "1"],
    ),
    "several tokenizers of another server": (
        [*SPARSE, "--tokenizer-worker-num", "2", "--enable-http2"],
        ["--tokenizer-worker-num 2", "allowed: 1 with --enable-http2"],
    ),
    "gRPC": ([*SPARSE, "--smg-grpc-mode"], ["--smg-grpc-mode", "unset"]),
    "native gRPC": ([*SPARSE, "--grpc-port", "50051"], ["--grpc-port 50051", "unset"]),
    "a sidecar": ([*SPARSE, "--sidecar", "some.module"], ["--sidecar some.module", "unset"]),
    "Ray": ([*SPARSE, "--use-ray"], ["--use-ray", "unset"]),
    "an encoder": ([*SPARSE, "--encoder-only"], ["--encoder-only", "unset"]),
    "pipeline stages": ([*SPARSE, "--pp-size", "2"], ["--pp-size 2", "allowed: 1"]),
    "prefill over ranks": (
        [*SPARSE, "--enable-prefill-cp", "--cp-strategy", "zigzag"],
        ["--enable-prefill-cp", "unset"],
    ),
    "several items": ([*SPARSE, "--enable-mis"], ["--enable-mis", "unset"]),
    "a canary": ([*SPARSE, "--kv-canary", "log"], ["--kv-canary log", "none"]),
    "training on policy": (
        [*SPARSE, "--rl-on-policy-target", "fsdp"],
        ["--rl-on-policy-target fsdp", "unset"],
    ),
    "one memory for all": (
        [*SPARSE, "--enable-unified-memory"],
        ["--enable-unified-memory", "unset"],
    ),
    "another device": ([*SPARSE, "--device", "xpu"], ["--device xpu", "on this machine"]),
    "a preferred budget": (
        [*SPARSE, *preferring({"custom_params": {"sparse": {"budget": 1}}})],
        ["--preferred-sampling-params", "custom_params.sparse", "--sparse-config"],
    ),
    "preferred dense requests": (
        [*SPARSE, *preferring({"custom_params": {"sparse": {"mode": "dense"}}})],
        ["--preferred-sampling-params", "custom_params.sparse", "--sparse-config"],
    ),
    "preferred params that are text": (
        [*SPARSE, *preferring({"custom_params": "dense"})],
        ["--preferred-sampling-params", "custom_params is not an object"],
    ),
    "preferences that are a list": ([*SPARSE, *preferring([1])], ["not an object"]),
    "logits that the position scales": (
        ["--model-path", "{TMP}/tempered", *SPARSE],
        ["tempered", "attn_temperature_len"],
    ),
    "a largest budget below the budget": (
        [*SPARSE, "--sparse-config", '{"budget": {"max_tokens": 128}}'],
        ["--sparse-config", "budget.max_tokens 128", "at least 256"],
    ),
    "LMCache": ([*SPARSE, "--enable-lmcache"], ["--enable-lmcache", "unset"]),
    "data-parallel attention": (
        [*SPARSE, "--enable-dp-attention"],
        ["--enable-dp-attention", "unset"],
    ),
    "a GPU's inner backend on a CPU": (
        [*SPARSE, "--sparse-config", '{"inner": "flashinfer"}'],
        ["--sparse-config", "inner=flashinfer", "torch_native"],
    ),
    "head dimension": (["--model-path", "{TMP}/wide", *SPARSE], ["wide", "head_dim 64 or 128"]),
    "too many query heads": (
        [
            "--model-path",
            "{TMP}/multiquery",
            "--attention-backend",
            "sparse",
            "--sparse-method",
            "page_minmax",
        ],
        ["multiquery", "1 to 16"],
    ),
    "states beside a tree": (
        CASCADE,
        ["--disable-radix-cache unset", "add --disable-radix-cache", "retention.snapshots"],
    ),
    "a stride that does not divide the window": (
        [*CASCADE, "--sparse-config", '{"retention": {"stride": 384}}'],
        ["--sparse-config", "retention.stride 384 does not divide retention.window 1024"],
    ),
    "a window below the sinks": (
        [*CASCADE, "--sparse-config", '{"retention": {"window": 32, "stride": 32}}'],
        ["--sparse-config", "retention.window 32 is below retention.sinks 64", "at least 64"],
    ),
    "a bounded retention of selections": (
        [
            *SPARSE,
            "--sparse-config",
            '{"retention": {"kind": "cascade", "window": 512, "stride": 128}}',
        ],
        ["--sparse-config", "does not go with retention.kind cascade", "layers none"],
    ),
    **PLACED_REFUSALS,
    **DRAFT_FLAG_REFUSALS,
    "another tree": (
        [*SPARSE, "--radix-cache-backend", "flexkv"],
        ["--radix-cache-backend", "flexkv"],
    ),
    "prefill on another backend": (
        [*SPARSE, "--prefill-attention-backend", "torch_native"],
        ["--prefill-attention-backend", "torch_native"],
    ),
    "gates of another model": (
        [*SPARSE, *heads_config(file="{TMP}/gates.tsv")],
        ["--sparse-config", "the heads are of gates.tsv (5 layers, 4 KV heads), not of"],
    ),
    "gates above one": (
        [*SPARSE, *heads_config(file="{TMP}/large.tsv")],
        ["--sparse-config", "large.tsv holds the gate 1.5"],
    ),
    "a window off the page": (
        [*SPARSE, *heads_config(streaming=[[0]] * 6, local=1000)],
        ["--sparse-config", "heads.local 1000 is no multiple of page_size 64", "to 1024"],
    ),
    "more heads than there are": (
        [*SPARSE, *heads_config(streaming=[[0]] * 5 + [[4]])],
        ["--sparse-config", "the heads [4] of layer 5, more than there are", "heads 0 to 3"],
    ),
    "heads that nobody measured": (
        ["--model-path", "{TMP}/shallow", *SPARSE[:-1], "lserve"],
        ["--sparse-method lserve", "run `sglang-sparse calibrate lserve --model {TMP}/shallow "],
    ),
    "quantized KV": (
        [*SPARSE, "--kv-cache-dtype", "fp8_e5m2"],
        ["--kv-cache-dtype", "fp8_e5m2", "fp8_e4m3"],
    ),
    "MLA model": (["--model-path", "{TMP}/mla", *SPARSE], ["--model-path", "mla", "MLA"]),
    "sliding-window model": (
        ["--model-path", "{TMP}/mistral", *SPARSE],
        ["--model-path", "mistral", "sliding-window"],
    ),
}

SNAPSHOTS = [*CASCADE, "--sparse-config", '{"retention": {"snapshots": 2}}']
REFUSALS |= (
    {
        "snapshots without a cache": (
            [*SNAPSHOTS, "--disable-radix-cache"],
            ["--disable-radix-cache set", "drop --disable-radix-cache"],
        ),
    }
    if compat.current().SHARES_STATES
    else {
        "snapshots": (
            SNAPSHOTS,
            ["--sparse-config retention.snapshots=2", "allowed: 0, or sglang 0.5.17"],
        )
    }
)
REFUSALS |= DRAFTING_REFUSALS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """How each command line ended (a status, an exception's name, or "started") and its words."""
    tmp = tmp_path_factory.mktemp("refusals")
    (tmp / "damaged.json").write_text('{"layers": ')
    (tmp / "gates.tsv").write_text("0.5\t0.5\t0.5\t0.5\n" * 5)
    (tmp / "large.tsv").write_text("0.5\t0.5\t0.5\t1.5\n" * 6)
    for name, config in MODELS.items():
        (tmp / name).mkdir()
        (tmp / name / "config.json").write_text(json.dumps(config))
    lines = {name: flags for name, (flags, _) in REFUSALS.items()}
    lines |= {"good": SPARSE, "dense": ["--attention-backend", "torch_native"]}
    by_hand = json.dumps({"layers": {"anchors": [0, 2]}, "prefill": {"kind": "dense"}})
    lines["anchors by hand"] = [
        "--model-path",
        "{TMP}/shallow",
        *ANCHORS,
        "--sparse-config",
        by_hand,
    ]
    lines["just long enough"] = [*SPARSE, "--context-length", "515", "--max-total-tokens", "578"]
    lines |= {"lost hook": SPARSE, "no plugin": ["--attention-backend", "sparse"]}
    lines |= {"gRPC by the environment": SPARSE}
    lines |= {"harmless preferences": [*SPARSE, *preferring({"top_p": 0.9, "custom_params": {}})]}
    request = {
        name: [*base_args(), *(f.replace("{TMP}", str(tmp)) for f in flags)]
        for name, flags in lines.items()
    }
    outcomes = outcomes_of(request)
    return {
        name: [word.replace(str(tmp), "{TMP}") for word in words]
        for name, words in outcomes.items()
    }


@pytest.mark.parametrize("name", REFUSALS)
def test_a_start_that_cannot_be_served_is_refused_in_one_line(
    outcomes: dict[str, list[str]], name: str
) -> None:
    line, _ = outcomes[name]
    assert line.startswith("sglang-sparse: error: ")
    assert "\n" not in line
    assert "allowed: " in line
    for word in REFUSALS[name][1]:
        assert word in line


@pytest.mark.parametrize(
    "name", ["good", "dense", "anchors by hand", "just long enough", "harmless preferences"]
)
def test_good_flags_are_not_refused(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["started", ""]


def test_grpc_that_the_environment_asks_for_is_refused(outcomes: dict[str, list[str]]) -> None:
    line, _ = outcomes["gRPC by the environment"]
    assert line.startswith("sglang-sparse: error: SGLANG_GRPC_PORT 50051: ")
    assert "unset SGLANG_GRPC_PORT" in line


def test_a_hook_that_lost_its_target_stops_the_start(outcomes: dict[str, list[str]]) -> None:
    line, _ = outcomes["lost hook"]
    assert line.startswith("sglang-sparse: error: ")
    assert "_build_mha_kv_pool" in line


def test_without_the_plugin_the_backend_is_unknown(outcomes: dict[str, list[str]]) -> None:
    status, said = outcomes["no plugin"]
    assert status == "2"
    assert "invalid choice: 'sparse'" in said
