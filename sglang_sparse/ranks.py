# SPDX-License-Identifier: Apache-2.0
"""Adds up the counts of tensor-parallel ranks.

Each rank has some of the KV heads and counts for them. Where several have the same one, each
selects from it by query heads of its own, so the lists of all of them count. Counts that follow
from the plan of a batch (rows, tokens, steps, reuse of prefixes) are the same on every rank and are
not added up. The functions are collective: every rank calls them, at the same step or for the same
request.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_sparse import compat

Sums = dict[int, dict[str, int]]


def gather(mine: Any) -> list[Any]:
    """The values of all ranks, in their order, exchanged over the CPU's process group."""
    group, ranks = compat.tensor_group()
    if ranks == 1:
        return [mine]
    import torch.distributed

    values: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(values, mine, group=group)
    return values


def reached(mine: Sums | None) -> Sums | None:
    """Sums over the lists of all ranks, by layer and name; None if a rank has none yet."""
    return add_up(gather(mine))


def add_up(parts: Iterable[Sums | None]) -> Sums | None:
    """Sums by layer and name; None if a part is."""
    total: Sums = {}
    for part in parts:
        if part is None:
            return None
        for layer, sums in part.items():
            kept = total.setdefault(layer, dict.fromkeys(sums, 0))
            for name, count in sums.items():
                kept[name] += count
    return total


def mean_fidelity(
    parts: Iterable[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    """Reports of :class:`.backend.probe.FidelityProbe` over the lists of all ranks, by layer."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        for layer, one in part.items():
            if layer not in found:
                found[layer] = dict(one)
                continue
            kept = found[layer]
            pairs = kept["pairs"] + one["pairs"]
            for name in one.keys() - {"pairs", "kernel_error"}:
                kept[name] = (kept[name] * kept["pairs"] + one[name] * one["pairs"]) / pairs
            kept["kernel_error"] = max(kept["kernel_error"], one["kernel_error"])
            kept["pairs"] = pairs
    return found
