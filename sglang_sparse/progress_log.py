# SPDX-License-Identifier: Apache-2.0
"""Logs a line about progressive attention at SGLang's logging interval."""

import logging
from collections.abc import Mapping
from typing import Any

from sglang_sparse import ranks
from sglang_sparse.launch import launch_of

logger = logging.getLogger(__name__)

Sums = Mapping[int, Mapping[str, int]]


def after_decode(result: None, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on ``SchedulerMetricsReporter.report_decode_stats``, which runs at every step.

    It reads the counters without waiting for the device, one interval late. Every rank runs it at
    the same steps, so the sums of all ranks' heads are added up here.
    """
    if reporter.forward_ct_decode % reporter.decode_log_interval:
        return
    if launch_of(reporter.scheduler.server_args) is None:
        return
    backend = reporter.scheduler.tp_worker.model_runner.attn_backend
    if backend.progress is None:
        return
    sums = ranks.reached(backend.progress.poll())
    if sums is None:
        return
    before: Sums = getattr(reporter, "_sparse_progress", {})  # the same if none came since
    reporter._sparse_progress = sums
    text = line(before, sums)
    if text is not None and reporter.is_stats_logging_rank:
        logger.info(text)


def last(reporter: Any) -> dict[int, dict[str, int]] | None:
    """The sums over the heads of all ranks at the last interval; None before the first."""
    found: dict[int, dict[str, int]] | None = getattr(reporter, "_sparse_progress", None)
    return found


def line(before: Sums, after: Sums) -> str | None:
    """What changed between two readings, in words; None if no list was attended to."""
    total: dict[str, int] = {}
    parts = []
    for layer, sums in after.items():
        change = {name: count - before.get(layer, {}).get(name, 0) for name, count in sums.items()}
        if change["pairs"] == 0:
            continue
        parts.append(f"{layer}: {change['blocks'] / change['domain_blocks']:.1%}")
        for name, count in change.items():
            total[name] = total.get(name, 0) + count
    if not parts:
        return None
    pairs = total["pairs"]
    return (
        f"Sparse decode, #lists: {pairs}, blocks attended: {total['blocks'] / pairs:.1f} of "
        f"{total['domain_blocks'] / pairs:.1f}, estimated share: "
        f"{total['share_millionths'] / pairs / 1e6:.3f}, cap hits: {total['cap_hits']}, "
        f"blocks by layer: {', '.join(parts)}"
    )
