# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size: one dense, one sparse.

A captured graph cannot branch, and kernels that only find out that they have nothing to do still
cost a launch in every layer. So each batch size is captured twice, and a batch whose rows are all
short replays the dense graph: the inner backend's kernels, as if this package were not there, plus
one plane update a step. Which graph is known on the host, from ``seq_lens_cpu``, without a sync.

How SGLang is brought to capture and pick them differs by version: ``graphs.py`` in
:mod:`sglang_sparse.compat`.
"""

from __future__ import annotations

from typing import Literal

Variant = Literal["dense", "sparse"]
VARIANTS: tuple[Variant, ...] = ("sparse", "dense")
