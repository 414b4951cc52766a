# SPDX-License-Identifier: Apache-2.0
"""How `placement.device_bytes` is divided: frames, pages that are written, copies for prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_sparse.backend.host_prompts import buffer_bytes
from sglang_sparse.checks import refuse
from sglang_sparse.choices.build import Limits
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.frames import FrameDemand
from sglang_sparse_radix.host_kv import HostKVPool

logger = logging.getLogger(__name__)

_ORDER_BYTES = 12  # a frame's owner, stamp and place in the order
# With less a step finds hardly more than what the step before it read, see docs/host-memory.md.
_ENOUGH = 2


@dataclass(frozen=True)
class FrameSizes:
    """How device memory for keys and values is divided.

    Attributes:
        demand: the most that a step touches.
        list_units, tail_pages: of a row and KV head.
        columns: of page tables.
        cached: frames for blocks of the host.
        pinned_pages: pages that requests write to.
    """

    demand: FrameDemand
    list_units: int
    tail_pages: int
    columns: int
    cached: int
    pinned_pages: int


def pages_of_row(config: SparseConfig, list_units: int) -> tuple[int, int]:
    """(the most pages of a row's tail, the most that it reads).

    A row reads a list and the tokens since the last selection, or, if it is short, all its tokens.
    """
    page = config.page_size
    since = (config.cadence.every + page - 2) // page + 1
    short = -(-(config.min_sparse_tokens - 1) // page)
    return max(since, short), max(list_units + since, short)


def frame_sizes(
    config: SparseConfig,
    pool: HostKVPool,
    limits: Limits,
    *,
    request_slots: int,
    max_context: int,
    copy_pages: int,
) -> FrameSizes:
    """Divide `placement.device_bytes`.

    Args:
        config: the resolved configuration.
        pool: keys and values in host memory.
        limits: of a decode step.
        request_slots: rows of SGLang's request table.
        max_context: its columns.
        copy_pages: pages of the copy that prompts attend to, see :func:`pages_to_copy`.

    Raises:
        ConfigError: it is too little for the most that one step touches.
    """
    layers, heads, page = pool.layer_num, pool.head_num, pool.page_size
    units, columns = limits.capacity_units, -(-max_context // page)
    tail, row_pages = pages_of_row(config, units)
    row_pages = min(row_pages, columns)
    demand = FrameDemand(layers, request_slots, heads, row_pages)
    block = 2 * page * pool.head_dim * pool.dtype.itemsize
    # Keys of pages that are being written lie in rows once more, for their planes.
    pinned = request_slots * layers * heads * (block + block // 2)
    fixed = pinned + buffer_bytes(pool, copy_pages)
    device_bytes, _ = config.placement.room
    cached = (device_bytes - fixed) // (block + _ORDER_BYTES)
    if cached < demand.blocks:
        least = fixed + demand.blocks * (block + _ORDER_BYTES)
        raise refuse(
            "--sparse-config",
            f"placement.device_bytes={device_bytes}",
            f"at least {least}",
            f"a step of {request_slots} requests touches up to {row_pages} pages in {layers} "
            f"layers of {heads} KV heads: raise it, or lower --max-running-requests, "
            "--context-length, --prefill-max-requests, the budget, min_sparse_tokens or page_size",
        )
    # More frames than blocks would never be used.
    every = layers * pool.num_pages * heads
    if cached < min(_ENOUGH * demand.blocks, every):
        logger.warning(
            "sglang-sparse: frames hold %.1f times what a step of %d requests may touch, so a full "
            "batch loads much of what it reads from host memory. They hold %d times as much with "
            "--max-running-requests %d, a smaller budget, or more placement.device_bytes",
            cached / demand.blocks, request_slots - 1, _ENOUGH,
            max(1, cached // (_ENOUGH * demand.blocks // request_slots) - 1),
        )  # fmt: skip
    cached = min(cached, max(demand.blocks, every))
    return FrameSizes(demand, units, tail, columns, cached, request_slots)


def pages_to_copy(
    config: SparseConfig, pool: HostKVPool, *, request_slots: int, max_context: int, prompts: int
) -> int:
    """Pages of the copy that the prompts of a batch attend to, each as long as a request may be.

    Args:
        config: the resolved configuration.
        pool: keys and values in host memory.
        request_slots: rows of SGLang's request table, one of them padding.
        max_context: its columns.
        prompts: the most in a batch; there are never more than requests.

    Raises:
        ConfigError: the copy alone exceeds `placement.device_bytes`.
    """
    longest = min(-(-max_context // pool.page_size), pool.num_pages)
    pages = min(prompts, request_slots - 1) * longest
    device_bytes, _ = config.placement.room
    if buffer_bytes(pool, pages) > device_bytes:
        raise refuse(
            "--sparse-config",
            f"placement.device_bytes={device_bytes}",
            f"more than {buffer_bytes(pool, pages)}",
            f"a prefill of {pages // longest} prompts takes so much beside the frames: raise it, "
            "or lower --prefill-max-requests or --context-length",
        )
    return pages
