# SPDX-License-Identifier: Apache-2.0
"""Compares planes with values recomputed from the K rows of their pages, for tests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sglang_sparse_radix.planes import Plane


@dataclass(frozen=True, slots=True)
class PlaneMismatch:
    """One plane of one page that differs from recomputation."""

    plane: str
    layer: int
    page: int
    wrong_entries: int


def compare_planes(
    k_layers: Iterable[torch.Tensor],
    planes: Sequence[Plane],
    stored: dict[str, torch.Tensor],
    pages: torch.Tensor,
    valid_tokens: torch.Tensor | None,
    *,
    page_size: int,
) -> list[PlaneMismatch]:
    """Every (layer, page, plane) of `pages` that differs from what the plane must hold.

    Args:
        k_layers: per layer `[N, P, H, D]`, the K rows of `pages`.
        planes: what is kept.
        stored: its tensors by name, the layer axis first.
        pages: int64 `[N]`.
        valid_tokens: int64 `[N]`, written rows of each page (1..P), or None for whole pages.
        page_size: tokens.
    """
    if pages.numel() == 0 or not planes:
        return []
    if valid_tokens is None:
        valid_tokens = torch.full_like(pages, page_size)
    written = torch.arange(page_size, device=pages.device) < valid_tokens[:, None]  # [N, P]
    found: list[PlaneMismatch] = []
    for layer, rows in enumerate(k_layers):
        for plane in planes:
            for name, (values, defined, slack) in plane.expected(rows, written).items():
                held = plane.of_pages(name, stored[name][layer], pages, page_size)
                differs = held != values if slack is None else ~((held - values).abs() <= slack)
                wrong = differs & defined
                for row in wrong.flatten(1).any(1).nonzero().flatten().tolist():
                    count = int(wrong[row].sum())
                    found.append(PlaneMismatch(name, layer, int(pages[row]), count))
    return found
