# SPDX-License-Identifier: Apache-2.0
"""A share of the mass under anchors, and between selections: what is attended to."""

import json
from pathlib import Path

import pytest
import torch
from error_budget import mass_rounding
from layer_programs import DIM, GROUP, PAGE, LayerPrograms

from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.progressive.reference import BOUND_MARGIN
from sglang_sparse_kernels.step import Rank

REFERENCE = Path(__file__).parents[2] / "configs" / "reference"
HEADS = 2
LENGTHS = (500, 333)
MAPPED = {"layer": 2, "heads": [1, 0]}


def configured(preset: str, **changes: object) -> SparseConfig:
    """A reference preset with a share of the mass, without the reference model's geometry."""
    raw = json.loads((REFERENCE / f"{preset}.json").read_text())
    mass = {"kind": "mass", "epsilon": 0.6, "cap": 320, "microbatch": 32}
    raw |= {"model": None, "budget": mass, "sink_tokens": 4, "recent_tokens": 8, **changes}
    return SparseConfig.model_validate(raw)


class Layers(LayerPrograms):
    """Programs under a budget of mass."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config, LENGTHS, HEADS, seed=7, impl="torch")

    def ranked(self, layer: int) -> torch.Tensor:
        """int32 [list rows, heads], how many units the layer's lists rank."""
        (rank,) = [stage for stage in self.programs[layer].stages if isinstance(stage, Rank)]
        return rank.ranked

    def attended(self, layer: int, row: int, head: int) -> torch.Tensor:
        """Positions of a row that ``layer``'s program holds as its list, and the tail."""
        program, unit = self.programs[layer], self.config.unit
        at = int(self.build.lists.rows_of(self.plan)[row])
        listed = program.indices[at, head, : int(program.counts[at, head])].long()
        tail = int(self.plan.tail_start[row])
        inside = (listed[:, None] * unit + torch.arange(unit)).flatten()
        return torch.cat((inside[inside < tail], torch.arange(tail, LENGTHS[row])))

    def weights(self, layer: int, row: int, head: int) -> torch.Tensor:
        """[group, tokens] dense attention of one KV head."""
        keys, _ = self.rows(layer, row, head)
        group = self.q[layer, row].view(HEADS, GROUP, DIM)[head].double()
        return (group @ keys.double().T * DIM**-0.5).softmax(-1)

    def assert_attention(
        self, out: torch.Tensor, want: torch.Tensor, *, layer: int, row: int
    ) -> None:
        """Compare fp32 attention of a row with exact one, within what fp32 may round.

        A logit is a sum of DIM products, so it is off by at most DIM roundings of the sum of their
        magnitudes; a weight exp(logit) is relatively off by twice that (its own and that of the
        maximum), and by two roundings more; both sums over the row's tokens add a rounding a
        token. A convex combination of values moves by no more than twice the weights' relative
        error, times the largest value.
        """
        rounding = torch.finfo(torch.float32).eps / 2
        slots = self.plan.page_table[row].long() * PAGE
        places = (slots[:, None] + torch.arange(PAGE)).flatten()[: LENGTHS[row]]
        keys, values = self.pool.k_buffer[layer][places], self.pool.v_buffer[layer][places]
        heads = self.q[layer, row].view(HEADS, GROUP, DIM).abs()
        products = torch.einsum("hgd,nhd->hgn", heads, keys.abs()) * DIM**-0.5
        logit = (DIM + 1) * rounding * float(products.max())
        weight = 2 * logit + 2 * rounding + 2 * LENGTHS[row] * rounding
        bound = 2 * weight * float(values.abs().max())
        assert float((out.double() - want).abs().max()) <= bound

    def share(self, row: int, head: int, listed: torch.Tensor, margin: float) -> float:
        """Mean over a group of layer 1's share, pages that are not listed taken by their score."""
        unit, tail = self.config.unit, int(self.plan.tail_start[row])
        units = -(-tail // unit)
        parts = torch.arange(PAGE // unit)
        pages = (self.plan.page_table[row].long()[:, None] * len(parts) + parts).flatten()[:units]
        planes, query = self.pool.planes, self.q[1, row].view(HEADS, GROUP, DIM)[head]
        low, high = planes.page_mean_low[1][pages, head], planes.page_mean_high[1][pages, head]
        score = query.clamp_min(0) @ high.T + query.clamp_max(0) @ low.T
        sizes = (tail - torch.arange(units) * unit).clamp(max=unit)
        left = (score * DIM**-0.5 - margin).exp() * sizes
        left[:, listed.long()] = 0
        at = torch.arange(LENGTHS[row])
        inside = torch.isin(at // unit, listed) | (at >= tail)
        weights = (query @ self.rows(1, row, head)[0].T * DIM**-0.5).exp()
        reached = (weights * inside).sum(-1)
        return float((reached / (reached + left.sum(-1))).mean())

    def products(self, layer: int, row: int, head: int) -> torch.Tensor:
        """[group, tokens] sums of the absolute values of each logit's products."""
        group = self.q[layer, row].view(HEADS, GROUP, DIM)[head]
        return group.abs() @ self.rows(layer, row, head)[0].abs().T * DIM**-0.5

    def rows(self, layer: int, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request, [tokens, dim] each."""
        at = torch.arange(LENGTHS[row])
        slots = self.plan.page_table[row].long()[at // PAGE] * PAGE + at % PAGE
        return self.pool.k_buffer[layer][slots, head], self.pool.v_buffer[layer][slots, head]


@pytest.mark.parametrize("crossed", [False, True])
def test_reuse_layers_attend_to_what_their_anchor_reached(crossed: bool) -> None:
    reuse = {"kind": "anchors", "anchors": [0, 1], "reuse": [MAPPED] if crossed else "identity"}
    layers = Layers(configured("kascade", layers=reuse))
    layers.q[1] *= torch.tensor([4.0, 1.0])[:, None, None]  # one row is sharp, one is flat
    layers.run(0)
    layers.run(1)
    out = layers.run(2)
    counts = []
    for row in range(len(LENGTHS)):
        for head in range(HEADS):
            own = layers.attended(1, row, head)
            counts.append(len(own))
            taken = layers.attended(1, row, 1 - head if crossed else head)
            kept = layers.weights(2, row, head)[:, taken]
            values = layers.rows(2, row, head)[1][taken]
            want = kept / kept.sum(-1, keepdim=True) @ values.double()
            layers.assert_attention(out[row, head], want, layer=2, row=row)
    assert min(counts) < 64 < max(counts), "lists of one layer stop at different depths"
    assert set(layers.budget.counters.read()) == {0, 1}


def test_between_selections_the_ranking_is_kept_and_the_share_is_reached_anew() -> None:
    layers = Layers(configured("psa", cadence={"kind": "steps", "every": 4}))
    layers.q[1] *= 4
    layers.run(1)
    program, at = layers.programs[1], layers.plan.request_slots.long()
    order, ranked = program.indices[at].clone(), layers.ranked(1)[at].clone()
    reached = program.counts[at].clone()
    assert (reached < ranked).all()
    layers.plan.reselect.zero_()
    layers.q[1] *= 0.005  # flat: a share needs as many blocks as it is large
    out = layers.run(1)
    assert torch.equal(program.indices[at], order)
    assert (program.counts[at] > reached).all()
    for row in range(len(LENGTHS)):
        taken = layers.attended(1, row, 0)
        kept = layers.weights(1, row, 0)[:, taken]
        want = kept / kept.sum(-1, keepdim=True) @ layers.rows(1, row, 0)[1][taken].double()
        layers.assert_attention(out[row, 0], want, layer=1, row=row)


def test_an_estimate_by_score_is_what_each_heads_digests_say_of_the_pages_that_are_left() -> None:
    mass = {"kind": "mass", "epsilon": 0.8, "cap": 512, "microbatch": 32, "share": "mean"}
    layers = Layers(configured("psa", budget=mass | {"estimator": "scored", "margin": 6.0}))
    layers.run(1)
    program, stopped = layers.programs[1], 0
    for row in range(len(LENGTHS)):
        for head in range(HEADS):
            order = program.indices[row, head, : int(layers.ranked(1)[row, head])]
            count = int(program.counts[row, head])
            # What is left is raised by BOUND_MARGIN, so that a share of s is s * (1 - s) times that
            # lower. Masses reached and left round, here and there, and a share has one of each.
            masses = mass_rounding(layers.products(1, row, head), 2 * DIM)
            slack = 0.8 * 0.2 * (BOUND_MARGIN + 4 * masses)
            stopped += count < len(order)
            assert count == len(order) or layers.share(row, head, order[:count], 6.0) >= 0.8 - slack
            # The first page and the last are taken in any case, and one microbatch of two.
            assert count <= 4 or layers.share(row, head, order[: count - 2], 6.0) < 0.8 + slack
    assert stopped
