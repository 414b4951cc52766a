# SPDX-License-Identifier: Apache-2.0
"""The ``sparse`` block of ``/server_info``: what runs, so that nobody has to guess."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from sglang_sparse.launch import launch_of
from sglang_sparse.metrics import publish_now

VERIFY = "SGLANG_SPARSE_VERIFY"  # 1: compare the tree's planes with recomputation, for tests


def add_sparse_block(result: Any, scheduler: Any, *args: Any) -> Any:
    """AFTER hook on ``Scheduler.get_internal_state``."""
    launch = launch_of(scheduler.server_args)
    if launch is not None:
        backend = scheduler.tp_worker.model_runner.attn_backend
        publish_now(scheduler)
        reuse = getattr(scheduler.tree_cache, "plane_reuse", None)  # none without a tree
        block = {
            **backend.describe(),
            "plane_reuse": None if reuse is None else asdict(reuse),
        }
        if os.environ.get(VERIFY) == "1" and reuse is not None:
            block["plane_check"] = scheduler.tree_cache.check_planes()
        result.internal_state["sparse"] = block
    return result
