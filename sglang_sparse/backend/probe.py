# SPDX-License-Identifier: Apache-2.0
"""How good the selection is, measured on live traffic: a switch for evaluation, off by default.

``SGLANG_SPARSE_PROBE=1`` makes every sparse decode step also compute dense attention, in plain
PyTorch, and compare. It synchronizes and costs many times the step, so it needs
``--disable-cuda-graph`` and is no part of serving.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_sparse.config import ConfigError
from sglang_sparse_kernels.attend import gathered_decode_attention
from sglang_sparse_kernels.plan import DecodePlan

SWITCH = "SGLANG_SPARSE_PROBE"


@dataclass
class _Sums:
    """Sums over the observed (row, KV head) pairs of one layer."""

    pairs: int = 0
    mass: float = 0.0
    oracle_mass: float = 0.0
    output_error: float = 0.0
    kernel_error: float = 0.0


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

    def observe(
        self,
        layer: int,
        q: torch.Tensor,
        plan: DecodePlan,
        indices: torch.Tensor,
        counts: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        out: torch.Tensor,
        *,
        unit: int,
        page_size: int,
        scaling: float,
        logit_cap: float,
    ) -> None:
        """Compare one step of one layer with dense attention. Shapes as in ``SelectAndAttend``."""
        rows = (plan.k_units > 0).nonzero().flatten().tolist()
        if not rows:
            return
        sums = self._layers.setdefault(layer, _Sums())
        attend: dict[str, Any] = {
            "unit": unit,
            "page_size": page_size,
            "sm_scale": scaling,
            "logit_cap": logit_cap,
            "impl": "torch",
        }
        exact, listed = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in "ab")
        q32, k32, v32 = q.float(), k_buffer.float(), v_buffer.float()
        nothing = torch.zeros_like(plan.k_units)
        dense = replace(plan, k_units=nothing, tail_start=nothing)
        gathered_decode_attention(q32, k32, v32, dense, indices, counts, out=exact, **attend)
        gathered_decode_attention(q32, k32, v32, plan, indices, counts, out=listed, **attend)
        heads = k_buffer.shape[1]
        for row in rows:
            length, tail = int(plan.seq_lens[row]), int(plan.tail_start[row])
            position = torch.arange(length, device=q.device)
            page = plan.page_table[row].long()[position // page_size]
            keys = k32[page * page_size + position % page_size]
            logits = (
                torch.einsum("hgd,nhd->hgn", q32[row].unflatten(0, (heads, -1)), keys) * scaling
            )
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            pooled = logits.softmax(-1).mean(1)  # [heads, length]
            list_row = int(plan.list_rows[row])
            for head in range(heads):
                units = indices[list_row, head, : int(counts[list_row, head])].long()
                tokens = (units[:, None] * unit + torch.arange(unit, device=q.device)).flatten()
                tokens = tokens[tokens < tail]
                after = pooled[head, tail:].sum()
                best = pooled[head, :tail].topk(min(len(tokens), tail)).values.sum()
                sums.mass += float(pooled[head, tokens].sum() + after)
                sums.oracle_mass += float(best + after)
                group = slice(head * q.shape[1] // heads, (head + 1) * q.shape[1] // heads)
                scale = exact[row, group].norm()
                sums.output_error += float((out[row, group] - exact[row, group]).norm() / scale)
                error = (out[row, group] - listed[row, group]).norm() / scale
                sums.kernel_error = max(sums.kernel_error, float(error))
            sums.pairs += heads

    def report(self) -> dict[str, dict[str, float]]:
        """Per layer: means over rows and KV heads; ``kernel_error`` is the largest one seen."""
        return {
            str(layer): {
                "pairs": sums.pairs,
                "mass": sums.mass / sums.pairs,
                "oracle_mass": sums.oracle_mass / sums.pairs,
                "output_error": sums.output_error / sums.pairs,
                "kernel_error": sums.kernel_error,
            }
            for layer, sums in sorted(self._layers.items())
        }
