# SPDX-License-Identifier: Apache-2.0
"""Decoded text: its losses beside one pass over the whole text, and its table."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.text_decode import cell, measure, nats, places, table

STEPS, LENGTH = 9, 75
SPARSE = Policy("oracle", budget=12, sink=2, recent=4)
WHOLE = Policy("oracle", budget=200, sink=2, recent=4)


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    config = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2,
        head_dim=16,
    )  # fmt: skip
    found = ReferenceModel(config, seed=5)
    with torch.no_grad():  # fresh weights attend to everything alike
        for p in found.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
    return found.eval()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng().integers(0, 50, (3, LENGTH + STEPS)))


def test_dense_losses_are_those_of_one_pass(model: ReferenceModel, text: torch.Tensor) -> None:
    given = text[:, -STEPS:]
    decoder = Decoder(model, text[:, :LENGTH].tolist(), STEPS)
    found = nats(decoder, Policy(), given)
    with torch.no_grad():
        logits = model.logits(model(text))[:, LENGTH:-1]
    wanted = F.cross_entropy(logits.transpose(1, 2), given[:, 1:], reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_budget_of_everything_is_dense_and_a_small_one_is_not(
    model: ReferenceModel, text: torch.Tensor
) -> None:
    prompts, given = text[:, :LENGTH].tolist(), text[:, -STEPS:]
    dense, sparse, whole = measure(model, prompts, given, [Policy(), SPARSE, WHOLE])
    torch.testing.assert_close(whole, dense, rtol=1e-4, atol=1e-4)
    assert ((sparse - dense).abs() > 1e-2).all()


def test_a_cell_has_the_interval_of_a_ratio() -> None:
    rng = np.random.default_rng(7)
    sizes = torch.from_numpy(rng.integers(150, 250, 4000)).double()
    dense = sizes * torch.from_numpy(rng.normal(0.8, 0.2, 4000))
    more = sizes * torch.from_numpy(rng.normal(0.01, 0.05, 4000))
    found = cell(dense + more, dense, sizes)
    assert found["bits"] == pytest.approx(float((dense + more).sum() / sizes.sum()) / math.log(2))
    assert found["more"] == pytest.approx(0.01 / math.log(2), abs=3 * found["half"])
    # Sizes are all but alike, so the ratio spreads as the mean of what is drawn.
    assert found["half"] == pytest.approx(1.96 * 0.05 / math.sqrt(4000) / math.log(2), rel=0.1)


def test_stretches_are_spread_over_the_documents() -> None:
    documents = [np.arange(20_000, dtype=np.uint16), np.arange(10, dtype=np.uint16)]
    found = places(documents, longest=1000, steps=24, count=3)
    assert [len(one) for one in found] == [1024] * 3
    assert [int(one[-1]) for one in found] == [1023, 1023 + 4096, 1023 + 3 * 4096]
    with pytest.raises(ValueError, match="5 stretches of 1024 tokens; asked for 6"):
        places(documents, longest=1000, steps=24, count=6)


def test_the_table_has_a_row_a_policy_and_a_column_a_position() -> None:
    cells = [
        {"policy": asdict(policy), "position": position, "bits": 1.25, "more": more, "half": 0.002}
        for position in (512, 4096)
        for policy, more in ((Policy(), 0.0), (SPARSE, 0.0123))
    ]
    assert table(cells[:-1]).splitlines() == [
        "| policy | tokens | at 512 | at 4,096 |",
        "| --- | --- | --- | --- |",
        "| dense |  | 1.2500 | 1.2500 |",
        "| oracle | 12 | +0.0123 ± 0.0020 | - |",
    ]
