# SPDX-License-Identifier: Apache-2.0
"""One rank that computes its projections in parts gives what ranks give together."""

from typing import Any

import pytest
import scripts  # noqa: F401  # the load tests
import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from ranks_in_one import in_parts  # isort: skip

TOKENS, INPUTS = 5, 96


def layer(kind: type[torch.nn.Module], weight: torch.Tensor, sizes: list[int]) -> Any:
    """A layer that has a weight and what says how it is put together; no model is needed."""
    made: Any = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.weight, made.output_partition_sizes = weight, sizes
    return made


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("RANKS_IN_ONE", str(request.param))
    return int(request.param)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(QKVParallelLinear, [64, 32, 32]), (MergedColumnParallelLinear, [40, 40])],
)
def test_outputs_that_ranks_share_stand_where_one_rank_has_them(
    kind: type[torch.nn.Module], sizes: list[int], ranks: int
) -> None:
    # Whole numbers below 2**24: their sums are exact in any order.
    x = torch.randint(-99, 99, (TOKENS, INPUTS)).float()
    weight = torch.randint(-99, 99, (sum(sizes), INPUTS)).float()
    got = in_parts(UnquantizedLinearMethod(), layer(kind, weight, sizes), x)
    assert torch.equal(got, x @ weight.T)


def test_what_ranks_add_is_rounded_before_it_is_added(ranks: int) -> None:
    x = torch.randn(TOKENS, INPUTS).bfloat16()
    weight = torch.randn(64, INPUTS).bfloat16()
    got = in_parts(UnquantizedLinearMethod(), layer(RowParallelLinear, weight, [64]), x)
    width = INPUTS // ranks
    want = torch.zeros(TOKENS, 64).bfloat16()
    for at in range(0, INPUTS, width):
        part = x[:, at : at + width].contiguous(), weight[:, at : at + width].contiguous()
        want = want + torch.nn.functional.linear(*part)
    assert torch.equal(got, want)
    assert not torch.equal(got, torch.nn.functional.linear(x, weight))


def test_a_bias_is_refused(ranks: int) -> None:
    own = layer(RowParallelLinear, torch.ones(8, 8), [8])
    with pytest.raises(ValueError, match="a projection with a bias"):
        in_parts(UnquantizedLinearMethod(), own, torch.ones(1, 8), torch.ones(8))
