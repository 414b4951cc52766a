# SPDX-License-Identifier: Apache-2.0
"""Two decode graphs a batch size: one dense, one sparse.

A captured graph cannot branch, and a kernel that finds nothing to do still costs a launch in every
layer. So each batch size is captured twice. A batch whose rows are all short replays the dense
graph, which holds the inner backend's kernels and one plane update a step. The host picks the graph
from ``seq_lens_cpu``, without a sync.

The hooks that make SGLang capture and pick the graphs differ by version: see ``graphs.py`` of each
version in :mod:`sglang_sparse.compat`.
"""

from typing import Literal

Variant = Literal["dense", "sparse"]
VARIANTS: tuple[Variant, ...] = ("sparse", "dense")
