# SPDX-License-Identifier: Apache-2.0
"""Measures the quality of the selection on live traffic. It is a switch, off by default.

With ``SGLANG_SPARSE_PROBE=1`` every sparse decode step also computes dense attention in plain
PyTorch, and compares. This waits for the device and takes many times as long as the step, so it
needs ``--disable-cuda-graph`` and is not meant for serving.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from sglang_sparse.config import ConfigError
from sglang_sparse_kernels.attend import gathered_decode_attention
from sglang_sparse_kernels.step import StepContext

SWITCH = "SGLANG_SPARSE_PROBE"


@dataclass
class _Sums:
    """What was observed of one layer: sums over its (row, KV head) pairs, and the largest error."""

    pairs: int = 0
    kernel_error: float = 0.0
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class FidelityProbe:
    """Per layer: attention mass reached, the most any list of that length reaches, output error."""

    def __init__(self) -> None:
        self._layers: dict[int, _Sums] = {}

    @classmethod
    def from_environment(cls, *, graphs: bool) -> FidelityProbe | None:
        """A probe if the switch is set.

        Args:
            graphs: whether decode is captured in CUDA graphs.

        Raises:
            ConfigError: the switch has another value, or graphs are on.
        """
        value = os.environ.get(SWITCH, "0")
        if value == "0":
            return None
        if value != "1" or graphs:
            raise ConfigError(
                flag=SWITCH,
                value=value,
                problem="decode is captured in CUDA graphs" if graphs else "not a switch",
                allowed="0, or 1 together with --disable-cuda-graph",
                remedy=f"unset {SWITCH}, or add --disable-cuda-graph",
            )
        return cls()

    def observe(self, layer: int, step: StepContext) -> None:
        """Compare one step of one layer, whose stages have run, with dense attention.

        A verification is compared by its first query.
        """
        plan, kv, lists = step.plan, step.kv, step.lists
        rows = (plan.k_units > 0).nonzero().flatten().tolist()
        if not rows:
            return
        if lists.head_map is not None:
            heads = lists.head_map.long()
            indices, counts = lists.indices[:, heads], lists.counts[:, heads]
            lists = replace(lists, indices=indices, counts=counts, head_map=None)
        sums = self._layers.setdefault(layer, _Sums())
        q, out = step.first_q.float(), step.out[:: step.queries]
        kv = replace(kv, k=kv.k.float(), v=kv.v.float())
        exact, over_list = (
            torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in "ab"
        )
        windows = lists.windows
        attend = partial(
            gathered_decode_attention, q, kv, lists=lists, softmax=step.softmax, impl="torch"
        )
        nothing = torch.zeros_like(plan.k_units)
        attend(plan=replace(plan, k_units=nothing, tail_start=nothing), out=exact)
        attend(plan=plan, out=over_list)
        for row in rows:
            length, tail = int(plan.seq_lens[row]), int(plan.tail_start[row])
            keys = kv.keys(kv.slots(row, torch.arange(length, device=q.device)), torch.float32)
            products = torch.einsum("hgd,nhd->hgn", q[row].unflatten(0, (kv.num_heads, -1)), keys)
            pooled = step.softmax.logits(products).softmax(-1).mean(1)  # [heads, length]
            list_row = int(lists.rows[row])
            for head in range(kv.num_heads):
                first = tail  # of what is attended to in any case
                if windows is not None and windows.streams[head]:
                    first = length
                    tokens = windows.positions(length)
                else:
                    count = int(lists.counts[list_row, head])
                    units = lists.indices[list_row, head, :count].long()
                    within = torch.arange(lists.unit, device=q.device)
                    tokens = (units[:, None] * lists.unit + within).flatten()
                    tokens = tokens[tokens < tail]
                after = pooled[head, first:].sum()
                best = pooled[head, :first].topk(min(len(tokens), first)).values.sum()
                sums.totals["mass"] += float(pooled[head, tokens].sum() + after)
                sums.totals["oracle_mass"] += float(best + after)
                group = slice(
                    head * q.shape[1] // kv.num_heads, (head + 1) * q.shape[1] // kv.num_heads
                )
                scale = exact[row, group].norm()
                sums.totals["output_error"] += float(
                    (out[row, group] - exact[row, group]).norm() / scale
                )
                error = (out[row, group] - over_list[row, group]).norm() / scale
                sums.kernel_error = max(sums.kernel_error, float(error))
            sums.pairs += kv.num_heads

    def report(self) -> dict[str, dict[str, float]]:
        """Per layer: means over rows and KV heads; ``kernel_error`` is the largest one seen."""
        return {
            str(layer): {
                "pairs": sums.pairs,
                **{name: total / sums.pairs for name, total in sums.totals.items()},
                "kernel_error": sums.kernel_error,
            }
            for layer, sums in sorted(self._layers.items())
        }


@dataclass(frozen=True)
class Observe:
    """A stage that lets the probe compare the result of the stages before it."""

    probe: FidelityProbe
    layer: int

    def run(self, step: StepContext) -> None:
        """Compare with dense attention."""
        self.probe.observe(self.layer, step)
