# SPDX-License-Identifier: Apache-2.0
"""Public decode attention: validate, then dispatch to the implementation asked for."""

import torch

from ..common import IMPLS, Impl, check_choice, check_contiguous, check_dtype, check_shape
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from .cpu import gathered_decode_attention_cpu
from .reference import gathered_decode_attention_reference
from .types import MAX_QUERIES


def gathered_decode_attention(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    lists: Lists,
    *,
    softmax: Softmax,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    queries: int = 1,
    impl: Impl,
) -> None:
    """Softmax attention over the listed units and the contiguous tail (SparCas section 3.4).

    KV head h of row r attends to two sets of positions: the tail [tail_start, seq_len), and the
    positions below tail_start of the units ``indices[rows[r], h, :counts[rows[r], h]]`` of
    ``lists``.

    - A row with k_units 0 has an empty list, whatever its count says.
    - A row with tail_start 0 is dense.
    - With a ``head_map``, KV head h reads list ``head_map[h]`` (Kascade section 3.5).
    - A streaming head of ``lists.windows`` reads no list. In a row that selects, it attends to its
      sinks and its window.

    A row may have several queries. They are consecutive tokens of one request and share its lists.
    The plan describes the first of them. Query j attends to the tail [tail_start, seq_len + j), and
    its window ends at seq_len + j.

    Args:
        q: [R * queries, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows;
            D is 64 or 128.
        kv: KV rows in q's dtype or fp8 e4m3, with their scales.
        plan: R rows.
        lists: at most k_units entries of a list are read.
        softmax: scale and cap of the logits.
        out: [R * queries, H * G, D], q's dtype, contiguous; every entry is written.
        workspace: from :func:`make_workspace` for at least R rows. Needed by "triton".
        queries: queries of each row. For "triton", ``queries * G`` is at most
            :data:`MAX_QUERIES`.
        impl: "triton", "cpu" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    kv.group_of(q)
    if queries < 1:
        raise ValueError(f"queries={queries} must be at least 1")
    check_shape("q", q, (plan.num_rows * queries, -1, -1))
    check_shape("out", out, tuple(q.shape))
    lists.check_read(plan.num_rows, kv.num_heads)
    if kv.page_size % lists.unit:
        raise ValueError(f"unit={lists.unit} must divide page_size={kv.page_size}")
    if impl == "torch":
        gathered_decode_attention_reference(
            q, kv, plan, lists, softmax=softmax, out=out, queries=queries
        )
        return
    if impl == "cpu":
        gathered_decode_attention_cpu(q, kv, plan, lists, softmax=softmax, out=out, queries=queries)
        return
    kv.check_triton(q)
    if queries * kv.group_of(q) > MAX_QUERIES:
        raise ValueError(
            f"{queries} queries of {kv.group_of(q)} heads a KV head must be {MAX_QUERIES} or fewer"
        )
    check_dtype("out", out, q.dtype)
    check_contiguous("out", out)
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    from .kernel import gathered_decode_attention_triton

    gathered_decode_attention_triton(
        q,
        kv,
        plan,
        lists,
        softmax=softmax,
        out=out,
        workspace=workspace,
        queries=queries,
    )
