# SPDX-License-Identifier: Apache-2.0
"""A share of the mass under anchors, and between selections: what is attended to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from error_budget import attention_rounding, mass_rounding

from sglang_sparse.backend.program import compile_programs, selecting_layers
from sglang_sparse.backend.progressive import ProgressiveBuffers
from sglang_sparse.backend.selection import Limits, SelectionBuffers, kept_sets
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.plan import DecodePlan
from sglang_sparse_kernels.progressive.reference import BOUND_MARGIN
from sglang_sparse_radix.planes_spec import PlaneSpec
from sglang_sparse_radix.pool import SparseMHATokenToKVPool, bind_pool_class

REFERENCE = Path(__file__).parents[2] / "configs" / "reference"
LAYERS, HEADS, GROUP, DIM, PAGE = 3, 2, 2, 64, 64
LENGTHS = (500, 333)
MAPPED = {"layer": 2, "heads": [1, 0]}


def configured(preset: str, **changes: object) -> SparseConfig:
    """A reference preset with a share of the mass, without the reference model's geometry."""
    raw = json.loads((REFERENCE / f"{preset}.json").read_text())
    mass = {"kind": "mass", "epsilon": 0.6, "cap": 320, "microbatch": 32}
    raw |= {"model": None, "budget": mass, "sink_tokens": 4, "recent_tokens": 8, **changes}
    return SparseConfig.model_validate(raw)


class Layers:
    """Programs of three layers over a real pool of random keys, two requests of one decode step."""

    def __init__(self, config: SparseConfig) -> None:
        self.config = config
        random = torch.Generator().manual_seed(7)
        pages = [-(-length // PAGE) for length in LENGTHS]
        spec = PlaneSpec(page_mean=config.score.kind == "page_mean", logical_page=32)
        self.pool: SparseMHATokenToKVPool = bind_pool_class(spec, "torch")(
            (sum(pages) + 1) * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS,
            head_dim=DIM, layer_num=LAYERS, device="cpu", enable_memory_saver=False,
            start_layer=0, end_layer=LAYERS,
        )  # fmt: skip
        for rows in (*self.pool.k_buffer, *self.pool.v_buffer):
            rows.copy_(torch.randn(rows.shape, generator=random))
        self.plan = plan = DecodePlan.allocate(len(LENGTHS), max(pages))
        plan.page_table[0, : pages[0]] = 1 + torch.arange(pages[0])
        plan.page_table[1, : pages[1]] = 1 + pages[0] + torch.arange(pages[1])
        plan.seq_lens.copy_(torch.tensor(LENGTHS))
        plan.tail_start.copy_(plan.seq_lens - 1)
        plan.request_slots.copy_(torch.tensor([2, 1]))
        limits = Limits.of(
            config, max_context=max(LENGTHS), kv_heads=HEADS, query_heads=HEADS * GROUP, max_rows=2
        )
        plan.k_units.copy_(
            torch.minimum(torch.tensor(limits.capacity_units), -(-plan.tail_start // config.unit))
        )
        plan.reselect.fill_(1)
        plan.refresh.fill_(1)
        self.pool.update_planes(
            plan.page_table, torch.zeros_like(plan.seq_lens), plan.seq_lens,
            max_new_tokens=max(LENGTHS),
        )  # fmt: skip
        self.buffers = SelectionBuffers(
            limits, sets=kept_sets(config, range(LAYERS)), request_slots=3, kv_heads=HEADS,
            query_heads=HEADS * GROUP, head_dim=DIM, exact=False, device=torch.device("cpu"),
        )  # fmt: skip
        layers = selecting_layers(config, 0, LAYERS)
        self.mass = ProgressiveBuffers(
            config.budget, self.buffers, unit=config.unit, layers=layers,
            query_heads=HEADS * GROUP, head_dim=DIM, request_slots=3,
        )  # fmt: skip
        self.programs = compile_programs(
            config, self.pool, self.buffers, layers, 3, 0, "torch", None, self.mass
        )
        self.q = torch.randn((LAYERS, len(LENGTHS), HEADS * GROUP, DIM), generator=random)

    def run(self, layer: int) -> torch.Tensor:
        """Attention output of one layer, [rows, heads, dim]."""
        return self.programs[layer].run(self.q[layer], self.plan, scaling=DIM**-0.5, logit_cap=0.0)

    def attended(self, layer: int, row: int, head: int) -> torch.Tensor:
        """Positions of a row that ``layer``'s program holds as its list, and the tail."""
        program, unit = self.programs[layer], self.config.unit
        at = int(self.plan.request_slots[row])
        listed = program.indices[at, head, : int(program.counts[at, head])].long()
        tail = int(self.plan.tail_start[row])
        inside = (listed[:, None] * unit + torch.arange(unit)).flatten()
        return torch.cat((inside[inside < tail], torch.arange(tail, LENGTHS[row])))

    def weights(self, layer: int, row: int, head: int) -> torch.Tensor:
        """[group, tokens] dense attention of one KV head."""
        keys, _ = self.rows(layer, row, head)
        group = self.q[layer, row].view(HEADS, GROUP, DIM)[head]
        return (group @ keys.T * DIM**-0.5).softmax(-1)

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

    def rounding(
        self, layer: int, row: int, head: int, weights: torch.Tensor, taken: torch.Tensor
    ) -> torch.Tensor:
        """[group, dim] how far two float32 attentions over ``taken`` may lie apart."""
        weighted = weights @ self.rows(layer, row, head)[1][taken].abs()
        return 2 * attention_rounding(self.products(layer, row, head), DIM, weighted)

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
    out = layers.run(2).view(len(LENGTHS), HEADS, GROUP, DIM)
    counts = []
    for row in range(len(LENGTHS)):
        for head in range(HEADS):
            own = layers.attended(1, row, head)
            counts.append(len(own))
            taken = layers.attended(1, row, 1 - head if crossed else head)
            kept = layers.weights(2, row, head)[:, taken]
            values = layers.rows(2, row, head)[1][taken]
            kept = kept / kept.sum(-1, keepdim=True)
            slack = layers.rounding(2, row, head, kept, taken)
            assert ((out[row, head] - kept @ values).abs() <= slack).all()
    assert min(counts) < 64 < max(counts), "lists of one layer stop at different depths"
    assert set(layers.mass.report()) == {"0", "1"}


def test_between_selections_the_ranking_is_kept_and_the_share_is_reached_anew() -> None:
    layers = Layers(configured("psa", cadence={"kind": "steps", "every": 4}))
    layers.q[1] *= 4
    layers.run(1)
    program, at = layers.programs[1], layers.plan.request_slots.long()
    assert program.progression is not None
    order, ranked = program.indices[at].clone(), program.progression.ranked[at].clone()
    reached = program.counts[at].clone()
    assert (reached < ranked).all()
    layers.plan.reselect.zero_()
    layers.q[1] *= 0.005  # flat: a share needs as many blocks as it is large
    out = layers.run(1).view(len(LENGTHS), HEADS, GROUP, DIM)
    assert torch.equal(program.indices[at], order)
    assert (program.counts[at] > reached).all()
    for row in range(len(LENGTHS)):
        taken = layers.attended(1, row, 0)
        kept = layers.weights(1, row, 0)[:, taken]
        kept = kept / kept.sum(-1, keepdim=True)
        slack = layers.rounding(1, row, 0, kept, taken)
        assert ((out[row, 0] - kept @ layers.rows(1, row, 0)[1][taken]).abs() <= slack).all()


def test_an_estimate_by_score_is_what_each_heads_digests_say_of_the_pages_that_are_left() -> None:
    mass = {"kind": "mass", "epsilon": 0.8, "cap": 512, "microbatch": 32, "share": "mean"}
    layers = Layers(configured("psa", budget=mass | {"estimator": "scored", "margin": 6.0}))
    layers.run(1)
    program, stopped = layers.programs[1], 0
    for row in range(len(LENGTHS)):
        for head in range(HEADS):
            order = program.indices[row, head, : int(program.progression.ranked[row, head])]
            count = int(program.counts[row, head])
            # What is left is raised by BOUND_MARGIN, so that a share of s is s * (1 - s) times that
            # lower. Masses reached and left round, here and there, and a share has one of each.
            masses = mass_rounding(layers.products(1, row, head), 2 * DIM)
            slack = 0.8 * 0.2 * (BOUND_MARGIN + 4 * masses)
            stopped += count < len(order)
            assert count == len(order) or layers.share(row, head, order[:count], 6.0) >= 0.8 - slack
            # The first page and the last are taken in any case, and one microbatch.
            assert count <= 3 or layers.share(row, head, order[: count - 1], 6.0) < 0.8 + slack
    assert stopped
