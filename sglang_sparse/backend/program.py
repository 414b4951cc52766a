# SPDX-License-Identifier: Apache-2.0
"""The layers axis at run time: a short list of stages for each layer, compiled once at start."""

import torch

from sglang_sparse.backend.heads import lists_of_heads
from sglang_sparse.backend.probe import FidelityProbe, Observe
from sglang_sparse.choices.build import Build, LayerProgram
from sglang_sparse.choices.interfaces import BudgetRun, ScoreRun
from sglang_sparse.choices.role import Role
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.records import HeadWindows
from sglang_sparse_kernels.step import Stage


def compile_programs(
    config: SparseConfig,
    build: Build,
    score: ScoreRun,
    budget: BudgetRun,
    *,
    first_head: int = 0,
    probe: FidelityProbe | None = None,
) -> dict[int, LayerProgram]:
    """One program for each layer that selects or attends to a selection, by global layer id.

    Args:
        config: the resolved configuration.
        build: the buffers of this server.
        score, budget: its choices at run time.
        first_head: global id of this rank's first KV head.
        probe: see :mod:`sglang_sparse.backend.probe`; None for none.
    """
    pool, programs = build.pool, {}
    layers = range(pool.start_layer, pool.end_layer)
    head_maps = {layer: _head_map(config.layers.role(layer), build, first_head) for layer in layers}
    attending: dict[int, Stage] = {}
    for layer in layers:
        role = config.layers.role(layer)
        writer = layer if role.selects else role.source
        if writer is None:
            continue
        attends = role.source is not None
        if role.selects:
            reusing = [
                later
                for later in layers
                if config.layers.role(later).source == layer
                and not config.layers.role(later).selects
            ]
            last, each = build.attend_again(reusing, [head_maps[later] for later in reusing])
            attending |= dict(zip(reusing, each, strict=True))
            stages = [score.stage(layer), *budget.stages(layer, attends=attends), *last]
        else:
            stages = [attending[layer]]
        if attends and probe is not None:
            stages.append(Observe(probe, layer))
        indices, counts = build.lists.set_of(build.layers.index(writer))
        k, v = build.kv_rows(layer)
        programs[layer] = LayerProgram(
            layer=layer,
            role=role,
            stages=tuple(stages),
            indices=indices,
            counts=counts,
            head_map=head_maps[layer],
            k=k,
            v=v,
            windows=_windows(build, layer, attends=attends),
        )
    return programs


def _head_map(role: Role, build: Build, first_head: int) -> torch.Tensor | None:
    """int32 [kv_heads] of this rank, or None if each head reads its own list."""
    if build.limits.lists > 1 and role.heads is None:
        return None
    heads = range(first_head, first_head + build.pool.head_num)
    taken = lists_of_heads(role, heads, build.limits.lists)
    return torch.tensor(taken, dtype=torch.int32, device=build.device)


def _windows(build: Build, layer: int, *, attends: bool) -> HeadWindows | None:
    """KV heads of a layer that attend to no list; where it only selects, lists that nobody reads.

    An empty window is all that is left of those: no stop is looked for.
    """
    if attends:
        return build.kinds.windows.get(layer)
    unread = build.kinds.unread.get(layer)
    shared = build.limits.lists != build.pool.head_num
    return None if unread is None or shared else HeadWindows(unread, 0, 0)
