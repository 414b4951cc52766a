# SPDX-License-Identifier: Apache-2.0
"""Exact attention probabilities of a decode step as scores, pooled after the softmax (Kascade)."""

from .api import POOLS, Pool, exact_score, lists_of
from .types import ExactWorkspace, make_exact_workspace

__all__ = [
    "POOLS",
    "ExactWorkspace",
    "Pool",
    "exact_score",
    "lists_of",
    "make_exact_workspace",
]
