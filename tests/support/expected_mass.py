# SPDX-License-Identifier: Apache-2.0
"""The attention mass that a server's selection must reach, by an implementation of its own.

`sglang_sparse.research` selects with boolean masks over contiguous caches and shares no code with
the backend, its planes or its operators. In float32 both see the same queries and keys but for
rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from live_server import MASS_ERROR, MODEL

from sglang_sparse.config import load_preset
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.preset_study import policy_of
from sglang_sparse_kernels.progressive.reference import BOUND_MARGIN

# PSA as in the paper: blocks of 32 tokens, the smallest mass seen so far, a share of 0.95.
PAPER = {
    "score": {"logical_page": 32},
    "budget": {"epsilon": 0.95, "cap": 4096, "estimator": "observed_min", "margin": 0},
}


# Tokens of the lists of servers whose requests may ask for any number.
CHOSEN_TOKENS = 256
_CHOOSY = ("sparcas", "page_minmax")


def served_policy(server: str) -> Policy:
    """What a test's server attends to: its preset, but for the budget; ``psa`` as in the paper."""
    policy = policy_of(load_preset("reference", server.removesuffix("-shipped")))
    if server in _CHOOSY:
        return replace(policy, budget=CHOSEN_TOKENS + (1 if policy.unit == 1 else 0))
    if server == "psa":
        return replace(policy, page=32, budget=4096, epsilon=0.95, margin=None)
    return replace(policy, margin=raised(policy.margin))


def raised(margin: float | None) -> float | None:
    """A policy's margin for the kernels' one, as they raise what is left by BOUND_MARGIN."""
    return None if margin is None else margin - math.log1p(BOUND_MARGIN)


def seen_since(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """What the probe saw between two of its reports; the kernels' error is the largest of all."""
    layers = {}
    for layer, total in after.items():
        old = before.get(layer, dict.fromkeys(total, 0.0))
        pairs = total["pairs"] - old["pairs"]
        layers[layer] = {"pairs": pairs, "kernel_error": total["kernel_error"]} | {
            name: (total[name] * total["pairs"] - old[name] * old["pairs"]) / pairs
            for name in ("mass", "oracle_mass")
        }
    return layers


def shares_around(policy: Policy) -> list[Policy]:
    """The policy that stops as early, and the one that stops as late, as rounding may lead to."""
    return [replace(policy, epsilon=policy.epsilon + error) for error in (-MASS_ERROR, MASS_ERROR)]


class ExpectedMass:
    """Prompts prefilled once and decoded under any policy, for a number of sparse steps."""

    def __init__(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self._model = load(MODEL).eval()
        self._steps, self._rows = steps, len(prompts)
        self._decoder = Decoder(self._model, prompts, steps + 1)

    def reached(self, policy: Policy) -> dict[str, float]:
        """Mass by layer: mean over steps, rows and query heads."""
        self._decoder.shares = []
        self._decoder.generate(policy, end=-1)
        layers = range(policy.dense_layers, self._model.config.layers)
        shares = torch.stack(self._decoder.shares).double()
        shares = shares.unflatten(0, (self._steps, len(layers))).mean((0, 2, 3, 4))
        return {str(layer): float(share) for layer, share in zip(layers, shares, strict=True)}

    def range_of(self, policy: Policy) -> dict[str, tuple[float, float]]:
        """Smallest and largest mass by layer that rounding can lead a right server to.

        Scores that round otherwise exchange the last unit of a list for the next one. The list then
        lies between those of one unit less and one unit more. An estimated share that rounds
        otherwise stops where it would for an epsilon that is as much smaller or larger. Masses
        themselves are sums of float32 probabilities.
        """
        if policy.epsilon:
            ends = shares_around(policy)
        else:
            units = (-policy.unit, policy.unit)
            ends = [replace(policy, budget=policy.budget + unit) for unit in units]
        low, high = (self.reached(end) for end in ends)
        return {layer: (low[layer] - MASS_ERROR, high[layer] + MASS_ERROR) for layer in low}

    def blocks(self, policy: Policy) -> dict[str, torch.Tensor]:
        """Blocks attended to by layer and row, summed over steps and KV heads."""
        decoder, config = self._decoder, self._model.config
        decoder.generate(policy, end=-1)
        tokens = self._steps * decoder.row_tokens[policy.dense_layers :]  # mean over KV heads
        # All blocks are whole but the last one, which is always attended to. It is in a list unless
        # the token that is decoded begins it.
        before = (decoder.prompt_lengths[:, None] + torch.arange(self._steps)) % policy.unit
        blocks = (tokens - (before + 1).sum(1)) / policy.unit + (before > 0).sum(1)
        blocks = (config.kv_heads * blocks).round()
        layers = range(policy.dense_layers, config.layers)
        return {str(layer): row for layer, row in zip(layers, blocks, strict=True)}

    def block_range(self, policy: Policy) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Fewest and most blocks by layer and row; see :meth:`range_of`."""
        low, high = (self.blocks(end) for end in shares_around(policy))
        return {layer: (low[layer], high[layer]) for layer in low}
