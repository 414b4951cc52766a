# SPDX-License-Identifier: Apache-2.0
"""What `--sparse-method` and `--sparse-config` mean together, and every way they can be wrong."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sparse.config import (
    Anchors,
    ConfigError,
    FractionBudget,
    Geometry,
    KeySketch,
    PageMinMax,
    SparseConfig,
    TokenBudget,
    available_methods,
    configs_dir,
    deep_merge,
    list_presets,
    load_preset,
    presets,
    resolve,
    resolve_with_source,
)

LLAMA = Geometry(
    name="served", num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128
)
UNKNOWN = Geometry(
    name="served", num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=2, head_dim=64
)
LLAMA_ONLY = json.dumps({"model": LLAMA.model_dump()}).encode()
WHOLE: dict[str, Any] = {
    "layers": {"kind": "every"},
    "score": {"kind": "page_minmax"},
    "budget": {"kind": "tokens", "tokens": 1024},
}


def test_every_shipped_preset_is_valid_and_is_what_its_file_says() -> None:
    assert {ref.model for ref in list_presets()} == {
        "generic",
        "llama-3.1-8b",
        "qwen3-8b",
        "reference",
    }
    for ref in list_presets():
        config = load_preset(ref.model, ref.name)
        assert config.model_dump(mode="json", exclude_unset=True) == json.loads(
            ref.path.read_text()
        )
        assert (config.model is None) == (ref.model == "generic")
        if config.model is not None:
            assert config.model.name == ref.model


def test_every_shipped_preset_is_what_its_method_means_on_its_model() -> None:
    for ref in list_presets():
        geometry = load_preset(ref.model, ref.name).model or UNKNOWN
        assert resolve_with_source(ref.name, None, geometry).source == str(ref)


def test_the_reference_presets_fit_the_reference_model() -> None:
    content = json.loads((configs_dir() / "reference" / "model" / "config.json").read_text())
    geometry = Geometry.from_hf_config(content, name="reference")
    named = [ref for ref in list_presets() if ref.model == "reference"]
    assert {"sparcas", "kascade", "psa", "cascade"} <= {ref.name for ref in named}
    for ref in named:
        assert resolve_with_source(ref.name, None, geometry).source == f"reference/{ref.name}"


def test_a_method_takes_the_preset_of_the_served_geometry() -> None:
    resolved = resolve_with_source("sparcas", None, LLAMA)
    assert resolved.source == "llama-3.1-8b/sparcas"
    assert resolved.method == "sparcas"
    assert len(resolved.hash) == 12


def test_a_method_takes_the_generic_preset_for_an_unknown_geometry() -> None:
    assert resolve_with_source("page_minmax", None, UNKNOWN).source == "generic/page_minmax"
    assert resolve_with_source("page_minmax", None).source == "generic/page_minmax"


def test_inline_json_changes_only_the_keys_it_names() -> None:
    base = resolve("sparcas", None, LLAMA)
    changed = resolve("sparcas", '{"budget": {"kind": "tokens", "tokens": 4096}}', LLAMA)
    assert changed.budget == TokenBudget(tokens=4096)
    assert changed.model_dump(exclude={"budget"}) == base.model_dump(exclude={"budget"})


def test_inline_json_may_leave_the_kind_out() -> None:
    changed = resolve("sparcas", '{"score": {"channels": 32}}', LLAMA)
    assert changed.score == KeySketch(channels=32)


def test_another_kind_replaces_the_whole_axis() -> None:
    text = '{"budget": {"kind": "fraction", "fraction": 0.1, "floor": 128}}'
    assert resolve("sparcas", text, LLAMA).budget == FractionBudget(fraction=0.1, floor=128)
    text = '{"score": {"kind": "page_minmax"}}'
    assert resolve("sparcas", text, LLAMA).score == PageMinMax()


def test_a_file_is_merged_like_inline_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"sink_tokens": 32}')
    resolved = resolve_with_source("sparcas", str(path), LLAMA)
    assert resolved.config.sink_tokens == 32
    assert resolved.source == f"llama-3.1-8b/sparcas + {path}"


@pytest.mark.parametrize("method", ["custom", None])
def test_without_a_preset_the_config_stands_alone(method: str | None) -> None:
    resolved = resolve_with_source(method, json.dumps(WHOLE), LLAMA)
    assert resolved.config == SparseConfig.model_validate(WHOLE)
    assert (resolved.method, resolved.source) == ("custom", "inline JSON")


def test_a_preset_name_alone_is_enough() -> None:
    resolved = resolve_with_source(None, "page_minmax", LLAMA)
    assert (resolved.method, resolved.source) == ("page_minmax", "llama-3.1-8b/page_minmax")


def test_a_preset_can_be_named_with_its_model() -> None:
    assert resolve_with_source("sparcas", "generic/sparcas", LLAMA).source == "generic/sparcas"
    assert resolve_with_source("custom", "generic/sparcas", LLAMA).method == "custom"


def test_a_preset_wins_over_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sparcas").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_with_source("sparcas", "sparcas", LLAMA).source == "llama-3.1-8b/sparcas"


def test_null_takes_the_geometry_off_a_preset() -> None:
    assert resolve("sparcas", '{"model": null}', LLAMA).model is None


# (method, config, what the line must say) for the llama geometry
BAD: list[tuple[str | None, str | None, list[str]]] = [
    (
        None,
        None,
        [
            "--sparse-method: it is not set",
            "allowed: cascade|kascade|kascade_sketch|lserve|lserve_paper|page_minmax|psa|"
            "psa_sketch|sparcas|custom",
        ],
    ),
    ("kaskade", None, ["--sparse-method kaskade: there is no such method", "sparcas|custom"]),
    ("custom", None, ["--sparse-method custom", "custom together with --sparse-config"]),
    ("sparcas", "nope", ["--sparse-config nope", "neither a preset", "llama-3.1-8b/sparcas"]),
    ("sparcas", "", ["--sparse-config", "neither a preset"]),
    ("sparcas", "nope.json", ["cannot read nope.json: No such file"]),
    ("sparcas", "/", ["--sparse-config /", "neither a preset"]),
    ("sparcas", "page_minmax", ["not one of --sparse-method sparcas", "drop --sparse-method"]),
    ("sparcas", "reference/sparcas", ["it is for reference (", "not for served (32 layers"]),
    ("sparcas", "[1]", ["holds a JSON list, not an object"]),
    ("sparcas", "{", ["not valid JSON", "line 1 column 2"]),
    ("sparcas", '{"a": 1, "a": 2}', ["key 'a' is given twice"]),
    ("sparcas", '{"budget": {"tokens": NaN}}', ["NaN is not a JSON number"]),
    ("sparcas", '{"a":' * 5000, ["not valid JSON"]),
    ("sparcas", '{"bugdet": 1}', ["bugdet is not a key", "layers|heads|score|budget"]),
    (
        "sparcas",
        '{"budget": {"fraction": 0.1}}',
        ["budget.fraction is not a key of kind tokens", "kind tokens kind|tokens"],
    ),
    (
        "sparcas",
        '{"budget": {"kind": "part"}}',
        ["budget.kind is 'part'", "fraction|held|mass|tokens"],
    ),
    ("sparcas", '{"budget": {"tokens": 0}}', ["budget.tokens is 0", "greater than or equal to 1"]),
    ("sparcas", '{"budget": {"tokens": "9"}}', ["budget.tokens is '9'", "a valid integer"]),
    ("sparcas", '{"budget": 2048}', ["budget is 2048", "budget an object with a kind"]),
    ("sparcas", '{"budget": {"tokens": 99999999999}}', ["less than or equal to 16777216"]),
    ("sparcas", '{"budget": {"tokens": 80}}', ["cannot hold sink_tokens 16", "at least 81"]),
    ("sparcas", '{"budget": {"kind": "fraction"}}', ["budget.fraction is missing"]),
    ("sparcas", '{"heads": {"kind": "mixed"}}', ["heads.kind is 'mixed'", "retrieval|streaming"]),
    ("sparcas", '{"heads": {"kind": "streaming"}}', ["streaming without heads", "heads.file"]),
    ("sparcas", '{"retention": {"kind": "some"}}', ["retention.kind is 'some'", "cascade|all"]),
    ("sparcas", '{"prefill": {"tile": 128}}', ["prefill.tile is not a key of kind"]),
    ("sparcas", '{"cadence": {"every": 0}}', ["cadence.every is 0"]),
    ("sparcas", '{"page_size": 48}', ["page_size is 48", "page_size 16|32|64"]),
    ("sparcas", '{"inner": "fa3"}', ["inner is 'fa3'", "auto|flashinfer|triton|torch_native"]),
    ("sparcas", '{"schema_version": 2}', ["schema_version is 2", "schema_version 1"]),
    ("sparcas", '{"score": {"channels": 129}}', ["score.channels 129", "1 to 128"]),
    ("sparcas", '{"layers": {"n": 32}}', ["layers.n 32", "1 to 31"]),
    ("sparcas", '{"model": {"head_dim": 64}}', ["it is for llama-3.1-8b", "KV heads of 64"]),
    (
        "custom",
        "{}",
        ["layers is missing, score is missing", "layers with kind anchors|every|first_dense"],
    ),
    (
        "custom",
        '{"budget": {"tokens": 9}}',
        ["budget.kind is missing", "fraction|held|mass|tokens"],
    ),
    ("kascade", '{"layers": {"anchors": [1, 2]}}', ["layers.anchors [1, 2]", "ascending"]),
    ("kascade", '{"layers": {"anchors": [0, 4, 4]}}', ["layers.anchors [0, 4, 4]", "ascending"]),
    ("kascade", '{"layers": {"anchors": [0, 32]}}', ["[0, 32] are not layers", "from 0 to 31"]),
    ("kascade", '{"layers": {"anchors": ["0"]}}', ["layers.anchors.0 is '0'", "valid integer"]),
    ("kascade", '{"layers": {"reuse": "mapped"}}', ["layers.reuse is 'mapped'", "identity"]),
    (
        "kascade",
        '{"layers": {"reuse": [{"layer": 1, "heads": [0]}]}}',
        ["layers.reuse maps the layers [1]", "run `sglang-sparse calibrate kascade"],
    ),
    ("kascade", '{"score": {"pool": "all"}}', ["score.pool is 'all'", "score.pool group|heads"]),
    (
        "page_minmax",
        '{"score": {"logical_page": 8}}',
        ["logical_page is 8", "logical_page 16|32|64"],
    ),
    (
        "page_minmax",
        '{"score": {"logical_page": 32}, "page_size": 16}',
        ["score.logical_page 32 does not divide page_size 16", "raise page_size"],
    ),
]


@pytest.mark.parametrize(("method", "config", "parts"), BAD)
def test_a_wrong_setting_is_told_in_one_line(
    method: str | None, config: str | None, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(method, config, LLAMA)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("--sparse-")
    assert "; allowed: " in line
    assert "Value error" not in line
    for part in parts:
        assert part in line


def test_geometry_rules_hold_for_a_preset_without_a_geometry() -> None:
    with pytest.raises(
        ConfigError, match=r"score.channels 65 exceeds the head dimension of served"
    ):
        resolve("sparcas", '{"score": {"channels": 65}}', UNKNOWN)


def test_a_long_value_is_shortened_in_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("sparcas", json.dumps({"description": "x" * 9999, "nope": 1}), LLAMA)
    assert len(str(caught.value)) < 600


@pytest.fixture
def own_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped presets that a test may damage."""
    copy = tmp_path / "configs"
    shutil.copytree(configs_dir(), copy, ignore=shutil.ignore_patterns("model"))
    monkeypatch.setattr(presets, "configs_dir", lambda: copy)
    return copy


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"{}", "does not say which model it is for"),
        (b'{"model": {"name": "x"}}', "does not say which model it is for"),
        (LLAMA_ONLY, "layers is missing"),
    ],
)
def test_a_damaged_preset_names_the_flag_and_the_fault(
    own_configs: Path, content: bytes, part: str
) -> None:
    (own_configs / "llama-3.1-8b" / "sparcas.json").write_bytes(content)
    for flags in (("sparcas", None), ("custom", "sparcas"), ("sparcas", '{"sink_tokens": 8}')):
        with pytest.raises(ConfigError) as caught:
            resolve(*flags, LLAMA)
        line = str(caught.value)
        assert "\n" not in line
        assert line.startswith(
            "--sparse-config sparcas" if flags[0] == "custom" else "--sparse-method"
        )
        assert "llama-3.1-8b/sparcas.json" in line
        assert "reinstall sglang-sparse" in line
        assert part in line


def test_a_method_is_available_once_a_preset_of_it_is_there(own_configs: Path) -> None:
    before = set(available_methods())
    shutil.copy(own_configs / "qwen3-8b" / "sparcas.json", own_configs / "qwen3-8b" / "mine.json")
    assert set(available_methods()) == before | {"mine"}
    with pytest.raises(
        ConfigError, match="--sparse-method mine: it has no preset for served"
    ) as no:
        resolve("mine", None, LLAMA)
    assert "use --sparse-method custom with a whole config" in str(no.value)
    for path in own_configs.glob("*/sparcas.json"):
        path.unlink()
    with pytest.raises(ConfigError, match="there is no such method"):
        resolve("sparcas", None, LLAMA)


@pytest.mark.parametrize("method", ["kascade", "kascade_sketch"])
@pytest.mark.parametrize("config", [None, '{"min_sparse_tokens": 64}'])
def test_anchors_of_another_model_are_refused_with_the_command_that_measures_them(
    method: str, config: str | None
) -> None:
    served = UNKNOWN.model_copy(update={"name": "/models/my model"})
    with pytest.raises(ConfigError) as refused:
        resolve(method, config, served)
    line = str(refused.value)
    assert line.startswith(f"--sparse-method {method}: it has no preset for /models/my model (24 ")
    assert "allowed: a model of the shape of llama-3.1-8b, qwen3-8b, reference, or layers" in line
    command = shlex.split(line.split("`")[1])
    assert command[:5] == ["sglang-sparse", "calibrate", "kascade", "--model", "/models/my model"]
    written = command[command.index("--output") + 1]
    assert line.endswith(f"then use --sparse-config {written}")
    with pytest.raises(ConfigError, match=f"--sparse-config {method}: it has no preset"):
        resolve(None, method, served)
    with pytest.raises(ConfigError, match="made for one model, and no model is given"):
        resolve(method, config)


@pytest.mark.parametrize(
    ("method", "score"), [("kascade", "exact"), ("kascade_sketch", "key_sketch")]
)
def test_anchors_given_by_hand_serve_any_model(method: str, score: str) -> None:
    by_hand = resolve_with_source(method, '{"layers": {"anchors": [0, 5, 9]}}', UNKNOWN)
    config, shipped = by_hand.config, load_preset("llama-3.1-8b", method)
    assert by_hand.source == f"llama-3.1-8b/{method} but for its layers + inline JSON"
    assert config.layers == Anchors(anchors=(0, 5, 9))
    assert (config.model, config.score.kind) == (None, score)
    changed = {"layers", "model"}
    assert config.model_dump(exclude=changed) == shipped.model_dump(exclude=changed)
    with pytest.raises(ConfigError, match=r"\[0, 24\] are not layers of served"):
        resolve(method, '{"layers": {"anchors": [0, 24]}}', UNKNOWN)
    whole = config.model_dump_json()
    assert resolve("custom", whole, UNKNOWN) == config


def test_a_method_without_a_preset_for_the_model_falls_back_to_the_generic_one(
    own_configs: Path,
) -> None:
    (own_configs / "llama-3.1-8b" / "sparcas.json").unlink()
    assert resolve_with_source("sparcas", None, LLAMA).source == "generic/sparcas"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "b"]),
    lambda inner: st.dictionaries(st.sampled_from(["kind", "x", "y"]), inner, max_size=3),
    max_leaves=8,
)
JSON_OBJECTS = st.dictionaries(st.sampled_from(["axis", "other", "flat"]), JSON_VALUES, max_size=3)


@given(base=JSON_OBJECTS, changes=JSON_OBJECTS)
def test_merging_is_idempotent_and_leaves_its_arguments_alone(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    before = json.dumps([base, changes])
    merged = deep_merge(base, changes)
    assert json.dumps([base, changes]) == before
    assert deep_merge(merged, changes) == merged
    assert deep_merge(base, {}) == base
    assert set(merged) == set(base) | set(changes)


@given(changes=JSON_OBJECTS | st.dictionaries(st.sampled_from(["budget", "model"]), JSON_VALUES))
def test_any_json_object_resolves_or_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    try:
        line = str(resolve("sparcas", json.dumps(changes), LLAMA))
    except ConfigError as error:
        line = str(error)
    assert "\n" not in line
