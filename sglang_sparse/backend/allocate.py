# SPDX-License-Identifier: Apache-2.0
"""Sizes of the decode path's buffers: fixed capacity, allocated once, addressed by graphs."""

import torch

from sglang_sparse.backend.heads import Heads, head_kinds
from sglang_sparse.checks import refuse
from sglang_sparse.choices.build import Build, Columns, Limits
from sglang_sparse.choices.interfaces import PassShape
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.common import Impl
from sglang_sparse_kernels.records import Always
from sglang_sparse_kernels.step import selecting_queries
from sglang_sparse_radix.pool import SparseMHATokenToKVPool

# Scores of one pass over the rows. Longer batches take several passes over the same buffer, so
# that 1M-token contexts times hundreds of requests do not reserve gigabytes.
_SCORE_BYTES = 512 << 20
_MAX_ROWS_A_PASS = 256
_ROWS_APART = 4
SCORE_ALIGNMENT = 16  # scores of a row start on a 64-byte line, so that kernels load them whole
# Selections kept across steps are not part of SGLang's memory sizing, so they must stay small.
MOST_KEPT_BYTES = 4 << 30


def limits_of(
    config: SparseConfig, heads: Heads, *, max_context: int, max_rows: int, queries: int = 1
) -> Limits:
    """Limits of one server.

    Args:
        config: the resolved configuration.
        heads: of this rank.
        max_context: tokens of the longest request.
        max_rows: the most requests that run at once.
        queries: the most tokens that a step runs for one request.
    """
    units = -(-max_context // config.unit)
    max_units = -(-units // SCORE_ALIGNMENT) * SCORE_ALIGNMENT
    capacity = config.capacity_units(max_context)
    lists = config.score.lists(heads.kv)
    group = heads.query // heads.kv
    selecting = group * len(selecting_queries(queries, group))
    floats = lists + heads.kv * config.score.scratch(selecting)
    rows = _SCORE_BYTES // (floats * max_units * torch.float32.itemsize)
    if rows >= _ROWS_APART:
        # Where a pass starts, vectors of a plan stay aligned: kernels of the first one fit.
        rows -= rows % _ROWS_APART
    rows = max(1, min(rows, _MAX_ROWS_A_PASS, max_rows))
    most = config.budget.rows_a_pass(
        PassShape(capacity, config.unit, heads.query, heads.kv, heads.dim)
    )
    return Limits(
        max_units=max_units,
        capacity_units=capacity,
        rows_a_pass=rows if most is None else min(rows, most),
        lists=lists,
        queries=queries,
    )


def kept_sets(config: SparseConfig, layers: range) -> int:
    """How many sets of lists are kept by request slot.

    If selections outlive their step, there is one set for each selecting layer. If only later
    layers
    of the same step read them, one set is enough: the next anchor overwrites it after its last
    reader. If neither, there is none.
    """
    roles = [config.layers.role(layer) for layer in layers]
    if config.cadence.every > 1:
        return sum(role.selects for role in roles)
    return int(any(role.source is not None and not role.selects for role in roles))


def kept_bytes(limits: Limits, *, sets: int, request_slots: int) -> int:
    """Bytes of lists that outlive their layer."""
    return sets * request_slots * limits.lists * limits.capacity_units * torch.int32.itemsize


def allocate(
    config: SparseConfig,
    pool: SparseMHATokenToKVPool,
    heads: Heads,
    columns: Columns,
    *,
    max_context: int,
    impl: Impl,
    queries: int = 1,
) -> Build:
    """The buffers that every layer of this server reads and writes.

    Args:
        config: the resolved configuration.
        pool: the KV pool with its planes.
        heads: of this rank.
        columns: state of requests.
        max_context: tokens of the longest request.
        impl: kernels or their references.
        queries: the most tokens that a step runs for one request.

    Raises:
        ConfigError: lists that outlive their layer would take too much memory.
    """
    slots, layers = columns.request_slots, range(pool.start_layer, pool.end_layer)
    limits = limits_of(config, heads, max_context=max_context, max_rows=slots, queries=queries)
    sets = kept_sets(config, layers)
    kept = kept_bytes(limits, sets=sets, request_slots=slots)
    if kept > MOST_KEPT_BYTES:
        every = config.cadence.every
        raise refuse(
            "--sparse-config",
            f"cadence.every={every}" if every > 1 else f"layers.kind={config.layers.kind}",
            f"kept selections of {MOST_KEPT_BYTES >> 30} GiB or less",
            f"these would take {kept / 2**30:.1f} GiB: lower --max-running-requests "
            f"(now {slots - 1}), --context-length or the budget"
            + (", or set cadence.every to 1" if every > 1 else ""),
        )
    return Build.allocate(
        pool,
        impl,
        query_heads=heads.query,
        unit=config.unit,
        always=Always(config.sink_tokens, config.recent_tokens),
        layers=tuple(layer for layer in layers if config.layers.role(layer).selects),
        limits=limits,
        columns=columns,
        kinds=head_kinds(config, layers, heads, lists=limits.lists, device=columns.device),
        sets=sets,
    )
