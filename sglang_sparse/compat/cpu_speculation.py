# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of SGLang on a plain CPU: its helpers of chains, in PyTorch.

SGLang has them as Triton and CUDA kernels, and as compiled kernels for its own CPU engine, which
PyPI does not carry. Seams: ``mem_cache/allocation.py: assign_req_to_token_pool_func`` and
``get_last_loc``,
``kernels/ops/speculative/cache_locs.py: assign_extend_cache_locs_func``,
``speculative/eagle_utils.py: verify_tree_greedy_func`` and ``build_tree_kernel_efficient``,
``speculative/spec_utils.py: select_top_k_tokens``, which SGLang compiles,
``kernels/ops/speculative/eagle.py: fill_bonus_tokens_func``, and the one name that n-grams need
from ``sgl_kernel.speculative``. For slots of a step, which drafts and their verification write,
0.5.23 has ``cache_locs.py: assign_draft_cache_locs_contiguous_func``;
``speculative/eagle_worker_common.py: prepare_for_draft`` of 0.5.17 takes those of SGLang's own CPU
engine. ``mem_cache/memory_pool.py: MHATokenToKVPool`` of 0.5.23 prepares to move rows.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sglang_sparse.devices import is_plain_cpu

_KERNELS = "sgl_kernel.speculative"


def get_last_loc(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    """AROUND hook on ``mem_cache.allocation.get_last_loc``: its PyTorch form on the CPU."""
    if req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


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


def build_chains(
    original: Callable[..., Any],
    bonus_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_sum: int,
    topk: int,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """AROUND hook on ``eagle_utils.build_tree_kernel_efficient``: the drafts behind each token.

    Args:
        original: SGLang's.
        bonus_tokens: int [rows], the last accepted token of each row.
        parent_list, top_scores_index: of trees; those of a chain say nothing.
        draft_tokens: int64 [rows, steps].
        seq_lens: int64 [rows], tokens before the last accepted one.
        seq_lens_sum: their sum, by which masks of trees are sized.
        topk: branches of a node.
        args, kwargs: sizes of the tree, and the layout of its mask.

    Returns:
        Mask (bool), positions, three tables of links and tokens (int64), as SGLang's.

    Raises:
        ValueError: the drafts are trees.
    """
    if not draft_tokens.is_cpu:
        return original(
            bonus_tokens,
            parent_list,
            top_scores_index,
            draft_tokens,
            seq_lens,
            seq_lens_sum,
            topk,
            *args,
            **kwargs,
        )
    if topk != 1:
        raise ValueError("draft tokens are a tree; only chains are verified here")
    tokens = torch.cat((bonus_tokens[:, None], draft_tokens), dim=1)
    rows, width = tokens.shape
    mask = torch.ones((width, width), dtype=torch.bool).tril().repeat(rows, 1, 1).flatten()
    positions = torch.empty(rows * width, dtype=torch.int64)
    links = [torch.empty((rows, width), dtype=torch.int64) for _ in range(3)]
    chain_indices(mask, seq_lens, positions, links[0], links[1], links[2], rows, width)
    return mask, positions, *links, tokens.flatten()


def extend_chains(
    original: Callable[..., Any],
    step: int,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    hidden_states: torch.Tensor | None,
    scores: torch.Tensor | None,
    topk: int,
) -> tuple[Any, ...]:
    """AROUND hook on ``spec_utils.select_top_k_tokens``: the next token of each chain.

    Args:
        original: SGLang's.
        step: tokens drafted before.
        topk_p: fp32 [rows, 1], probability of the next token.
        topk_index: int64 [rows, 1], the next token.
        hidden_states: [rows, hidden], or None.
        scores: fp32 [rows, 1], probability of the chain so far; None in the first step.
        topk: branches of a node.

    Returns:
        Input tokens, hidden states, probability of the chain, and what SGLang notes of a tree.
    """
    if not topk_index.is_cpu or topk != 1 or scores is None:
        return original(step, topk_p, topk_index, hidden_states, scores, topk)
    chain = scores * topk_p
    parents = torch.full_like(topk_index, step)
    return topk_index.flatten(), hidden_states, chain, (chain[:, None], topk_index, parents)


def last_accepted(
    original: Callable[..., None],
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """AROUND hook on ``eagle.fill_bonus_tokens_func``: the last accepted token of each row.

    Args:
        original: SGLang's.
        accept_tokens: int32 [rows * accept_stride], accepted tokens, then others.
        accept_lens: int32 [rows], how many are accepted.
        bonus_tokens: int32 [rows], written.
        accept_stride: tokens a row.
        batch_size: rows.
    """
    if not accept_tokens.is_cpu:
        original(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size)
        return
    rows = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def draft_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Slots behind each row, in the shape of SGLang's ``assign_draft_cache_locs_contiguous_cpu``.

    Args:
        req_pool_indices: int64 [rows].
        req_to_token: int32 [request slots, pool_len].
        seq_lens: int64 [rows].
        out_cache_loc: int64 [rows * topk * steps], written.
        pool_len: width of ``req_to_token``.
        topk, steps: drafted tokens a row are their product.
    """
    behind = seq_lens[:, None] + torch.arange(topk * steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], behind].flatten())


def draft_window(
    original: Callable[..., None],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    **kwargs: Any,
) -> None:
    """AROUND hook on ``cache_locs.assign_draft_cache_locs_contiguous_func``: slots of a step.

    Verification and the draft model's extension write those of the drafts, and one more.

    Args:
        original: SGLang's.
        req_pool_indices: int64 [rows].
        req_to_token: int32 [request slots, max context].
        seq_lens: int64 [rows].
        out_cache_loc: int64 [rows * topk * num_cols], written.
        topk, num_cols: slots a row are their product.
        kwargs: positions to write, which SGLang asks for on a GPU alone.
    """
    if not out_cache_loc.is_cpu:
        original(req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, **kwargs)
        return
    width = req_to_token.shape[1]
    draft_slots(req_pool_indices, req_to_token, seq_lens, out_cache_loc, width, topk, num_cols)


def prepare_copies(original: Callable[..., None], pool: Any) -> None:
    """AROUND hook on ``MHATokenToKVPool._init_kv_copy_and_warmup``: rows of chains stay in place.

    A pool of a server that speculates launches the kernel that moves rows of trees.
    """
    if torch.device(pool.device).type == "cpu":
        pool._kv_copy_config = None
    else:
        original(pool)


def provide_kernels() -> bool:
    """On the CPU platform, put the kernel there that SGLang imports for n-grams.

    ``sgl_kernel`` itself cannot be imported without a GPU's driver, and stays so.

    Returns:
        Whether this is the CPU platform.
    """
    if not is_plain_cpu():
        return False
    module = ModuleType(_KERNELS)
    module.reconstruct_indices_from_tree_mask = chain_indices  # type: ignore[attr-defined]
    sys.modules.setdefault(_KERNELS, module)
    return True


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
