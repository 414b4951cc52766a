# SPDX-License-Identifier: Apache-2.0
"""Serves with one rank that computes and adds its projections as several ranks do.

    RANKS_IN_ONE=2 python3 loadtest/ranks_in_one.py --model-path MODEL ...

The flags are those of ``sglang.launch_server``. Each projection takes as many products as there
would be ranks, with the weights that each of them has; what ranks add is added in the model's
dtype, in their order. So the server rounds where two ranks round (of more, the library that adds
chooses an order). What it answers otherwise than a server with whole projections is the work of
rounding alone: it has one process, one KV pool, and all heads.

Every process of the server imports this file, and so computes in parts.
"""

import os
import runpy
import sys
from functools import reduce
from itertools import chain
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # so that no script here is taken for a package of that name

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

_whole = UnquantizedLinearMethod.apply


def in_parts(
    method: UnquantizedLinearMethod, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``x [tokens, inputs]`` times the layer's weight, as so many ranks compute it.

    Raises:
        ValueError: a bias, which the models that are compared do not have.
    """
    if not isinstance(layer, RowParallelLinear | QKVParallelLinear | MergedColumnParallelLinear):
        return _whole(method, layer, x, bias)
    if bias is not None:
        raise ValueError("a projection with a bias is not computed in parts")
    ranks = int(os.environ["RANKS_IN_ONE"])
    if isinstance(layer, RowParallelLinear):
        pairs = zip(x.chunk(ranks, -1), layer.weight.chunk(ranks, 1), strict=True)
        return reduce(torch.add, (F.linear(a.contiguous(), b.contiguous()) for a, b in pairs))
    # Of each of the projections that are one weight, a rank has a share of the outputs.
    sizes = layer.output_partition_sizes
    shares = [part.chunk(ranks) for part in layer.weight.split(sizes)]
    outputs = [F.linear(x, torch.cat(own)) for own in zip(*shares, strict=True)]
    by_rank = [y.split([size // ranks for size in sizes], -1) for y in outputs]
    return torch.cat([*chain(*zip(*by_rank, strict=True))], -1)


if __name__ in ("__main__", "__mp_main__"):  # the first process, and those that it spawns
    UnquantizedLinearMethod.apply = in_parts
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
