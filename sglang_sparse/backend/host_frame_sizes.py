# SPDX-License-Identifier: Apache-2.0
"""How `placement.device_bytes` is divided: frames, pages that are written, copies for prompts."""

import logging
from collections import Counter
from dataclasses import dataclass

from sglang_sparse.backend.host_prompts import buffer_bytes
from sglang_sparse.checks import refuse
from sglang_sparse.choices.build import Limits
from sglang_sparse.config import SparseConfig
from sglang_sparse_kernels.frames import FoundFrames, FrameDemand
from sglang_sparse_radix.host_kv import HostKVPool

logger = logging.getLogger(__name__)

_INT32_BYTES = 4
# A frame's owner, stamp and place in the order, and whether it arrives.
_ORDER_BYTES = 4 * _INT32_BYTES
# With less a step finds hardly more than what the step before it read, see docs/host-memory.md.
_ENOUGH = 2
_LOWER = (
    "lower --max-running-requests, --context-length, --prefill-max-requests, the budget, "
    "min_sparse_tokens or page_size"
)


def pages_of_row(config: SparseConfig, list_units: int) -> tuple[int, int]:
    """(the most pages of a row's tail, the most that it reads).

    A row reads a list and the tokens since the last selection, or, if it is short, all its tokens.
    """
    page = config.page_size
    since = (config.cadence.every + page - 2) // page + 1
    short = -(-(config.min_sparse_tokens - 1) // page)
    return max(since, short), max(list_units + since, short)


@dataclass(frozen=True)
class FrameNeeds:
    """What frames and all beside them take.

    Attributes:
        demand: the most that a step touches; a page of each of its rows may be pinned.
        list_units, tail_pages: of a row and KV head.
        columns: of page tables.
        useful: frames for all blocks of the host, or for a step's if these are more.
        frame: bytes of a frame.
        fixed: bytes beside frames.
    """

    demand: FrameDemand
    list_units: int
    tail_pages: int
    columns: int
    useful: int
    frame: int
    fixed: int


def frame_needs(
    config: SparseConfig,
    pool: HostKVPool,
    limits: Limits,
    *,
    request_slots: int,
    max_context: int,
    copy_pages: int,
) -> FrameNeeds:
    """What frames of a server need.

    Args:
        config: the resolved configuration.
        pool: keys and values in host memory.
        limits: of a decode step.
        request_slots: rows of SGLang's request table.
        max_context: its columns.
        copy_pages: pages of the copy that prompts attend to, see :func:`pages_to_copy`.
    """
    units, columns = limits.capacity_units, -(-max_context // pool.page_size)
    tail, row_pages = pages_of_row(config, units)
    demand = FrameDemand(pool.layer_num, request_slots, pool.head_num, min(row_pages, columns))
    block = 2 * pool.page_size * pool.head_dim * pool.dtype.itemsize
    pinned = request_slots * demand.layers * demand.heads * (block + _INT32_BYTES)
    # Keys of pages that are being written lie in rows once more, for their planes.
    keys = pool.head_num * block // 2
    plane = pool.plane_spec.bytes_per_page(pool.head_num, pool.head_dim, pool.page_size, pool.dtype)
    written = request_slots * len(pool.plane_layers) * (keys + plane)
    table = request_slots * max_context * _INT32_BYTES
    prompts = buffer_bytes(pool, copy_pages) + table
    lookup = FoundFrames.of_rows(limits.rows_a_pass * pool.head_num, columns, units, tail, "meta")
    lookups = (1 + _fetched_ahead(config, pool, limits, request_slots)) * lookup.nbytes
    return FrameNeeds(
        demand, units, tail, columns,
        useful=max(demand.blocks, demand.layers * demand.heads * pool.num_pages),
        frame=block + _ORDER_BYTES,
        fixed=pinned + written + prompts + lookups,
    )  # fmt: skip


def _fetched_ahead(
    config: SparseConfig, pool: HostKVPool, limits: Limits, request_slots: int
) -> int:
    """The most layers behind one that selects, each of which has a lookup of its own."""
    if limits.rows_a_pass < request_slots:
        return 0
    roles = [config.layers.role(layer) for layer in range(pool.start_layer, pool.end_layer)]
    behind = Counter(role.source for role in roles if role.source is not None and not role.selects)
    return max(behind.values(), default=0)


def default_bytes(needs: FrameNeeds, free: int) -> int:
    """`placement.device_bytes` if unset: for four steps, or all blocks, or `free` bytes.

    Raises:
        ConfigError: two steps, or all blocks, take more than is free.
    """
    step = needs.demand.blocks
    most, least = (needs.fixed + needs.frame * min(n * step, needs.useful) for n in (4, 2))
    if free < least:
        raise refuse(
            "--sparse-config",
            "placement.device_bytes unset",
            f"where {least} bytes are free beside the planes, not {free}",
            f"two steps of {needs.demand.rows - 1} requests take so much: set it, raise "
            f"--mem-fraction-static, or {_LOWER}, or placement.host_bytes",
        )
    return min(most, free)


def frames_in(needs: FrameNeeds, device_bytes: int) -> int:
    """Frames for blocks of the host that `placement.device_bytes` has room for.

    Raises:
        ConfigError: they are too few for the most that one step touches.
    """
    demand, frame = needs.demand, needs.frame
    cached = (device_bytes - needs.fixed) // frame
    if cached < demand.blocks:
        least = needs.fixed + demand.blocks * frame
        raise refuse(
            "--sparse-config",
            f"placement.device_bytes={device_bytes}",
            f"at least {least}",
            f"a step of {demand.rows} requests touches up to {demand.row_pages} pages in "
            f"{demand.layers} layers of {demand.heads} KV heads: raise it, or {_LOWER}",
        )
    if cached < min(_ENOUGH * demand.blocks, needs.useful):
        logger.warning(
            "sglang-sparse: frames hold %.1f times what a step of %d requests may touch, so a full "
            "batch loads much of what it reads from host memory. They hold %d times as much with "
            "--max-running-requests %d, a smaller budget, or more placement.device_bytes",
            cached / demand.blocks, demand.rows - 1, _ENOUGH,
            max(1, cached // (_ENOUGH * demand.blocks // demand.rows) - 1),
        )  # fmt: skip
    return min(cached, needs.useful)


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
    if 0 < device_bytes < buffer_bytes(pool, pages):
        raise refuse(
            "--sparse-config",
            f"placement.device_bytes={device_bytes}",
            f"more than {buffer_bytes(pool, pages)}",
            f"a prefill of {pages // longest} prompts takes so much beside the frames: raise it, "
            "or lower --prefill-max-requests or --context-length",
        )
    return pages
