# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of exact scoring: logits and partial softmax sums of every query head."""

from dataclasses import dataclass

import torch

from ..common import Device, check_fits
from ..device import programs_to_fill

# Measured on one H200.
CTAS_PER_SM = 4
MAX_SPLITS = 64
TILE_TOKENS = 128


def num_splits(rows: int, num_kv_heads: int, max_units: int, device: torch.device) -> int:
    """Parts of the context that fill the device; fixed by the shapes, not by the data."""
    # Rounding down keeps all programs resident at once; one more would run alone at the end.
    fill = programs_to_fill(device, CTAS_PER_SM) // (rows * num_kv_heads)
    return max(1, min(fill, -(-max_units // TILE_TOKENS), MAX_SPLITS))


@dataclass(frozen=True)
class ExactWorkspace:
    """Fixed-capacity scratch of :func:`sglang_sparse_kernels.exact_score`.

    Attributes:
        logits: float32 [R, H * G, max_units], in units of log 2.
        partials: float32 [at least R * H * G * splits * 2], largest logit and sum of each split.
    """

    logits: torch.Tensor
    partials: torch.Tensor

    def rows(self, batch_size: int) -> "ExactWorkspace":
        """A view of the first ``batch_size`` rows; raises ValueError if there are fewer."""
        check_fits(batch_size, self.logits)
        return ExactWorkspace(self.logits[:batch_size], self.partials)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.logits.nbytes + self.partials.nbytes


def make_exact_workspace(
    max_rows: int, num_heads: int, num_kv_heads: int, max_units: int, device: Device
) -> ExactWorkspace:
    """Scratch for batches of up to ``max_rows`` rows.

    Args:
        max_rows: largest batch (R).
        num_heads: query heads (H * G) of this rank.
        num_kv_heads: KV heads (H) of this rank.
        max_units: width of the score tensor.
        device: where it lives.
    """
    # Fewer rows take more splits, but never more programs than fill the device.
    programs = programs_to_fill(torch.device(device), CTAS_PER_SM) + max_rows * num_kv_heads
    return ExactWorkspace(
        logits=torch.zeros((max_rows, num_heads, max_units), device=device),
        partials=torch.zeros(2 * programs * (num_heads // num_kv_heads), device=device),
    )
