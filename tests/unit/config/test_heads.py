# SPDX-License-Identifier: Apache-2.0
"""Heads of two kinds: where they are read from, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_sparse.choices.heads._files import lowest
from sglang_sparse.config import (
    ConfigError,
    Geometry,
    RetrievalHeads,
    SparseConfig,
    load_preset,
    preset_hash,
    resolve,
)

MODEL = Geometry(
    name="small", num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=64
)
SIX = [[0, 3], [], [1]]
GATES = [[0.1, 0.9, 0.8, 0.2], [1.0, 1.0, 0.7, 0.95], [0.6, 0.05, 0.65, 0.3]]


def gates_text(gates: list[list[float]]) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in gates)


def config_with(heads: dict[str, Any], **changes: Any) -> SparseConfig:
    """A config of the model above; ConfigError as a server's start would end."""
    content = {
        "layers": {"kind": "every"},
        "score": {"kind": "page_minmax"},
        "budget": {"kind": "tokens", "tokens": 256},
        "heads": {"kind": "streaming", **heads},
        **changes,
    }
    return resolve("custom", json.dumps(content), MODEL)


def written(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_without_the_axis_every_head_selects() -> None:
    config = resolve("page_minmax", None, None)
    assert config.heads.kind == "retrieval"
    assert config.heads.streams_in(3) == ()
    assert config.heads.window == (0, 0)


def test_heads_are_given_in_the_config_or_in_a_file(tmp_path: Path) -> None:
    inline = config_with({"streaming": SIX})
    assert [inline.heads.streams_in(layer) for layer in range(4)] == [(0, 3), (), (1,), ()]
    assert inline.heads.window == (128, 1024)
    model = MODEL.model_dump()
    file = written(tmp_path, "heads.json", {"streaming": SIX, "model": model, "sink": 64})
    from_file = config_with({"file": file})
    assert from_file.heads.streaming == inline.heads.streaming
    assert from_file.heads.window == (64, 1024)
    assert config_with({"file": file, "sink": 256, "local": 512}).heads.window == (256, 512)


def test_a_config_that_was_read_needs_its_file_no_more(tmp_path: Path) -> None:
    file = written(tmp_path, "heads.json", {"streaming": SIX})
    config = config_with({"file": file})
    Path(file).unlink()
    again = SparseConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert preset_hash(config) == preset_hash(config_with({"streaming": SIX}))
    assert preset_hash(config) != preset_hash(config_with({"streaming": [[0], [], [1]]}))


def test_a_file_lies_beside_the_config_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "gates.tsv", gates_text(GATES))
    content = config_with({"streaming": SIX}).model_dump(mode="json")
    content["heads"] = {"kind": "streaming", "file": "gates.tsv"}
    path = written(tmp_path, "mine.json", content)
    monkeypatch.chdir("/")
    assert resolve(None, path, MODEL).heads.streaming == ((0, 3), (), (0, 1, 2, 3))
    # A file takes the place of heads that a preset lists.
    over = json.dumps({"heads": {"file": str(tmp_path / "gates.tsv"), "sparsity": 0.2}})
    base = written(tmp_path, "base.json", config_with({"streaming": SIX}).model_dump(mode="json"))
    merged = json.loads(Path(base).read_text())
    merged["heads"].update(json.loads(over)["heads"])
    assert resolve("custom", json.dumps(merged), MODEL).heads.streaming == ((0, 3), (), (1,))


def test_gates_are_cut_where_duo_attention_cuts_them() -> None:
    """Below the quantile, interpolated linearly, as numpy's; equal gates in their order."""
    import numpy as np

    drawn = np.random.default_rng(5).random((7, 8))
    for share in (0.1, 0.25, 0.5, 0.75, 0.7):
        below = drawn < np.quantile(drawn, share)
        want = [np.flatnonzero(row).tolist() for row in below]
        assert lowest(drawn.tolist(), share) == want
    assert lowest([[0.5, 0.5], [0.5, 0.5]], 0.5) == [[0, 1], []]
    assert lowest([[1.0, 0.0]], 0.5) == [[1]]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("x.json", "{", ["x.json is not valid JSON"]),
        ("x.json", [1], ["holds a JSON list, not an object"]),
        ("x.json", {"sink": 64}, ["has no key streaming"]),
        (
            "x.json",
            {"streaming": SIX, "heads": 1},
            ["has the key heads", "streaming, the heads of"],
        ),
        ("x.json", {"streaming": "all"}, ["heads.streaming is 'all'"]),
        ("x.json", {"streaming": [[0], [1]]}, ["has 2 layers, unlike small (3 layers"]),
        ("x.json", {"streaming": [[0], [1], [4]]}, ["more than there are in small", "0 to 3"]),
        ("x.json", {"streaming": [[0], [1, 1], []]}, ["heads [1, 1] of layer 1", "once, from 0"]),
        ("x.json", {"streaming": [[0], [-1], []]}, ["heads [-1] of layer 1"]),
        ("x.tsv", "0.5\t0.5\n0.5\n", ["lines of different lengths"]),
        ("x.tsv", "", ["lines of different lengths, or none"]),
        ("x.tsv", "0.5\tyes\n", ["something that is no number"]),
        ("x.tsv", "0.5\t1.5\n", ["holds the gate 1.5", "gates from 0"]),
        ("x.tsv", "0.5\t-0.1\n", ["holds the gate -0.1"]),
        ("x.tsv", "0.5\tnan\n", ["holds the gate nan"]),
        ("x.tsv", "0.5\t0.5\n" * 3, ["are of x.tsv (3 layers, 2 KV heads), not of small"]),
        ("x.tsv", "0.5\t0.5\t0.5\t0.5\n" * 2, ["are of x.tsv (2 layers, 4 KV heads)"]),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    tmp_path: Path, name: str, content: Any, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with({"file": written(tmp_path, name, content)})
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    other = MODEL.model_copy(update={"head_dim": 128, "name": "other"}).model_dump()
    file = written(tmp_path, "heads.json", {"streaming": SIX, "model": other})
    with pytest.raises(ConfigError, match=r"the heads are of other .*, not of small") as caught:
        config_with({"file": file})
    assert "run `sglang-sparse calibrate lserve --model small" in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "parts"),
    [
        ({}, ["streaming without heads", "set heads.file"]),
        ({"file": "missing.json"}, ["missing.json cannot be read: No such file"]),
        ({"streaming": SIX, "sink": 100}, ["heads.sink 100 is no multiple of page_size 64", "128"]),
        ({"streaming": SIX, "local": 1000}, ["heads.local 1000", "raise heads.local to 1024"]),
        ({"streaming": SIX, "local": 0}, ["heads.local is 0"]),
        ({"streaming": SIX, "sparsity": 1.5}, ["heads.sparsity is 1.5"]),
        ({"streaming": SIX, "window": 5}, ["heads.window is not a key of kind streaming"]),
    ],
)
def test_heads_that_cannot_be_served_are_named(heads: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(heads)
    for part in parts:
        assert part in str(caught.value)


def test_a_share_beside_a_list_of_heads_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "heads.json", {"streaming": SIX})
    with pytest.raises(ConfigError, match=r"heads.sparsity 0.25 beside heads.file"):
        config_with({"file": file, "sparsity": 0.25})


MASS = {"kind": "mass", "epsilon": 0.9, "cap": 256}


def test_a_list_that_stops_by_mass_is_not_taken_from_a_head_that_streams() -> None:
    """Layer 1 is an anchor that attends, layer 2 reuses its lists; layer 0 only selects."""
    anchors = {"kind": "anchors", "anchors": [0, 1]}
    crossed = anchors | {"reuse": [{"layer": 2, "heads": [1, 1, 2, 3]}]}
    exact = {"kind": "exact"}

    def built(streaming: list[list[int]], layers: dict[str, Any], budget: dict[str, Any]) -> None:
        config_with({"streaming": streaming}, layers=layers, budget=budget, score=exact)

    for layers, streaming in ((anchors, [[], [1], []]), (crossed, [[], [1], [1]])):
        with pytest.raises(ConfigError, match="layer 2 takes the list of head 1 of layer 1"):
            built(streaming, layers, MASS)
        built(streaming, layers, {"kind": "tokens", "tokens": 256})
    built([[1], [1], [1]], anchors, MASS)
    built([[1], [1], [0, 1]], crossed, MASS)


OTHER = Geometry(
    name="other", num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, head_dim=128
)


def test_a_model_whose_heads_nobody_measured_is_refused_with_what_to_set() -> None:
    for config in (None, '{"budget": {"tokens": 2048}}'):
        with pytest.raises(ConfigError) as caught:
            resolve("lserve", config, OTHER)
        line = str(caught.value)
        assert "it has no preset for other (40 layers" in line
        assert "or heads of the model's own in --sparse-config" in line
        assert "run `sglang-sparse calibrate lserve --model other --output lserve.json" in line
        assert "or set heads.file to a TSV of DuoAttention's gates" in line


def test_heads_of_ones_own_take_the_rest_of_the_preset() -> None:
    heads = {"kind": "streaming", "streaming": [[0, 1, 2, 3]] * 40, "local": 256}
    config = resolve("lserve", json.dumps({"heads": heads}), OTHER)
    llama = resolve("lserve", "llama-3.1-8b/lserve", None)
    own = {"heads", "model"}
    assert config.model_dump(exclude=own) == llama.model_dump(exclude=own)
    assert config.heads.window == (128, 256)
    assert llama.heads.calibration == "published"
    assert sum(map(len, llama.heads.streaming)) == 128
    assert (llama.unit, llama.score.logical_page, llama.cadence.every) == (64, 16, 4)


def test_on_qwen3_8b_every_head_selects_until_its_streaming_heads_are_found() -> None:
    qwen = load_preset("qwen3-8b", "lserve")
    assert qwen.model is not None
    assert qwen.heads == RetrievalHeads()
    assert "nobody found for this model" in qwen.description
    llama = resolve("lserve", "llama-3.1-8b/lserve", None)
    own: Any = {"heads": True, "model": True, "description": True, "prefill": {"min_tokens"}}
    assert qwen.model_dump(exclude=own) == llama.model_dump(exclude=own)
    # Tiles in which all heads select pay later.
    assert qwen.prefill.min_tokens > llama.prefill.min_tokens
    heads = {"kind": "streaming", "streaming": [[0, 1]] * 36}
    found = resolve("lserve", json.dumps({"heads": heads}), qwen.model)
    assert found.heads.window == (128, 1024)


def test_windows_of_prompts_may_be_longer_as_in_the_paper() -> None:
    paper = load_preset("llama-3.1-8b", "lserve_paper")
    assert (paper.heads.window, paper.heads.prompt_window) == ((128, 256), (128, 8192))
    plain = load_preset("llama-3.1-8b", "lserve")
    assert plain.heads.window == plain.heads.prompt_window == (128, 1024)
    assert preset_hash(paper) != preset_hash(plain)
    own = {"heads", "description"}
    assert paper.model_dump(exclude=own) == plain.model_dump(exclude=own)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"prefill": {"kind": "dense"}}, "heads.prompt_local 8192 with prefill.kind dense"),
        ({"heads": {"prompt_local": 1000}}, "heads.prompt_local 1000 is no multiple of page_size"),
    ],
)
def test_windows_of_prompts_without_use_or_off_the_page_are_refused(
    change: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        resolve("lserve_paper", json.dumps(change), load_preset("llama-3.1-8b", "lserve").model)
