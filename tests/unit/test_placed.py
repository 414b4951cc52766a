# SPDX-License-Identifier: Apache-2.0
"""Where KV lies in host memory: keys, flags and versions that are refused by name."""

import json
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.utils import common

from sglang_sparse import compat, placed
from sglang_sparse.config import ConfigError, Geometry, resolve_with_source
from sglang_sparse.placed import check_first_page, check_memory, check_placed
from sglang_sparse.request_options import parse

SHAPE = Geometry(
    name="four layers", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64,
)  # fmt: skip
HOST = {"kind": "host", "device_bytes": 1 << 30, "host_bytes": 4 << 30}
CONFIG: dict[str, Any] = {"layers": {"kind": "every"}, "placement": HOST}


def resolve(**changes: Any) -> Any:
    return resolve_with_source("page_minmax", json.dumps(CONFIG | changes), SHAPE)


def test_kv_lies_on_the_device_unless_asked_otherwise():
    plain = resolve_with_source("page_minmax", json.dumps({"layers": {"kind": "every"}}), SHAPE)
    device = resolve(placement={"kind": "device"})
    assert not plain.config.placement.on_host
    assert plain.config.placement.room == (0, 0)
    assert device.config == plain.config
    assert device.hash == plain.hash != resolve().hash
    assert resolve().config.placement.room == (1 << 30, 4 << 30)
    assert resolve(placement={"kind": "host", "host_bytes": 9}).config.placement.room == (0, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": {"kind": "host"}}, "host_bytes"),
        ({"placement": HOST | {"device_bytes": 0}}, "device_bytes"),
        ({"placement": {"kind": "disk"}}, "placement"),
        ({"layers": {"kind": "first_dense", "n": 1}}, "layer 0 attends to every token"),
        ({"score": {"kind": "key_sketch"}}, "selects single tokens"),
        (
            {"heads": {"kind": "streaming", "sink": 64, "local": 128, "streaming": [[0]] * 4}},
            "has windows",
        ),
        (
            {
                "heads": {
                    "kind": "streaming", "sink": 64, "local": 128, "streaming": [[0], [1]] * 2
                },
                "retention": {"kind": "streaming_window"},
                "min_sparse_tokens": 64,
            },
            "retention.kind streaming_window holds less",
        ),
        (
            {"prefill": {"kind": "block_bounds", "fraction": 0.5, "min_tokens": 256}},
            "prefill.kind block_bounds does not go with placement.kind host",
        ),
    ],
)  # fmt: skip
def test_configs_that_frames_cannot_serve_are_refused(changes, message):
    resolve()
    with pytest.raises(ConfigError, match=message):
        resolve(**changes)


def test_a_share_of_the_mass_is_served_from_pages_and_not_from_tokens():
    changes = json.dumps(CONFIG)
    assert resolve_with_source("psa", changes, SHAPE).config.budget.kind == "mass"
    with pytest.raises(ConfigError, match="selects single tokens"):
        resolve_with_source("psa_sketch", changes, SHAPE)


def test_a_request_for_dense_is_refused_and_a_budget_is_not():
    config = resolve().config
    assert parse({"sparse": {"budget": 512}}, config).budget is not None
    with pytest.raises(ConfigError, match=r"custom_params\.sparse\.mode dense: .*host memory"):
        parse({"sparse": {"mode": "dense"}}, config)


DEFAULTS = {"tp_size": 1, "kv_cache_dtype": "auto", "prefill_max_requests": None}


def flags(**changes: Any) -> Namespace:
    return Namespace(**(DEFAULTS | changes))


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that it was tested on, whatever is installed."""
    monkeypatch.setattr(compat, "version", lambda name: "0.5.17")
    compat.current.cache_clear()
    yield
    compat.current.cache_clear()


@pytest.mark.parametrize("number", ["0.5.23", "0.5.20"])
def test_other_versions_are_refused_by_name(monkeypatch, number):
    monkeypatch.setattr(compat, "version", lambda name: number)
    compat.current.cache_clear()
    try:
        check_placed(flags(), resolve(placement={"kind": "device"}))
        with pytest.raises(ConfigError, match=f"not tested on sglang {number}; allowed: sglang 0"):
            check_placed(flags(), resolve())
    finally:
        compat.current.cache_clear()


@pytest.mark.usefixtures("tested")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", 2),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("speculative_algorithm", "NGRAM"),
        ("enable_hierarchical_cache", True),
        ("enable_memory_saver", True),
        ("prefill_max_requests", 0),
        ("prefill_max_requests", -1),
    ],
)
def test_flags_that_frames_do_not_follow_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')} {value}: .*; allowed: "):
        check_placed(flags(**{field: value}), resolve())


@pytest.mark.usefixtures("tested")
def test_prompts_run_one_at_a_time_unless_asked_otherwise_and_without_the_probe(monkeypatch):
    args = flags()
    check_placed(args, resolve(placement={"kind": "device"}))
    assert args.prefill_max_requests is None
    check_placed(args, resolve())
    assert args.prefill_max_requests == 1
    several = flags(prefill_max_requests=3)
    check_placed(several, resolve())
    assert several.prefill_max_requests == 3
    monkeypatch.setenv("SGLANG_SPARSE_PROBE", "1")
    with pytest.raises(ConfigError, match="SGLANG_SPARSE_PROBE 1"):
        check_placed(args, resolve())


@pytest.mark.parametrize(
    ("device", "room", "refused"),
    [
        ("cpu", (60, 40), "device_bytes=60: .*below 60, which are there without a model"),
        ("cpu", (59, 40), None),
        ("cuda", (None, 101), "host_bytes=101: .*up to 100, the free memory"),
        ("cuda", (500, 100), "device_bytes=500: .*below 500, which are there"),
        ("cuda", (499, 100), None),
    ],
)
def test_memory_that_is_not_there_without_a_model_is_refused_before_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch, device: str, room: tuple[Any, int], refused: str | None
) -> None:
    monkeypatch.setattr(placed, "free_host_bytes", lambda: 100)
    cards = {"cuda": 1000 / 2**20}
    monkeypatch.setattr(common, "get_device_memory_capacity", cards.__getitem__)
    placement = {"kind": "host", "device_bytes": room[0], "host_bytes": room[1]}
    config = resolve(placement=placement).config
    args = Namespace(device=device, mem_fraction_static=0.5)
    check_memory(Namespace(), resolve(placement={"kind": "device"}).config)
    with pytest.raises(ConfigError, match=rf"placement\.{refused}") if refused else nullcontext():
        check_memory(args, config)


# Keys and values of four layers and four KV heads of 64 numbers.
@pytest.mark.parametrize(("cache", "cell"), [("auto", 4 * 2048), ("bf16", 2 * 2048)])
def test_host_memory_that_holds_no_page_is_known_from_the_model(cache: str, cell: int) -> None:
    model = SimpleNamespace(
        dtype=torch.float32, head_dim=64, num_hidden_layers=4, get_num_kv_heads=lambda ranks: 4
    )
    least = 2 * resolve().config.page_size * cell
    args = Namespace(kv_cache_dtype=cache)
    check_first_page(args, model, resolve(placement=HOST | {"host_bytes": least}).config)
    with pytest.raises(ConfigError, match=f"host_bytes={least - 1}: .*at least {least};"):
        check_first_page(args, model, resolve(placement=HOST | {"host_bytes": least - 1}).config)
