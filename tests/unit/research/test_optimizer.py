# SPDX-License-Identifier: Apache-2.0
"""The reference model's optimiser: who trains what, at which rate, and from where it goes on."""

import copy

import torch

from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.optimizer import Optimizer

TINY = ModelConfig(2048, 32, 48, layers=2, heads=2, kv_heads=1, head_dim=16)


def test_muon_trains_the_layers_matrices_and_adamw_the_rest() -> None:
    model = ReferenceModel(TINY)
    optimizer = Optimizer(model)
    named = {id(p): name for name, p in model.named_parameters()}
    groups = [*optimizer.muon.param_groups, *optimizer.adamw.param_groups]
    assert sorted(named[id(p)] for g in groups for p in g["params"]) == sorted(named.values())
    muon = {named[id(p)] for p in optimizer.muon.param_groups[0]["params"]}
    assert muon == {name for name in named.values() if name.endswith("proj.weight")}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.step(0.1)
    for name, old, new in zip(named.values(), before, model.parameters(), strict=True):
        moved = (new - old).square().mean().sqrt()  # by about the rate, whichever trains it
        assert 0.01 < moved < 0.2, name


def test_an_optimiser_goes_on_from_its_state() -> None:
    model = ReferenceModel(TINY, seed=4)
    optimizer = Optimizer(model)

    def step(model: ReferenceModel, optimizer: Optimizer, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=drawn)
        optimizer.step(0.1)

    step(model, optimizer, 1)
    resumed = copy.deepcopy(model)
    again = Optimizer(resumed)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, 2)
    step(resumed, again, 2)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
