# SPDX-License-Identifier: Apache-2.0
"""What SGLang made of the flags is checked again, after it resolved them."""

from __future__ import annotations

import argparse
import copy

import pytest

from sglang_sparse.config import ConfigError, load_preset


@pytest.fixture(scope="module")
def resolved() -> object:
    """A real ``ServerArgs`` for the reference model, as a good start resolves it."""
    from live_server import base_args
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(
        [*base_args(), "--attention-backend", "sparse", "--sparse-method", "sparcas"]
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attention_backend", "triton", ["--model-path", "triton"]),
        ("page_size", 128, ["--model-path", "128"]),
        ("enable_dp_attention", True, ["--enable-dp-attention"]),
        ("kv_cache_dtype", "fp8_e4m3", ["--kv-cache-dtype", "fp8_e4m3"]),
    ],
)
def test_a_setting_that_sglang_rewrote_is_refused(
    resolved: object, field: str, value: object, words: list[str]
) -> None:
    from sglang_sparse.checks import check_resolved

    config = load_preset("reference", "sparcas")
    check_resolved(resolved, config)
    rewritten = copy.copy(resolved)
    object.__setattr__(rewritten, field, value)  # SGLang seals what it resolved
    with pytest.raises(ConfigError) as refusal:
        check_resolved(rewritten, config)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(("phase", "backend"), [("prefill", "full"), ("decode", "breakable")])
def test_a_graph_backend_that_plans_cannot_follow_is_refused(
    resolved: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, phase: str, backend: str
) -> None:
    from sglang_sparse.checks import check_resolved

    monkeypatch.setattr(getattr(resolved.cuda_graph_config, phase), "backend", backend)
    with pytest.raises(ConfigError, match=f"--cuda-graph-backend-{phase} {backend}"):
        check_resolved(resolved, load_preset("reference", "sparcas"))


def test_kept_selections_are_bounded() -> None:
    from sglang_sparse.backend.selection import MOST_KEPT_BYTES, Limits, kept_bytes

    config = load_preset("llama-3.1-8b", "sparcas")
    limits = Limits.of(config, max_context=131072, kv_heads=8, max_rows=4096)
    assert kept_bytes(limits, layers=30, request_slots=4097, kv_heads=8) > MOST_KEPT_BYTES
    assert kept_bytes(limits, layers=30, request_slots=257, kv_heads=8) < MOST_KEPT_BYTES


def test_long_contexts_shrink_the_pass_and_not_the_batch() -> None:
    import torch

    from sglang_sparse.backend.selection import Limits, passes
    from sglang_sparse_kernels.plan import DecodePlan

    config = load_preset("llama-3.1-8b", "sparcas")
    limits = Limits.of(config, max_context=1 << 20, kv_heads=8, max_rows=64)
    assert limits.rows_a_pass == 16
    plan = DecodePlan.allocate(40, 4)
    plan.seq_lens.copy_(torch.arange(40))
    runs = passes(plan, limits.rows_a_pass)
    assert [rows for rows, _ in runs] == [slice(0, 16), slice(16, 32), slice(32, 40)]
    assert torch.cat([run.seq_lens for _, run in runs]).tolist() == list(range(40))
