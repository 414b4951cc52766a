# SPDX-License-Identifier: Apache-2.0
"""What finds streaming heads: slopes by gates, trained gates, and leaving heads out.

Each works on one prompt, or step, at a time, so that a run can be interrupted and go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_sparse.calibrate.gates import GatedModel


def log_odds_slopes(model: GatedModel, ids: list[int], generator: torch.Generator) -> Tensor:
    """fp64 [layers, KV heads]: squared slope of the predictions' log odds by each gate at 1.

    The log odds are those of the likeliest token against all others, at each judged position. One
    backward pass takes the slope of their sum under random signs; its square is, in the mean over
    signs, the sum over positions of the squared slopes. Log odds do not saturate, as the loss of a
    prediction that is certain does, and leave out what of a hidden state no prediction shows.

    Args:
        model: all gates are 1.
        ids: a prompt.
        generator: of the signs, on the CPU.
    """
    gates = model.ones().requires_grad_()
    predicted = model.predictions(model.tokens(ids), gates)
    own, likeliest = predicted.max(-1, keepdim=True)
    others = predicted.scatter(-1, likeliest, -torch.inf).logsumexp(-1)
    signs = torch.randint(0, 2, others.shape, generator=generator).to(others.device) * 2 - 1
    (slopes,) = torch.autograd.grad(((own[:, 0] - others) * signs).sum(), gates)
    return slopes.double().cpu().square()


@torch.no_grad()
def divergence(model: GatedModel, dense: Tensor, ids: list[int], gates: Tensor) -> float:
    """Kullback-Leibler divergence of predictions from ``dense`` ones, mean over positions, nats."""
    after = model.predictions(model.tokens(ids), gates)
    return float((dense.exp() * (dense - after)).sum(-1).mean())


@torch.no_grad()
def leave_one_out(model: GatedModel, ids: list[int]) -> Tensor:
    """fp64 [layers, KV heads]: divergence of the predictions if a head alone streams."""
    dense = model.predictions(model.tokens(ids))
    found = torch.zeros(model.ones().shape, dtype=torch.float64)
    for layer, head in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        gates = model.ones()
        gates[layer, head] = 0.0
        found[layer, head] = divergence(model, dense, ids, gates)
    return found


@dataclass
class GateTraining:
    """DuoAttention's optimisation: distillation of the last hidden states, and L1 on the gates.

    Learning rate 0.02 with a rise and a fall of a fifth of the steps each, AdamW without decay,
    gates clamped to [0, 1] after each step (section 2.3 and the released training script).

    Attributes:
        gates: float32 [layers, KV heads].
        moments: AdamW's running means, [2, layers, KV heads].
        step: steps done.
        steps: steps in all.
        l1: weight of the sum of the gates.
    """

    gates: Tensor
    moments: Tensor
    step: int
    steps: int
    l1: float

    RATE, BETAS, EPSILON = 0.02, (0.9, 0.999), 1e-8

    @classmethod
    def start(cls, model: GatedModel, *, steps: int, l1: float) -> GateTraining:
        """All gates are 1."""
        gates = model.ones().cpu()
        return cls(gates, torch.zeros((2, *gates.shape)), 0, steps, l1)

    def rate(self) -> float:
        """Learning rate of the next step."""
        ramp = max(1, self.steps // 5)
        return self.RATE * min(1.0, (self.step + 1) / ramp, (self.steps - self.step) / ramp)

    def advance(self, model: GatedModel, ids: list[int]) -> float:
        """Take one step on a prompt; returns the distillation loss.

        The loss is the mean squared error of a state over its positions, in units of the mean
        square of the dense states, so that ``l1`` means the same for models of any scale.
        """
        tokens = model.tokens(ids)
        with torch.no_grad():
            dense = model.hidden(tokens)
        gates = self.gates.to(model.device, copy=True).requires_grad_()
        states = model.hidden(tokens, gates)
        loss = (states - dense).square().mean() / dense.square().mean()
        (slope,) = torch.autograd.grad(loss + self.l1 * gates.mean(), gates)
        self._update(slope.cpu())
        return float(loss.detach())

    def _update(self, slope: Tensor) -> None:
        rate = self.rate()
        self.step += 1
        for moment, beta, value in zip(
            self.moments, self.BETAS, (slope, slope.square()), strict=True
        ):
            moment.lerp_(value, 1 - beta)
        mean, square = (
            moment / (1 - beta**self.step)
            for moment, beta in zip(self.moments, self.BETAS, strict=True)
        )
        self.gates = (self.gates - rate * mean / (square.sqrt() + self.EPSILON)).clamp(0.0, 1.0)
