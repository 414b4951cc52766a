# SPDX-License-Identifier: Apache-2.0
"""PSA as in the paper: blocks of 32 tokens, the smallest mass seen so far, a share of 0.95.

An independent implementation finds the same stops. Where what is left is reckoned from scores, as
in the reference preset, they follow from digests that the pool has rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_sparse.config import load_preset
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.preset_study import policy_of

PAPER: dict[str, Any] = {
    "score": {"logical_page": 32},
    "budget": {"epsilon": 0.95, "cap": 4096, "estimator": "observed_min", "margin": 0},
}


def served_policy(method: str) -> Policy:
    """What a test's server of a method attends to: the reference preset; `psa` as in the paper."""
    policy = policy_of(load_preset("reference", method))
    if method != "psa":
        return policy
    return replace(policy, page=32, budget=4096, epsilon=0.95, margin=None)
