# SPDX-License-Identifier: Apache-2.0
"""What a device can do: decided from shapes alone, before a graph is captured."""

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


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it has ended: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch that begins before the one before it has ended, where that exists.

    The kernel takes OVERLAP as a constant and calls :func:`wait_for_previous` first. That pays for
    grids so small that they wait beside the one before; larger ones are spread unevenly.
    """
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


def programs_to_fill(device: torch.device, ctas_per_sm: int) -> int:
    """Programs that give every multiprocessor ``ctas_per_sm`` of them."""
    return multiprocessors(device) * (ctas_per_sm if device.type == "cuda" else 1)
