# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the split-KV decode attention, and how many splits it takes."""

import torch

from ..common import Device
from ..device import programs_to_fill

# What follows was measured on one H200.
CTAS_PER_SM = 2
# Long lists are bound by bandwidth: as many programs as fit, or several rounds of them, so that few
# multiprocessors idle in the last one.
LONG_LIST_TOKENS = 4096
LONG_CTAS_PER_SM = 3
ROUNDS = 3
MIN_SPLIT_TOKENS = 32
MAX_SPLITS = 64
MAX_QUERIES = 64
"""Rows of queries that a program holds: those of a request, each with the heads of its group."""


def num_splits(rows: int, num_kv_heads: int, capacity_tokens: int, device: torch.device) -> int:
    """Splits of the KV length that fill the device; fixed by the shapes, not by the data."""
    programs = rows * num_kv_heads
    long = capacity_tokens >= LONG_LIST_TOKENS
    resident = programs_to_fill(device, LONG_CTAS_PER_SM if long else CTAS_PER_SM)
    # Rounding down keeps all programs resident at once; one more would run alone at the end.
    fill = resident // programs
    if long and programs > resident:
        fill = -(-ROUNDS * resident // programs)
    useful = -(-capacity_tokens // MIN_SPLIT_TOKENS)
    return max(1, min(fill, useful, MAX_SPLITS))


def make_workspace(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: Device,
    *,
    queries: int = 1,
) -> torch.Tensor:
    """Scratch of :func:`gathered_decode_attention` for batches of up to ``max_rows`` rows.

    Args:
        max_rows: largest batch (R).
        num_heads: query heads (H * G) of this rank.
        num_kv_heads: KV heads (H) of this rank.
        head_dim: D.
        device: where it lives.
        queries: the most that a row has.

    Returns:
        A flat float32 tensor; partial outputs and their log-sum-exp live in it during a call.
    """
    # What several rounds take, and one program a row more than that.
    most = ROUNDS * programs_to_fill(torch.device(device), LONG_CTAS_PER_SM)
    programs = most + max_rows * num_kv_heads
    group = num_heads // num_kv_heads
    floats = programs * group * queries * (head_dim + 1)
    return torch.zeros(floats, dtype=torch.float32, device=device)
