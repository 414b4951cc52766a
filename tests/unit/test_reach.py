# SPDX-License-Identifier: Apache-2.0
"""A configuration whose rows would all be dense is refused, with what to type instead."""

import json
import shlex
from pathlib import Path

import pytest

from sglang_sparse.config import (
    ConfigError,
    Geometry,
    configs_dir,
    list_presets,
    resolve_with_source,
)
from sglang_sparse.reach import check_reach, for_ranks

# What the models were trained on; Qwen3-8B's config.json adds 8K of positions for the answer.
CONTEXTS = {"llama-3.1-8b": 131072, "qwen3-8b": 32768, "reference": 32768, "generic": 32768}
# A generic preset whose first sparse length is longer is for models of longer contexts alone.
LONGER = {"generic/psa_sketch": 131072}
OTHER = Geometry(
    name="other", num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=2, head_dim=64
)


@pytest.mark.parametrize("ref", list_presets(), ids=str)
def test_every_shipped_preset_is_sparse_on_the_models_it_is_shipped_for(ref: object) -> None:
    context = LONGER.get(str(ref), CONTEXTS[str(ref).split("/")[0]])
    check_reach(resolve_with_source(None, str(ref)), context, None)


def test_the_reference_model_has_the_context_that_its_presets_are_held_to() -> None:
    config = json.loads((configs_dir() / "reference" / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == CONTEXTS["reference"]


@pytest.mark.parametrize(
    ("method", "context"), [("sparcas", 8192), ("sparcas", 16384), ("page_minmax", 8192)]
)
def test_a_preset_for_longer_contexts_is_refused_with_what_to_add(
    method: str, context: int
) -> None:
    resolved = resolve_with_source(method, None, OTHER)
    with pytest.raises(ConfigError) as refused:
        check_reach(resolved, context, None)
    line = str(refused.value)
    assert line.startswith(f"--sparse-method {method}: its min_sparse_tokens is ")
    assert f"(context length {context})" in line
    assert f"allowed: min_sparse_tokens from 1 to {context - 3};" in line
    assert "serve dense: drop --attention-backend sparse" in line
    assert follow(line, method).config.min_sparse_tokens == 4096
    check_reach(follow(line, method), context, None)


def follow(line: str, method: str) -> object:
    """What a server resolves once the line's remedy was typed."""
    words = shlex.split(line[line.index("--sparse-config '") :].split(", raise")[0])
    return resolve_with_source(method, words[1], OTHER)


def test_the_longest_row_is_the_last_that_is_decoded() -> None:
    def resolved(tokens: int) -> object:
        return resolve_with_source("sparcas", json.dumps({"min_sparse_tokens": tokens}), OTHER)

    # 1000 tokens of context: 998 of a request, the last of them never fed back.
    check_reach(resolved(997), 1000, None)
    with pytest.raises(ConfigError, match="longest row of this server has 997 tokens"):
        check_reach(resolved(998), 1000, None)
    check_reach(resolved(4096 - 66), 32768, 4096)
    with pytest.raises(ConfigError, match=r"has 4030 tokens \(KV pool of 4096 tokens\)"):
        check_reach(resolved(4096 - 65), 32768, 4096)


def test_the_remedy_keeps_what_the_user_gave(tmp_path: Path) -> None:
    given = {"budget": {"tokens": 512}, "min_sparse_tokens": 9000}
    with pytest.raises(ConfigError) as refused:
        check_reach(resolve_with_source("sparcas", json.dumps(given), OTHER), 8192, None)
    assert str(refused.value).startswith("--sparse-config {")
    followed = follow(str(refused.value), "sparcas")
    assert (followed.config.min_sparse_tokens, followed.config.budget.tokens) == (4096, 512)

    path = tmp_path / "mine.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=f"set min_sparse_tokens to 2048 in {path}"):
        check_reach(resolve_with_source("sparcas", str(path), OTHER), 4096, None)

    with pytest.raises(ConfigError) as refused:
        check_reach(resolve_with_source(None, "generic/psa", OTHER), 8192, None)
    assert "use --sparse-method psa --sparse-config" in str(refused.value)
    assert follow(str(refused.value), "psa").config.min_sparse_tokens == 4096


@pytest.mark.parametrize(("ranks", "share"), [(1, 1), (2, 2), (4, 2), (8, 2)])
def test_a_preset_begins_later_where_a_rank_reads_fewer_heads(ranks: int, share: int) -> None:
    one = resolve_with_source("sparcas", None, OTHER)
    scaled = for_ranks(one, OTHER.num_key_value_heads, ranks)
    assert scaled.config.min_sparse_tokens == share * one.config.min_sparse_tokens
    assert scaled.config.model_dump(exclude={"min_sparse_tokens"}) == one.config.model_dump(
        exclude={"min_sparse_tokens"}
    )
    assert (scaled.hash == one.hash) == (share == 1)
    said = f"generic/sparcas, min_sparse_tokens x 2 for {ranks} ranks"
    assert scaled.source == ("generic/sparcas" if share == 1 else said)


@pytest.mark.parametrize(
    ("method", "config", "scaled"),
    [
        (None, "generic/psa", True),
        ("psa", '{"budget": {"cap": 2048}}', True),
        ("psa", '{"min_sparse_tokens": 5000}', False),
        ("custom", "PATH", False),
        ("cascade", None, False),
    ],
)
def test_only_the_number_of_a_shipped_preset_is_scaled(
    method: str | None, config: str | None, scaled: bool, tmp_path: Path
) -> None:
    if config == "PATH":
        path = tmp_path / "own.json"
        path.write_text((configs_dir() / "generic" / "psa.json").read_text())
        config = str(path)
    one = resolve_with_source(method, config, OTHER)
    found = for_ranks(one, OTHER.num_key_value_heads, 2)
    assert (found != one) == scaled


def test_a_preset_that_no_request_reaches_with_many_ranks_is_refused() -> None:
    one = resolve_with_source(None, "generic/psa_sketch")
    check_reach(one, 131072, None)
    with pytest.raises(ConfigError, match="min_sparse_tokens is 147456 and the longest row"):
        check_reach(for_ranks(one, OTHER.num_key_value_heads, 2), 131072, None)
