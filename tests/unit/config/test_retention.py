# SPDX-License-Identifier: Apache-2.0
"""Configs that bound what a request holds, and what they refuse."""

import json
from typing import Any

import pytest

from sglang_sparse.config import ConfigError, SparseConfig, load_preset, resolve
from sglang_sparse.config.model import preset_hash
from sglang_sparse.request_options import DEFAULT, parse

WHOLE: dict[str, Any] = {
    "layers": {"kind": "none"},
    "score": {"kind": "none"},
    "budget": {"kind": "held"},
    "retention": {"kind": "cascade", "window": 4096, "stride": 1024},
}


def change(**keys: Any) -> str:
    return json.dumps({"retention": keys})


def test_defaults_are_the_papers() -> None:
    retention = SparseConfig.model_validate(WHOLE).retention
    assert retention.model_dump() == {
        "kind": "cascade",
        "window": 4096,
        "sinks": 64,
        "levels": 4,
        "stride": 1024,
        "beta": 0.9999,
        "reduce": "mean",
        "snapshots": 0,
    }
    assert retention.bounded
    assert retention.most_tokens == retention.shape().rows == 64 + 4096 + 1024
    assert retention.average().beta == 0.9999


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"stride": 384}, "retention.stride 384 does not divide retention.window 1024"),
        ({"levels": 3}, "retention.levels 3 does not divide retention.window 1024"),
        (
            {"levels": 16, "window": 16384, "stride": 256},
            "retention.stride 256 is not a multiple of 32768",
        ),
        ({"window": 32, "stride": 32}, "retention.window 32 is below retention.sinks 64"),
        ({"beta": 1.0}, "retention.beta is 1.0"),
        ({"reduce": "median"}, "retention.reduce"),
        ({"window": 0}, "retention.window is 0"),
        ({"snapshots": 4, "sinks": 60}, "retention.snapshots 4 are taken where strides close"),
        (
            {"snapshots": 4, "stride": 32, "levels": 4},
            "retention.stride 32 is no multiple of page_size 64",
        ),
    ],
)
def test_sizes_that_cannot_be_held_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve("cascade", change(**keys), load_preset("reference", "cascade").model)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"layers": {"kind": "every"}}, "layers.kind every does not go with retention.kind casc"),
        ({"score": {"kind": "page_minmax"}}, "score.kind page_minmax does not go with"),
        ({"budget": {"kind": "tokens", "tokens": 512}}, "budget.kind tokens does not go with"),
        ({"retention": {"kind": "all"}}, "layers.kind none does not go with retention.kind all"),
        ({"sink_tokens": 4}, "sink_tokens means nothing under retention.kind cascade"),
        ({"min_sparse_tokens": 4}, "min_sparse_tokens means nothing"),
        ({"cadence": {"every": 2}}, "cadence means nothing"),
        ({"prefill": {"kind": "tile_topk", "fraction": 0.1}}, "prefill means nothing"),
    ],
)
def test_other_axes_must_leave_everything_to_what_is_held(
    keys: dict[str, Any], problem: str
) -> None:
    SparseConfig.model_validate(WHOLE)
    with pytest.raises(ConfigError, match=problem):
        resolve("custom", json.dumps(WHOLE | keys))


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"mode": "dense"}, "custom_params.sparse.mode dense: this server holds at most 2112"),
        ({"budget": 512}, "custom_params.sparse.budget 512: this server holds at most 2112"),
    ],
)
def test_requests_cannot_ask_for_what_is_not_held(asked: dict[str, Any], problem: str) -> None:
    config = load_preset("reference", "cascade")
    with pytest.raises(ConfigError, match=problem):
        parse({"sparse": asked}, config)
    assert parse({"sparse": {"mode": "sparse"}}, config) == DEFAULT
    assert parse({"sparse": {"mode": "dense"}}, load_preset("reference", "psa")).dense


def test_configs_that_hold_everything_keep_their_hash() -> None:
    config = load_preset("reference", "psa")
    assert preset_hash(config) == "2c0f58afce92"
    cascade = load_preset("reference", "cascade")
    wider = resolve("cascade", change(window=2048), cascade.model)
    assert preset_hash(wider) != preset_hash(cascade)
