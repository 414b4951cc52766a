# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for, and the one line that it is refused with."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sparse.backend.requests import RequestTable
from sglang_sparse.choices.build import Columns
from sglang_sparse.config import (
    ConfigError,
    FirstDense,
    FractionBudget,
    KeySketch,
    MassBudget,
    SparseConfig,
    TokenBudget,
)
from sglang_sparse.request_options import RequestOptions, parse
from sglang_sparse_kernels import DENSE_REQUEST


def config_of(budget: TokenBudget | FractionBudget | MassBudget) -> SparseConfig:
    return SparseConfig(layers=FirstDense(n=1), score=KeySketch(), budget=budget)


TOKENS = config_of(TokenBudget(tokens=512, max_tokens=4096))
SHARE = config_of(FractionBudget(fraction=0.1, floor=128, max_fraction=0.5))


@pytest.mark.parametrize("params", [None, {}, {"thinking_budget": 7}, {"sparse": {}}])
def test_a_request_that_asks_for_nothing_gets_the_servers_budget(params: Any) -> None:
    assert parse(params, TOKENS) == RequestOptions(dense=False, budget=None)


def test_a_request_may_be_dense_or_have_its_own_budget_in_the_presets_unit() -> None:
    assert parse({"sparse": {"mode": "dense"}}, TOKENS) == RequestOptions(dense=True)
    asked = parse({"sparse": {"budget": 1024, "mode": "sparse"}}, TOKENS)
    assert asked.budget == TokenBudget(tokens=1024)
    assert parse({"sparse": {"budget": 0.25}}, SHARE).budget == FractionBudget(
        fraction=0.25, floor=128
    )


def test_the_range_ends_at_what_is_always_kept_and_at_the_servers_limit() -> None:
    least = TOKENS.least_tokens
    for budget in (least, 4096):
        assert parse({"sparse": {"budget": budget}}, TOKENS).budget == TokenBudget(tokens=budget)
    for budget, remedy in ((least - 1, "correct the request"), (4097, "ask for less")):
        with pytest.raises(ConfigError, match=rf"allowed: {least} to 4096 \(tokens\); {remedy}"):
            parse({"sparse": {"budget": budget}}, TOKENS)
    unlimited = config_of(TokenBudget(tokens=512))
    with pytest.raises(ConfigError, match=f"{least} to 512 .*max_tokens"):
        parse({"sparse": {"budget": 513}}, unlimited)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("dense", ["custom_params dense", "an object"]),
        ({"sparse": "dense"}, ["custom_params.sparse dense", "mode sparse or dense"]),
        ({"sparse": None}, ["custom_params.sparse None", "not an object"]),
        ({"sparse": {"mode": "denes"}}, ["sparse.mode denes", "mode sparse or dense"]),
        ({"sparse": {"bugdet": 9}}, ["sparse.bugdet 9", "not a key", "to 4096"]),
        ({"sparse": {"k\n" * 9999: 1}}, ["sparse.k k k", "k... 1: not a key"]),
        ({"sparse": {"budget": "512"}}, ["sparse.budget 512", "wrong type"]),
        ({"sparse": {"budget": True}}, ["sparse.budget True", "wrong type"]),
        ({"sparse": {"budget": [512]}}, ["sparse.budget [512]", "wrong type"]),
        ({"sparse": {"budget": 512.0}}, ["sparse.budget 512.0", "not a whole number"]),
        ({"sparse": {"budget": -1}}, ["sparse.budget -1", "to 4096"]),
        ({"sparse": {"budget": 10**30}}, ["sparse.budget 1000", "to 4096"]),
        ({"sparse": {"budget": math.nan}}, ["sparse.budget nan"]),
        ({"sparse": {"mode": "dense", "budget": 512}}, ["sparse.budget 512", "dense"]),
    ],
)
def test_what_a_request_cannot_have_is_refused_in_one_line(params: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(params, TOKENS)
    line = str(refused.value)
    assert "\n" not in line
    assert "; allowed: " in line
    for word in words:
        assert word in line


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 0.51, 1, math.nan, math.inf])
def test_a_share_stays_inside_the_servers_limit(budget: float) -> None:
    with pytest.raises(ConfigError, match=r"1e-06 to 0\.5 \(fraction\)"):
        parse({"sparse": {"budget": budget}}, SHARE)


def test_a_share_of_the_mass_may_be_asked_for_below_the_servers_limit() -> None:
    mass = MassBudget(epsilon=0.9, cap=4096)
    server = config_of(mass)
    assert parse({"sparse": {"budget": 0.5}}, server).budget == mass.asked(0.5)
    wider = config_of(MassBudget(epsilon=0.9, max_epsilon=1.0, cap=4096))
    assert parse({"sparse": {"budget": 1}}, wider).budget == mass.asked(1.0)
    for budget, remedy in ((0, "correct"), (0.91, "max_epsilon"), (math.nan, "correct")):
        with pytest.raises(ConfigError, match=rf"1e-06 to 0\.9 \(epsilon\); .*{remedy}"):
            parse({"sparse": {"budget": budget}}, server)


def test_a_slots_share_is_that_of_its_last_owner() -> None:
    columns = Columns(4, torch.device("cpu"))
    table = RequestTable(config_of(MassBudget(epsilon=0.75, cap=4096)), columns)
    assert columns["epsilon"].tolist() == [0.75] * 4
    table.admit([request(2, budget=0.5), request(1)], torch.tensor([2, 1]))
    assert columns["epsilon"].tolist() == [0.75, 0.75, 0.5, 0.75]
    assert table.budgets.tolist() == [[4096, 0]] * 4  # all rank as much
    table.admit([request(2)], torch.tensor([2]))
    assert columns["epsilon"].tolist() == [0.75] * 4


def request(slot: int, **sparse: Any) -> Any:
    params = {"sparse": sparse} if sparse else None
    # Its row is named in either of two ways, by SGLang's version.
    return SimpleNamespace(
        req_pool_idx=slot,
        kv=SimpleNamespace(req_pool_idx=slot),
        sampling_params=SimpleNamespace(custom_params=params),
    )


def test_a_slots_options_are_those_of_its_last_owner() -> None:
    table = RequestTable(TOKENS, Columns(6, torch.device("cpu")))
    slots = torch.tensor([4, 1, 2])
    table.admit([request(4, mode="dense"), request(1), request(2, budget=1024)], slots)
    table.start_decoding(slots, torch.tensor([10, 20, 30], dtype=torch.int32))
    assert table.decode_start.tolist() == [0, 20, 30, 0, DENSE_REQUEST, 0]
    assert table.budgets.tolist() == [[512, 0], [512, 0], [1024, 0], *[[512, 0]] * 3]
    table.admit([request(4, budget=4096), request(2)], torch.tensor([4, 2]))
    table.start_decoding(torch.tensor([4, 2]), torch.tensor([7, 8], dtype=torch.int32))
    assert table.decode_start.tolist() == [0, 20, 8, 0, 7, 0]
    assert table.budgets.tolist() == [[512, 0]] * 4 + [[4096, 0], [512, 0]]


def test_only_rows_that_may_select_choose_the_graph() -> None:
    table = RequestTable(TOKENS, Columns(6, torch.device("cpu")))
    lengths = torch.tensor([900, 40, 50])
    reqs = [request(4, mode="dense"), request(1), request(2)]
    table.admit(reqs, torch.tensor([4, 1, 2]))
    table.expect(reqs)
    assert table.longest_sparse(lengths) == 50
    assert lengths.tolist() == [900, 40, 50]
    # A batch that nobody told of, such as a warm-up, has no dense rows.
    assert table.longest_sparse(lengths) == 900
    # Padding rows of a graph follow the requests.
    table.expect(reqs[:1])
    assert table.longest_sparse(torch.tensor([900, 1, 1])) == 1
    table.expect(reqs[:1])
    assert table.longest_sparse(torch.tensor([900])) == 0
    assert table.longest_sparse(torch.tensor([], dtype=torch.int64)) == 0
