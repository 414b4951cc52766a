# SPDX-License-Identifier: Apache-2.0
"""Where streaming heads hold windows only: keys, flags and versions that are refused by name."""

import json
from argparse import Namespace
from typing import Any

import pytest

from sglang_sparse import compat
from sglang_sparse.config import ConfigError, Geometry, resolve_with_source
from sglang_sparse.request_options import parse
from sglang_sparse.windowed import check_windowed

SHAPE = Geometry(
    name="four layers", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64,
)  # fmt: skip
HEADS = {"kind": "streaming", "sink": 64, "local": 128, "streaming": [[0, 1], [2, 3]] * 2}
CONFIG: dict[str, Any] = {
    "layers": {"kind": "every"},
    "heads": HEADS,
    "min_sparse_tokens": 128,
    "retention": {"kind": "streaming_window"},
}


@pytest.fixture(autouse=True)
def python_tree_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core that takes rules, whatever SGLang's default is."""
    monkeypatch.setattr(compat, "tree_core", lambda: "python")


def resolve(**changes: Any) -> Any:
    return resolve_with_source("page_minmax", json.dumps(CONFIG | changes), SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": {"kind": "retrieval"}}, "of which no head streams"),
        ({"heads": HEADS | {"streaming": [[0], [2, 3]] * 2}}, "the same number in each layer"),
        ({"heads": HEADS | {"streaming": [[0, 1, 2, 3]] * 4}}, "the same number in each layer"),
        ({"heads": HEADS | {"streaming": [[]] * 4}}, "the same number in each layer"),
        ({"min_sparse_tokens": 193}, "min_sparse_tokens from 1 to 192"),
        ({"layers": {"kind": "first_dense", "n": 1}}, "layers.kind every"),
        (
            {"prefill": {"kind": "block_bounds", "fraction": 0.5, "min_tokens": 256}},
            "prefill.kind block_bounds does not go with",
        ),
        ({"retention": {"kind": "streaming_window", "share": 0.0}}, "share"),
    ],
)
def test_configs_under_which_windows_are_not_enough_are_refused(changes, message):
    resolve()
    with pytest.raises(ConfigError, match=message):
        resolve(**changes)


def test_a_request_for_dense_is_refused_and_a_budget_is_not():
    config = resolve().config
    assert parse({"sparse": {"budget": 512}}, config).budget is not None
    with pytest.raises(ConfigError, match="holds only sinks and windows"):
        parse({"sparse": {"mode": "dense"}}, config)


DEFAULTS = {"tp_size": 1, "kv_cache_dtype": "auto", "disable_overlap_schedule": True}


def flags(**changes: Any) -> Namespace:
    return Namespace(**(DEFAULTS | changes))


@pytest.mark.parametrize("number", [*compat.TESTED_SGLANG, "0.5.20"])
def test_versions_without_a_tested_tree_are_refused_by_name(monkeypatch, number):
    monkeypatch.setattr(compat, "version", lambda name: number)
    compat.current.cache_clear()
    try:
        check_windowed(flags(), resolve(retention={"kind": "all"}))
        if number in compat.TESTED_SGLANG:
            check_windowed(flags(), resolve())
            return
        with pytest.raises(ConfigError, match=f"not tested on sglang {number}; allowed: sglang 0"):
            check_windowed(flags(), resolve())
    finally:
        compat.current.cache_clear()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", 2),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("speculative_algorithm", "NGRAM"),
        ("enable_hierarchical_cache", True),
        ("disable_radix_cache", True),
        ("enable_memory_saver", True),
        ("disable_overlap_schedule", False),
    ],
)
def test_flags_that_windows_do_not_follow_are_refused_by_name(monkeypatch, field, value):
    check_windowed(flags(), resolve())
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        check_windowed(flags(**{field: value}), resolve())


@pytest.mark.parametrize("number", compat.TESTED_SGLANG)
def test_the_default_core_is_left_where_it_takes_no_rules(monkeypatch, number):
    """0.5.23 itself takes its core in Python where components are not its own; 0.5.17 does not."""
    monkeypatch.setattr(compat, "version", lambda name: number)
    monkeypatch.setattr(compat, "tree_core", lambda: "rust")
    compat.current.cache_clear()
    try:
        if number == "0.5.17":
            with pytest.raises(ConfigError, match="takes no rules for sinks; allowed: python;"):
                check_windowed(flags(), resolve())
        else:
            check_windowed(flags(), resolve())
    finally:
        compat.current.cache_clear()


def test_a_tree_core_that_takes_no_rules_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "tree_core", lambda: "go")
    with pytest.raises(ConfigError, match="takes no rules for sinks"):
        check_windowed(flags(), resolve())
