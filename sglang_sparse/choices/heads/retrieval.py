# SPDX-License-Identifier: Apache-2.0
"""Heads `retrieval`: every KV head selects."""

from typing import Literal

from sglang_sparse.choices.interfaces import HeadsChoice


class RetrievalHeads(HeadsChoice):
    """Every KV head attends to what is selected."""

    kind: Literal["retrieval"] = "retrieval"
