# SPDX-License-Identifier: Apache-2.0
"""Verification of draft tokens: what differs from a decode step of one token a request.

SGLang's ``TARGET_VERIFY`` runs the last accepted token of each request and the drafts behind it,
a chain of equal length for all requests. ``ForwardBatch.seq_lens`` counts the tokens before them.
They select together, as the query heads of one group do, and all of them attend to what they
selected, to the tail, and causally to each other.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparse import compat
from sglang_sparse.backend.heads import Heads
from sglang_sparse.checks import refuse
from sglang_sparse_kernels.attend import MAX_QUERIES

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def most_queries(server_args: Any, heads: Heads) -> int:
    """Tokens that a step of this server runs for each request: 1 without speculation.

    Raises:
        ConfigError: the kernels do not take so many.
    """
    flags = compat.resolved(server_args)
    if flags.speculative_algorithm is None:
        return 1
    tokens, most = int(flags.speculative_num_draft_tokens), MAX_QUERIES * heads.kv // heads.query
    if tokens > most:
        raise refuse(
            "--speculative-num-draft-tokens",
            tokens,
            f"{most} or fewer with {heads.query // heads.kv} query heads a KV head",
            "lower it",
        )
    return tokens


def queries_of(forward_batch: ForwardBatch) -> int:
    """Tokens that a batch runs for each of its requests: 1 but for a verification."""
    if not forward_batch.forward_mode.is_target_verify():
        return 1
    return int(forward_batch.spec_info.num_tokens_per_req)


def first_lengths(forward_batch: ForwardBatch) -> torch.Tensor:
    """Tokens that each request's first query may attend to, itself included; on the device."""
    verifies = forward_batch.forward_mode.is_target_verify()
    return forward_batch.seq_lens + 1 if verifies else forward_batch.seq_lens


def as_extend(forward_batch: ForwardBatch, queries: int) -> ForwardBatch:
    """A verification of chains as the prefill that it is, for a backend that knows no other.

    SGLang's ``torch_native`` backend reads the lengths of a prefill. FlashInfer and Triton plan a
    verification themselves.
    """
    batch = copy(forward_batch)
    batch.extend_prefix_lens = forward_batch.seq_lens.to(torch.int32)
    batch.extend_seq_lens = torch.full_like(batch.extend_prefix_lens, queries)
    batch.seq_lens = forward_batch.seq_lens + queries
    return batch
