# SPDX-License-Identifier: Apache-2.0
"""Which speculation is refused, before and after SGLang resolves the flags."""

from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_sparse import compat
from sglang_sparse.backend.allocate import Heads
from sglang_sparse.backend.verify import most_queries
from sglang_sparse.checks import ATTENTION_RULES, check_rules
from sglang_sparse.config import ConfigError, SparseConfig, load_preset
from sglang_sparse.speculation.flags import check_speculation
from sglang_sparse_radix.refusals import rules_for

CONFIG = load_preset("reference", "page_minmax")
NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_num_draft_tokens": 4,
}
DRAFT_MODEL: dict[str, Any] = {
    "speculative_algorithm": "STANDALONE",
    "speculative_draft_model_path": "dummy",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
EAGLE: dict[str, Any] = DRAFT_MODEL | {"speculative_algorithm": "EAGLE"}
SERVED = "NGRAM or STANDALONE or EAGLE or EAGLE3 or unset"


def flags(**changes: Any) -> ServerArgs:
    """What SGLang itself would accept as fields; a dummy model is not resolved."""
    args = ServerArgs(model_path="dummy")
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def refused(args: ServerArgs, config: SparseConfig = CONFIG) -> str:
    with pytest.raises(ConfigError) as error:
        check_speculation(args, config)
    return str(error.value)


def test_no_speculation_is_fine_under_any_budget() -> None:
    check_speculation(flags(), load_preset("reference", "psa"))
    check_speculation(flags(speculative_ngram_max_bfs_breadth=8), CONFIG)


@pytest.mark.parametrize("name", ["NGRAM", "ngram"])
def test_chains_of_ngrams_are_served(name: str) -> None:
    check_speculation(flags(**NGRAM | {"speculative_algorithm": name}), CONFIG)


@pytest.mark.parametrize("name", ["STANDALONE", "standalone"])
def test_chains_of_a_draft_model_are_served(name: str) -> None:
    asked = DRAFT_MODEL | {"speculative_algorithm": name}
    check_speculation(flags(**asked), CONFIG)
    # What SGLang sets by itself, if no number is given: chains of three drafts.
    unset = dict.fromkeys(("num_steps", "eagle_topk", "num_draft_tokens"))
    check_speculation(flags(**asked | {f"speculative_{n}": v for n, v in unset.items()}), CONFIG)
    assert most_queries(flags(**asked), Heads(query=8, kv=4, dim=64)) == 4


@pytest.mark.parametrize("name", ["EAGLE", "eagle", "EAGLE3"])
def test_chains_of_eagle_are_served(name: str) -> None:
    asked = EAGLE | {"speculative_algorithm": name}
    check_speculation(flags(**asked), CONFIG)
    assert most_queries(flags(**asked), Heads(query=8, kv=4, dim=64)) == 4


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_eagle_topk": None}, ("--speculative-eagle-topk unset", "allowed: 1 with")),
        ({"speculative_eagle_topk": 2}, ("--speculative-eagle-topk 2", "planes do not follow")),
        ({"speculative_num_steps": None}, ("--speculative-num-steps unset", "a number of drafts")),
        ({"speculative_draft_model_path": None}, ("model-path unset", "was trained for the one")),
    ],
)
def test_eagle_without_a_chain_or_a_draft_model_is_refused(
    name: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    line = refused(flags(**EAGLE | {"speculative_algorithm": name} | changes))
    assert all(word in line for word in words), line


@pytest.mark.parametrize("name", ["STANDALONE", "EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_draft_attention_backend": "sparse"}, ("backend sparse", "a dense backend")),
        ({"speculative_draft_model_path": None}, ("--speculative-draft-model-path unset",)),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("fp8_e4m3 with --speculative-algorithm {name}",)),
    ],
)
def test_what_a_draft_model_may_not_be_is_named(
    name: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    line = refused(flags(**DRAFT_MODEL | {"speculative_algorithm": name} | changes))
    assert all(word.format(name=name) in line for word in words), line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_multi_layer_eagle", True),
        ("speculative_draft_window_size", 1024),
        ("speculative_use_rejection_sampling", True),
        ("speculative_use_block_verification", True),
        ("speculative_draft_kv_cache_dtype", "fp8_e4m3"),
        ("speculative_adaptive", True),
        ("speculative_eagle_topk", 4),
    ],
)
def test_other_ways_to_draft_are_refused_by_their_flag(field: str, value: Any) -> None:
    args = flags(**EAGLE | {field: value})
    with pytest.raises(ConfigError) as error:
        check_rules(args, (*rules_for(args), *ATTENTION_RULES))
    assert f"--{field.replace('_', '-')} {value}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_algorithm": "NEXTN"}, ("NEXTN", SERVED, "layers of the served model")),
        ({"speculative_algorithm": "DFLASH"}, ("DFLASH", SERVED, "not supported with")),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("fp8_e4m3 with --speculative-algorithm", "auto or")),
        ({"enable_hierarchical_cache": True}, ("--enable-hierarchical-cache with", "unset with")),
        ({"speculative_ngram_max_bfs_breadth": 8}, ("max-bfs-breadth 8", "do not follow")),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    line = refused(flags(**NGRAM | changes))
    assert all(word in line for word in words), line


def test_a_budget_that_ends_by_one_query_is_refused() -> None:
    line = refused(flags(**NGRAM), load_preset("reference", "psa"))
    assert "NGRAM with budget.kind=mass" in line


def test_an_untested_version_speculates_in_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_tested", lambda: False)
    assert "allowed: unset" in refused(flags(**NGRAM))


def test_draft_tokens_and_their_query_heads_have_a_bound() -> None:
    heads = Heads(query=32, kv=8, dim=128)
    assert most_queries(flags(), heads) == 1
    assert most_queries(flags(**NGRAM | {"speculative_num_draft_tokens": 16}), heads) == 16
    with pytest.raises(ConfigError, match=r"17: .* allowed: 16 or fewer with 4 query heads"):
        most_queries(flags(**NGRAM | {"speculative_num_draft_tokens": 17}), heads)
