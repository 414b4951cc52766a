# SPDX-License-Identifier: Apache-2.0
"""Hooks that keep drafts chains, and accepted rows where they were written."""

from collections.abc import Callable
from typing import Any

from sglang_sparse import compat
from sglang_sparse.launch import launch_of


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND hook on ``SpeculativeAlgorithm.create_worker``: n-grams are drafted as chains.

    Draft models draft chains by themselves.
    """
    if launch_of(server_args) is None:
        return original(algorithm, server_args)
    compat.current().prepare_draft_worker()
    if not algorithm.is_ngram():
        return original(algorithm, server_args)
    from sglang_sparse.speculation.ngram import ChainNGRAMWorker

    return ChainNGRAMWorker


def keep_accepted_rows(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND hook on ``spec_utils.move_accept_tokens_to_target_kvcache``.

    The accepted rows of a chain are its first ones, and lie where they belong. Those of a tree
    would be moved, under planes that do not follow; trees are refused.
    """
    if launch_of(compat.current_server_args()) is None:
        original(*args, **kwargs)
