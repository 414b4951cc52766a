# SPDX-License-Identifier: Apache-2.0
"""The ``sparse`` block of ``/server_info``, with the facts and counts of the server."""

import os
from dataclasses import asdict
from typing import Any

from sglang_sparse import ranks
from sglang_sparse.launch import launch_of
from sglang_sparse.metrics import publish_now

# What differs between ranks.
_OF_A_RANK = (
    *("first_kv_head", "kv_heads", "decode_steps", "prefill_batches", "plane_reuse"),
    *("plane_bytes", "kv_bytes", "state_bytes", "progress", "fidelity", "plane_check"),
)
VERIFY = "SGLANG_SPARSE_VERIFY"  # 1: compare the tree's planes with recomputation, for tests


def add_sparse_block(result: Any, scheduler: Any, *args: Any) -> Any:
    """AFTER hook on ``Scheduler.get_internal_state``, which every rank of a server runs.

    SGLang answers with the first rank's block. Counts of lists are added up over ranks, and
    ``ranks`` lists the values of each rank.
    """
    launch = launch_of(scheduler.server_args)
    if launch is not None:
        backend = scheduler.tp_worker.model_runner.attn_backend
        reached = ranks.reached(backend.reached())
        publish_now(scheduler, reached)
        reuse = getattr(scheduler.tree_cache, "plane_reuse", None)  # none without a tree
        block = {
            **backend.describe(),
            "plane_reuse": None if reuse is None else asdict(reuse),
        }
        check = getattr(scheduler.tree_cache, "check_planes", None)
        if os.environ.get(VERIFY) == "1" and check is not None:
            block["plane_check"] = check()
        result.internal_state["sparse"] = _over_ranks(block, reached)
    return result


def _over_ranks(block: dict[str, Any], reached: ranks.Sums | None) -> dict[str, Any]:
    """``block`` with the sums over the lists of all ranks."""
    mine = {key: block[key] for key in _OF_A_RANK if key in block}
    parts = ranks.gather(mine)
    whole = block | {"ranks": parts}
    if reached is not None:
        whole["progress"] = {str(layer): sums for layer, sums in reached.items()}
    if block["fidelity"] is not None:
        whole["fidelity"] = ranks.mean_fidelity(part["fidelity"] for part in parts)
    if "plane_check" in block:
        wrong = sum(part["plane_check"]["wrong"] for part in parts)
        whole["plane_check"] = {"pages": block["plane_check"]["pages"], "wrong": wrong}
    return whole
