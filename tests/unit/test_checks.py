# SPDX-License-Identifier: Apache-2.0
"""What SGLang made of the flags is checked again, after it resolved them."""

import argparse
import copy
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_sparse import compat
from sglang_sparse.cli import app
from sglang_sparse.config import (
    ConfigError,
    SparseConfig,
    StepCadence,
    load_preset,
    resolve_with_source,
)
from sglang_sparse.launch import SparseLaunch


@pytest.fixture(scope="module")
def resolved() -> object:
    """The flags of a real ``ServerArgs`` for the reference model, as a good start resolves it."""
    from live_server import base_args
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    return compat.resolved(
        prepare_server_args(
            [*base_args(), "--attention-backend", "sparse", "--sparse-method", "sparcas"]
        )
    )


class Rewritten:
    """Resolved flags, some of which are different; SGLang seals its own."""

    def __init__(self, flags: object, **changes: object) -> None:
        self._flags = flags
        self.__dict__ |= changes

    def __getattr__(self, name: str) -> object:
        return getattr(self._flags, name)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attention_backend", "triton", ["--model-path", "triton"]),
        ("page_size", 128, ["--model-path", "128"]),
        ("enable_dp_attention", True, ["--enable-dp-attention"]),
        ("kv_cache_dtype", "fp8_e5m2", ["--kv-cache-dtype", "fp8_e5m2"]),
        ("kv_cache_dtype", "nvfp4", ["--kv-cache-dtype", "nvfp4", "fp8_e4m3"]),
        ("kv_cache_dtype", "fp4_mx_block16", ["--kv-cache-dtype", "fp4_mx_block16"]),
        ("kv_cache_dtype", "mxfp8", ["--kv-cache-dtype", "mxfp8"]),
        ("quantization_param_path", "scales.json", ["--quantization-param-path", "scales.json"]),
    ],
)
def test_a_setting_that_sglang_rewrote_is_refused(
    resolved: object, field: str, value: object, words: list[str]
) -> None:
    from sglang_sparse.checks import check_resolved

    config = load_preset("reference", "sparcas")
    check_resolved(resolved, config)
    with pytest.raises(ConfigError) as refusal:
        check_resolved(Rewritten(resolved, **{field: value}), config)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(("phase", "backend"), [("prefill", "full"), ("decode", "breakable")])
def test_a_graph_backend_that_plans_cannot_follow_is_refused(
    resolved: argparse.Namespace, phase: str, backend: str
) -> None:
    from sglang_sparse.checks import check_resolved

    graphs = copy.deepcopy(resolved.cuda_graph_config)
    getattr(graphs, phase).backend = backend
    rewritten = Rewritten(resolved, cuda_graph_config=graphs)
    with pytest.raises(ConfigError, match=f"--cuda-graph-backend-{phase} {backend}"):
        check_resolved(rewritten, load_preset("reference", "sparcas"))


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (
            "page_minmax",
            {"layers": {"kind": "every"}, "placement": {"kind": "host", "host_bytes": 9}},
        ),
        (
            "page_minmax",
            {
                "layers": {"kind": "every"},
                "heads": {"kind": "streaming", "sink": 64, "local": 448, "streaming": [[0]] * 6},
                "retention": {"kind": "streaming_window"},
            },
        ),
        ("cascade", {}),
    ],
    ids=["placement", "windows", "states"],
)
def test_what_a_config_goes_without_is_refused_again_as_sglang_resolved_it(
    resolved: object, monkeypatch: pytest.MonkeyPatch, method: str, change: dict[str, Any]
) -> None:
    from sglang_sparse import flags

    model = load_preset("reference", "sparcas").model
    launch = SparseLaunch(resolve_with_source(method, json.dumps(change), model))
    page = launch.config.page_size
    monkeypatch.setattr(compat, "resolved", lambda args: args)
    fine = Rewritten(resolved, page_size=page)
    assert flags.finish(fine, launch) is fine
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype fp8_e4m3: "):
        flags.finish(Rewritten(resolved, page_size=page, kv_cache_dtype="fp8_e4m3"), launch)


def test_a_start_on_a_version_that_is_not_tested_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_sparse import flags

    monkeypatch.setattr(compat, "verify_hooks", lambda: None)
    monkeypatch.setattr(compat, "untested_warning", lambda: "sglang 0.5.20 is not tested")
    prefill_alone = argparse.Namespace(
        attention_backend=None, prefill_attention_backend="sparse", decode_attention_backend=None
    )
    with pytest.raises(ConfigError, match="only one of prefill and decode"):
        flags.prepare(prefill_alone)
    assert "sglang-sparse: sglang 0.5.20 is not tested" in caplog.messages


def test_kept_selections_are_bounded() -> None:
    from sglang_sparse.backend.allocate import MOST_KEPT_BYTES, Heads, kept_bytes, limits_of

    config = load_preset("llama-3.1-8b", "sparcas")
    heads = Heads(query=32, kv=8, dim=128)
    limits = limits_of(config, heads, max_context=131072, max_rows=4096)
    assert kept_bytes(limits, sets=30, request_slots=4097) > MOST_KEPT_BYTES
    assert kept_bytes(limits, sets=30, request_slots=257) < MOST_KEPT_BYTES


def test_lists_that_other_layers_read_take_one_set_and_lists_of_other_steps_one_a_layer() -> None:
    from sglang_sparse.backend.allocate import kept_sets

    every, anchors = load_preset("generic", "sparcas"), load_preset("llama-3.1-8b", "kascade")
    slow = StepCadence(every=4)
    layers = range(32)
    assert kept_sets(every, layers) == 0
    assert kept_sets(anchors, layers) == 1
    assert kept_sets(every.model_copy(update={"cadence": slow}), layers) == 30
    assert kept_sets(anchors.model_copy(update={"cadence": slow}), layers) == 5


def test_exact_scores_count_their_logits_in_a_pass() -> None:
    from sglang_sparse.backend.allocate import Heads, limits_of

    def rows(preset: str) -> int:
        config, heads = load_preset("llama-3.1-8b", preset), Heads(query=32, kv=8, dim=128)
        return limits_of(config, heads, max_context=131072, max_rows=256).rows_a_pass

    assert rows("kascade") == 24
    assert rows("kascade_sketch") == 128


def test_long_contexts_shrink_the_pass_and_not_the_batch() -> None:
    import torch

    from sglang_sparse.backend.allocate import Heads, limits_of
    from sglang_sparse.backend.decode import passes
    from sglang_sparse_kernels.plan import DecodePlan

    config = load_preset("llama-3.1-8b", "sparcas")
    heads = Heads(query=32, kv=8, dim=128)
    limits = limits_of(config, heads, max_context=1 << 20, max_rows=64)
    assert limits.rows_a_pass == 16
    plan = DecodePlan.allocate(40, 4)
    plan.seq_lens.copy_(torch.arange(40))
    runs = list(passes(plan, limits.rows_a_pass))
    assert [rows for rows, _ in runs] == [slice(0, 16), slice(16, 32), slice(32, 40)]
    assert torch.cat([run.seq_lens for _, run in runs]).tolist() == list(range(40))


def mapped(heads: list[int], **changes: object) -> SparseConfig:
    """A config whose second layer takes the lists of ``heads``."""
    content = {
        "layers": {"kind": "anchors", "anchors": [0], "reuse": [{"layer": 1, "heads": heads}]},
        "score": {"kind": "exact"},
        "budget": {"kind": "fraction", "fraction": 0.1, "floor": 128},
    }
    return SparseConfig.model_validate(content | changes)


@pytest.mark.parametrize(("heads", "most_ranks"), [([1, 0, 3, 2], 2), ([0, 1, 2, 3], 8)])
def test_a_head_map_may_not_cross_ranks(heads: list[int], most_ranks: int) -> None:
    from sglang_sparse.checks import check_ranks

    check_ranks(mapped(heads), 2, 4, most_ranks)
    check_ranks(mapped([3, 2, 1, 0]), 2, 4, 1)
    with pytest.raises(ConfigError, match="calibrate kascade --model PATH --tp 2") as refused:
        check_ranks(mapped([3, 2, 1, 0]), 2, 4, 2)
    # The command is whole: what it lacks is the model.
    command = str(refused.value).split("`")[1].replace("PATH", "/nowhere").split()
    assert "error: --model /nowhere: " in CliRunner().invoke(app, command[1:]).output


def test_one_list_for_all_heads_may_not_be_split_over_ranks() -> None:
    from sglang_sparse.checks import check_ranks

    config = mapped([0, 1, 2, 3], score={"kind": "exact", "pool": "heads"})
    check_ranks(config, 2, 4, 1)
    with pytest.raises(ConfigError, match=r"--tp-size 2: .*score.pool=heads"):
        check_ranks(config, 2, 4, 2)


def attention_layer(**changes: Any) -> Any:
    """SGLang's own layer, with attributes set as models set them."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(
        num_heads=4, head_dim=64, scaling=0.125, num_kv_heads=2, layer_id=3, logit_cap=30.0
    )
    for name, value in changes.items():
        assert hasattr(layer, name)
        setattr(layer, name, value)
    return layer


def test_a_layer_whose_logits_a_sparse_row_would_compute_otherwise_is_refused() -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_sparse.checks import check_layer

    check_layer(attention_layer())
    for changes, words in (
        ({"xai_temperature_len": 1024}, "layer 3.*one temperature.*serve it dense"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "layer 3.*decoder_bidirectional"),
        ({"pos_encoding_mode": "ALIBI"}, "layer 3.*ALIBI"),
        ({"logit_capping_method": "sigmoid"}, "layer 3.*sigmoid"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_layer(attention_layer(**changes))


def test_every_layer_of_a_loaded_model_is_checked() -> None:
    import torch

    from sglang_sparse import compat

    layers = [attention_layer(), attention_layer(xai_temperature_len=8)]
    model = torch.nn.Sequential(torch.nn.Sequential(layers[0], torch.nn.Identity()), layers[1])
    assert compat.attention_layers(model) == layers


def test_arguments_that_sparse_rows_would_drop_are_refused() -> None:
    from sglang_sparse.checks import check_keywords

    check_keywords(attention_layer(), {})
    check_keywords(attention_layer(), {"sinks": None})
    with pytest.raises(ConfigError, match=r"layer 3.*passes sinks, slopes: serve it dense"):
        check_keywords(attention_layer(), {"slopes": (0.5, 0.25), "sinks": 1, "k_rope": None})


@pytest.mark.parametrize(
    ("served", "device", "allowed"),
    [
        ("cuda", "cpu", "cuda on this machine"),
        ("cpu", "cuda:1", "cpu on this machine"),
        ("cuda", "hpu", "cuda on this machine"),
        (None, "cuda", "an NVIDIA GPU"),
        (None, "cpu", "SGLANG_USE_CPU_ENGINE"),
    ],
)
def test_devices_that_nothing_here_serves_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    resolved: object,
    served: str | None,
    device: str,
    allowed: str,
) -> None:
    from sglang_sparse import devices
    from sglang_sparse.checks import check_resolved

    monkeypatch.setattr(devices, "served_device", lambda: served)
    rewritten = Rewritten(resolved, device=device)
    with pytest.raises(ConfigError, match=f"--device {device}: .*{allowed}"):
        check_resolved(rewritten, load_preset("reference", "sparcas"))


def test_the_amx_engine_is_no_device_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from machine import HAS_GPU

    from sglang_sparse import devices

    assert devices.served_device() == ("cuda" if HAS_GPU else "cpu")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert devices.served_device() == ("cuda" if HAS_GPU else None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"custom_params": {"sparse": {"budget": 1}}}', "custom_params.sparse would hold"),
        ('{"custom_params": "dense"}', "custom_params is not an object"),
        ('["top_p"]', "not an object"),
        ("{top_p", "not JSON"),
    ],
)
def test_preferences_given_as_text_are_checked_too(value: str, words: str) -> None:
    from sglang_sparse.endpoints import check_preferred

    for fine in (None, "{}", '{"top_p": 0.9, "custom_params": {"thinking_budget": 8}}'):
        check_preferred(fine)
    with pytest.raises(ConfigError, match=f"--preferred-sampling-params.*{words}"):
        check_preferred(value)
