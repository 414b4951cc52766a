# SPDX-License-Identifier: Apache-2.0
"""The ``sparse`` block of ``/server_info``: what runs, so that nobody has to guess."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_sparse.launch import launch_of
from sglang_sparse.metrics import publish_now


def add_sparse_block(result: Any, scheduler: Any, *args: Any) -> Any:
    """AFTER hook on ``Scheduler.get_internal_state``."""
    launch = launch_of(scheduler.server_args)
    if launch is not None:
        backend = scheduler.tp_worker.model_runner.attn_backend
        publish_now(scheduler)
        reuse = getattr(scheduler.tree_cache, "plane_reuse", None)  # none without a tree
        result.internal_state["sparse"] = {
            **backend.describe(),
            "plane_reuse": None if reuse is None else asdict(reuse),
        }
    return result
