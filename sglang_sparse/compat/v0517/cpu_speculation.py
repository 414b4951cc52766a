# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of SGLang 0.5.17 on a plain CPU: its helpers of chains, in PyTorch.

SGLang has them as Triton and CUDA kernels, and as compiled kernels for its own CPU engine, which
PyPI does not carry. Seams: ``mem_cache/allocation.py: assign_req_to_token_pool_func``,
``kernels/ops/speculative/cache_locs.py: assign_extend_cache_locs_func``,
``speculative/eagle_utils.py: verify_tree_greedy_func``, and the one name that
``speculative/ngram_worker.py`` imports from ``sgl_kernel.speculative``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sglang_sparse.devices import is_plain_cpu

_KERNELS = "sgl_kernel.speculative"


def assign_rows(
    original: Callable[..., None],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """AROUND hook on ``allocation.assign_req_to_token_pool_func``: write new slots to the table."""
    if req_to_token.device.type != "cpu":
        original(
            req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
        )
        return
    done = 0
    for row, start, end in _ranges(req_pool_indices, start_offset, end_offset):
        slots = out_cache_loc[done : done + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        done += end - start


def extend_slots(
    original: Callable[..., torch.Tensor],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """AROUND hook on ``cache_locs.assign_extend_cache_locs_func``: slots of the given positions."""
    if req_to_token.device.type != "cpu":
        return original(req_pool_indices, req_to_token, start_offset, end_offset, **kwargs)
    ranges = _ranges(req_pool_indices, start_offset, end_offset)
    return torch.cat([req_to_token[row, start:end] for row, start, end in ranges]).long()


def verify_greedy(
    original: Callable[..., Any],
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    *args: torch.Tensor,
    target_predict: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AROUND hook on ``eagle_utils.verify_tree_greedy_func``: accept the drafts that the model
    would have decoded, and one token more.

    Args:
        original: SGLang's.
        predicts: int32 [rows * width], written: the model's token behind each accepted one.
        accept_index: int32 [rows, depth], written: where the accepted tokens lie; -1 behind them.
        accept_token_num: int32 [rows], written: accepted drafts.
        candidates: int64 [rows, width], chains; the first token is not a draft.
        args, kwargs: links of the trees, which chains do not need.
        target_predict: int64 [rows, width], what the model would decode behind each token.
    """
    if not candidates.is_cpu:
        return original(
            predicts,
            accept_index,
            accept_token_num,
            candidates,
            *args,
            target_predict=target_predict,
            **kwargs,
        )
    rows, width = candidates.shape
    agrees = (candidates[:, 1:] == target_predict[:, :-1]).long()
    accepted = agrees.cumprod(1).sum(1)
    here = torch.arange(width) <= accepted[:, None]
    first = torch.arange(rows)[:, None] * width
    index = torch.where(here, first + torch.arange(width), -1)
    accept_index[:, :width] = index[:, : accept_index.shape[1]].to(accept_index.dtype)
    predicts.copy_(torch.where(here, target_predict, 0).flatten())
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num


def provide_kernels() -> None:
    """On the CPU platform, put the one kernel that the n-gram worker imports where it looks.

    ``sgl_kernel`` itself cannot be imported without a GPU's driver, and stays so.
    """
    if not is_plain_cpu():
        return
    module = ModuleType(_KERNELS)
    module.reconstruct_indices_from_tree_mask = chain_indices  # type: ignore[attr-defined]
    sys.modules.setdefault(_KERNELS, module)


def chain_indices(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    rows: int,
    width: int,
) -> None:
    """Positions and links of chains, in the shape of SGLang's
    ``reconstruct_indices_from_tree_mask``.

    Raises:
        ValueError: a row of ``tree_mask`` is not a chain's.
    """
    causal = torch.ones((width, width), dtype=torch.bool).tril()
    if not (tree_mask.view(rows, width, width).bool() == causal).all():
        raise ValueError("draft tokens are a tree; only chains are verified here")
    steps = torch.arange(width)
    positions.copy_((seq_lens[:, None] + steps).flatten())
    retrieve_index.copy_(torch.arange(rows * width).view(rows, width))
    retrieve_next_token.copy_((steps + 1).where(steps + 1 < width, -1).expand(rows, width))
    retrieve_next_sibling.fill_(-1)


def _ranges(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
