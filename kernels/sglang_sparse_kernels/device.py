# SPDX-License-Identifier: Apache-2.0
"""How many programs fill a device: decided from shapes alone, before a graph is captured."""

from functools import cache

import torch

# On a CPU (Triton's interpreter) programs run one after another; two still show that work splits.
HOST_PROCESSORS = 2


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small constant for the interpreter."""
    if device.type != "cuda":
        return HOST_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_to_fill(device: torch.device, ctas_per_sm: int) -> int:
    """Programs that give every multiprocessor ``ctas_per_sm`` of them."""
    return multiprocessors(device) * (ctas_per_sm if device.type == "cuda" else 1)


def splits_of(row_heads: int, tiles: int, ctas_per_sm: int, device: torch.device) -> int:
    """Programs that share the tiles of a row and KV head, in a batch of ``row_heads`` of those."""
    # Rounding down keeps all programs resident at once; one more would run alone at the end.
    return max(1, min(programs_to_fill(device, ctas_per_sm) // row_heads, tiles))
