# SPDX-License-Identifier: Apache-2.0
"""The axis models, and the rules between their keys."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sglang_sparse.choices.role import Role
from sglang_sparse.config import (
    Anchors,
    EveryLayer,
    Exact,
    FirstDense,
    FractionBudget,
    Geometry,
    KeySketch,
    MassBudget,
    PageMean,
    PageMinMax,
    Reuse,
    SparseConfig,
    TokenBudget,
    preset_hash,
)
from sglang_sparse.config.schema import key_sets

GEOMETRY = Geometry(
    name="small", num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=64
)


def config_of(**changes: Any) -> SparseConfig:
    content: dict[str, Any] = {
        "layers": FirstDense(n=2),
        "score": KeySketch(),
        "budget": TokenBudget(tokens=2048),
    }
    return SparseConfig.model_validate(content | changes)


def test_a_config_is_immutable_and_hashable() -> None:
    config = config_of()
    with pytest.raises(ValidationError):
        config.budget = TokenBudget(tokens=1)
    assert hash(config) == hash(config_of())


def test_values_are_never_converted_from_another_type() -> None:
    with pytest.raises(ValidationError):
        TokenBudget.model_validate({"kind": "tokens", "tokens": "2048"})
    with pytest.raises(ValidationError):
        TokenBudget.model_validate({"kind": "tokens", "tokens": True})


def test_first_dense_layers_are_the_ones_that_do_not_select() -> None:
    assert config_of().selecting_layers(6) == (2, 3, 4, 5)
    assert config_of(layers=EveryLayer()).selecting_layers(3) == (0, 1, 2)


def test_the_first_anchor_is_dense_and_every_reuse_layer_follows_the_last_anchor() -> None:
    layers = Anchors(anchors=(0, 2, 3))
    assert config_of(layers=layers).selecting_layers(6) == (0, 2, 3)
    assert layers.role(0) == Role(selects=True, source=None)
    assert layers.role(1) == Role(selects=False, source=0)
    assert layers.role(3) == Role(selects=True, source=3)
    assert layers.role(5) == Role(selects=False, source=3)


MAPPED = {
    "kind": "anchors",
    "anchors": [0, 2],
    "reuse": [{"layer": i, "heads": [3, 0, 0, i % 4]} for i in (1, 3, 4, 5)],
}


def test_a_reuse_layer_has_the_head_map_of_its_own_entry() -> None:
    config = config_of(layers=MAPPED, model=GEOMETRY)
    assert config.layers.role(3) == Role(selects=False, source=2, heads=(3, 0, 0, 3))
    assert config.layers.role(2).heads is None
    assert hash(config) == hash(config_of(layers=MAPPED, model=GEOMETRY))


@pytest.mark.parametrize(
    ("reuse", "words"),
    [
        (Reuse(layer=5, heads=(0, 1, 2)), "4 numbers from 0 to 3"),
        (Reuse(layer=5, heads=(0, 1, 2, 4)), "4 numbers from 0 to 3"),
        (Reuse(layer=2, heads=(0, 1, 2, 3)), "one map for each layer that is no anchor"),
    ],
)
def test_a_head_map_that_does_not_fit_the_model_is_refused(reuse: Reuse, words: str) -> None:
    layers = MAPPED | {"reuse": [*MAPPED["reuse"][:3], reuse.model_dump()]}
    with pytest.raises(ValidationError, match=f"allowed: {words}.*calibrate kascade"):
        config_of(layers=layers, model=GEOMETRY)


def test_pooling_over_all_heads_makes_one_list() -> None:
    assert (Exact().lists(8), Exact(pool="heads").lists(8), KeySketch().lists(8)) == (8, 1, 8)


def test_lists_have_room_for_the_most_that_a_request_may_ask_for() -> None:
    budget = TokenBudget(tokens=512, max_tokens=2048)
    assert (budget.list_size, budget.largest.list_size) == ((512, 0.0), (2048, 0.0))
    assert config_of(budget=budget).capacity_units(100_000) == 2048
    share = FractionBudget(fraction=0.1, floor=512, max_fraction=0.5)
    assert config_of(budget=share).capacity_units(100_000) == 50_000
    assert config_of(budget=share).capacity_units(600) == 512
    assert config_of(budget=share).request_range == (1e-6, 0.5)
    assert config_of(budget=TokenBudget(tokens=512)).request_range == (81, 512)
    with pytest.raises(ValidationError, match=r"budget\.max_fraction 0\.05 is below"):
        FractionBudget(fraction=0.1, floor=512, max_fraction=0.05)
    mass = MassBudget(epsilon=0.9, max_epsilon=0.95, cap=1024)
    assert config_of(budget=mass).request_range == (1e-6, 0.95)
    assert config_of(budget=mass).capacity_units(100_000) == 1024
    with pytest.raises(ValidationError, match=r"budget\.max_epsilon 0\.5 is below"):
        MassBudget(epsilon=0.9, max_epsilon=0.5, cap=1024)


def test_lists_of_a_budget_hold_its_tokens_and_its_share() -> None:
    assert TokenBudget(tokens=512).list_size == (512, 0.0)
    assert FractionBudget(fraction=0.1, floor=256).list_size == (256, 0.1)


@pytest.mark.parametrize(
    ("context", "units"), [(1_000, 1_000), (2_048, 2_048), (4_096, 2_048), (100_000, 10_000)]
)
def test_capacity_follows_the_context_but_never_exceeds_it(context: int, units: int) -> None:
    config = config_of(budget=FractionBudget(fraction=0.1, floor=2_048))
    assert config.capacity_units(context) == units


def test_capacity_is_rounded_as_on_the_device() -> None:
    # 0.07 * 10_000 is 700.0000000000001 in floating point.
    config = config_of(budget=FractionBudget(fraction=0.07, floor=81))
    assert config.capacity_units(10_000) == 700


def test_capacity_is_counted_in_pages_for_a_page_score() -> None:
    config = config_of(score=PageMinMax(), budget=TokenBudget(tokens=2_050))
    assert config.unit == 16
    assert config.capacity_units(100_000) == 129


@given(
    score=st.sampled_from([KeySketch(), PageMinMax()]),
    sink=st.integers(0, 200),
    recent=st.integers(0, 200),
    domain=st.integers(1, 2_000),
)
def test_forced_units_bound_what_sinks_and_recent_tokens_touch(
    score: KeySketch | PageMinMax, sink: int, recent: int, domain: int
) -> None:
    config = config_of(score=score, sink_tokens=sink, recent_tokens=recent)
    unit = score.unit
    last = -(-domain // unit)
    forced = {
        index
        for index in range(last)
        if index < -(-sink // unit) or index >= max(0, domain - recent) // unit
    }
    assert len(forced) <= config.forced_units


def test_the_smallest_budget_is_what_is_forced_and_one_unit() -> None:
    # 16 sinks are 1 page; 64 recent tokens touch up to 5 pages of 16; one more makes 7.
    assert config_of(score=PageMinMax(), budget=TokenBudget(tokens=112))
    with pytest.raises(ValidationError, match=r"budget.tokens of at least 112"):
        config_of(score=PageMinMax(), budget=TokenBudget(tokens=111))


def test_a_fraction_budget_is_held_to_the_rule_by_its_floor() -> None:
    with pytest.raises(ValidationError, match=r"budget.floor of at least 81"):
        config_of(budget=FractionBudget(fraction=0.5, floor=80))


def test_a_mass_budget_ranks_up_to_its_cap_and_nothing_by_fraction() -> None:
    budget = MassBudget(epsilon=0.95, cap=8_192)
    assert budget.list_size == (8_192, 0.0)
    config = config_of(score=PageMean(), budget=budget)
    assert config.unit == 32
    assert config.capacity_units(100_000) == 256
    assert config.capacity_units(1_000) == 32


@pytest.mark.parametrize("epsilon", [0.0, -0.5, 1.000001])
def test_a_share_lies_above_nothing_and_at_most_at_all(epsilon: float) -> None:
    with pytest.raises(ValidationError, match="epsilon"):
        MassBudget(epsilon=epsilon, cap=4_096)
    assert MassBudget(epsilon=1.0, cap=4_096)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # 16 sinks are 1 block of 32; 64 recent tokens touch up to 3; one more makes 5.
        ({"cap": 159}, "budget.cap of at least 160"),
        ({"cap": 131_073}, "budget.cap of at most 131072"),
        ({"microbatch": 16}, "budget.microbatch a multiple of 32"),
    ],
)
def test_a_mass_budget_that_cannot_be_ranked_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    assert config_of(score=PageMean(), budget=MassBudget(epsilon=0.9, cap=160))
    budget = MassBudget(**({"epsilon": 0.9, "cap": 4_096} | changes))
    with pytest.raises(ValidationError, match=words):
        config_of(score=PageMean(), budget=budget)


def test_bounds_of_what_is_left_need_pages_scored_at_every_step() -> None:
    budget = MassBudget(epsilon=0.9, cap=2_048, estimator="upper_bound")
    assert config_of(score=PageMinMax(), budget=budget)
    assert config_of(score=PageMean(), budget=budget)
    with pytest.raises(ValidationError, match="needs bounds of pages, score is key_sketch"):
        config_of(score=KeySketch(), budget=budget)
    with pytest.raises(ValidationError, match=r"set cadence.every to 1"):
        config_of(score=PageMean(), budget=budget, cadence={"kind": "steps", "every": 2})
    scored = budget.model_copy(update={"estimator": "scored", "margin": 5.0})
    assert config_of(score=PageMean(), budget=scored)
    with pytest.raises(ValidationError, match="estimator scored needs bounds of pages"):
        config_of(score=KeySketch(), budget=scored)
    with pytest.raises(ValidationError, match=r"set budget.estimator to scored"):
        config_of(score=PageMean(), budget=budget.model_copy(update={"margin": 5.0}))
    smallest = budget.model_copy(update={"estimator": "observed_min"})
    assert config_of(score=KeySketch(), budget=smallest)
    assert config_of(score=PageMean(), budget=smallest, cadence={"kind": "steps", "every": 2})


def test_a_share_of_the_mass_needs_a_list_for_each_kv_head() -> None:
    budget = MassBudget(epsilon=0.9, cap=2_048)
    assert config_of(score=Exact(pool="group"), budget=budget)
    with pytest.raises(ValidationError, match=r"score.pool group with budget mass"):
        config_of(score=Exact(pool="heads"), budget=budget)


def test_a_page_holds_whole_blocks() -> None:
    with pytest.raises(ValidationError, match=r"page_size a multiple of score.logical_page 64"):
        config_of(score=PageMean(logical_page=64), page_size=32)


def test_no_more_channels_than_the_model_has() -> None:
    assert config_of(score=KeySketch(channels=64), model=GEOMETRY)
    with pytest.raises(ValidationError, match=r"allowed: score.channels 1 to 64"):
        config_of(score=KeySketch(channels=65), model=GEOMETRY)


def test_at_least_one_layer_stays_sparse() -> None:
    assert config_of(layers=FirstDense(n=5), model=GEOMETRY)
    with pytest.raises(ValidationError, match=r"allowed: layers.n 1 to 5"):
        config_of(layers=FirstDense(n=6), model=GEOMETRY)


def test_the_hash_ignores_the_description_and_nothing_else() -> None:
    config = config_of(model=GEOMETRY)
    assert preset_hash(config) == preset_hash(config_of(model=GEOMETRY, description="other words"))
    changes: list[dict[str, Any]] = [
        {"layers": EveryLayer()},
        {"score": KeySketch(refresh_every=1)},
        {"budget": TokenBudget(tokens=2_049)},
        {"recent_tokens": 65},
        {"model": None},
    ]
    hashes = {preset_hash(config_of(**({"model": GEOMETRY} | change))) for change in changes}
    assert len(hashes | {preset_hash(config)}) == len(changes) + 1


def test_geometry_is_read_from_a_hugging_face_config() -> None:
    full = {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 2560,
    }
    assert Geometry.from_hf_config(full, name="a").shape == (36, 32, 8, 128)
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    assert Geometry.from_hf_config(plain, name="b").shape == (2, 4, 4, 64)


def test_geometries_match_whatever_their_names() -> None:
    assert GEOMETRY.matches(GEOMETRY.model_copy(update={"name": "other"}))
    assert not GEOMETRY.matches(GEOMETRY.model_copy(update={"head_dim": 128}))


TILES = {"kind": "tile_topk", "fraction": 0.1}


def test_sparse_prefill_takes_a_score_that_scores_tokens_and_refuses_one_of_pages() -> None:
    assert config_of(score=Exact(), prefill=TILES)
    assert config_of(score=KeySketch(), prefill=TILES)
    for score in (PageMinMax(), PageMean()):
        with pytest.raises(ValidationError, match=f"lists single tokens, score {score.kind} "):
            config_of(score=score, prefill=TILES)


@pytest.mark.parametrize("axis", ["layers", "score", "budget", "prefill"])
def test_every_file_of_an_axis_is_one_of_its_choices(axis: str) -> None:
    folder = Path(str(files("sglang_sparse"))) / "choices" / axis
    names = {file.stem for file in folder.glob("[!_]*.py")}
    kinds = {kind for path in key_sets() if path[:1] == (axis,) for kind in path[1:]}
    assert kinds == names
