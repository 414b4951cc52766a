# SPDX-License-Identifier: Apache-2.0
"""Public decode attention: validate, then dispatch to the implementation asked for."""

import torch

from ..common import (
    IMPLS,
    Impl,
    check_choice,
    check_contiguous,
    check_dense_rows,
    check_dtype,
    check_shape,
    group_size,
)
from ..plan import DecodePlan
from .reference import gathered_decode_attention_reference


def gathered_decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    unit: int,
    page_size: int,
    sm_scale: float,
    logit_cap: float = 0.0,
    head_map: torch.Tensor | None = None,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    impl: Impl,
) -> None:
    """Softmax attention over the listed units and the contiguous tail (SparCas section 3.4).

    Row r, KV head h attends to the positions below tail_start of the units
    ``indices[list_rows[r], h, :counts[list_rows[r], h]]`` and to [tail_start, seq_len). A row
    with k_units 0 has an empty list, whatever its count says; with tail_start 0 it is dense.
    With a ``head_map`` it is list ``head_map[h]`` that KV head h attends to (Kascade section 3.5).

    Args:
        q: [R, H * G, D] bf16 or fp16 ("torch" also fp32, fp64), any stride between rows; D is
            64 or 128.
        k_buffer: [slots, H, D] in q's dtype, contiguous.
        v_buffer: the same.
        plan: R rows.
        indices: int32 [list rows, H, capacity], logical units, distinct within a list; with a
            ``head_map`` any number of lists may take the place of H.
        counts: int32 [list rows, H]; entries of a list past k_units are not attended to.
        unit: tokens a unit.
        page_size: tokens a physical page (P).
        sm_scale: factor on q.k, usually 1 / sqrt(D).
        logit_cap: logits become cap * tanh(logit / cap) if above 0.
        head_map: int32 [H], the list that each KV head takes; its own if None.
        out: [R, H * G, D], q's dtype, contiguous; every entry is written.
        workspace: from :func:`make_workspace` for at least R rows. Needed by "triton".
        impl: "triton" or "torch".

    Raises:
        ValueError: on an unknown ``impl``, a wrong dtype or shape, a workspace that is too small.
    """
    check_choice("impl", impl, IMPLS)
    rows, heads, dim = plan.num_rows, k_buffer.shape[1], q.shape[2]
    check_shape("q", q, (rows, -1, dim))
    check_shape("k_buffer", k_buffer, (-1, heads, dim))
    check_shape("v_buffer", v_buffer, tuple(k_buffer.shape))
    check_shape("out", out, tuple(q.shape))
    lists = heads if head_map is None else indices.shape[1]
    check_shape("indices", indices, (-1, lists, -1))
    check_shape("counts", counts, (indices.shape[0], lists))
    if head_map is not None:
        check_shape("head_map", head_map, (heads,))
        check_dtype("head_map", head_map, torch.int32)
    if page_size % unit:
        raise ValueError(f"unit={unit} must divide page_size={page_size}")
    group = group_size(q.shape[1], heads)
    if impl == "torch":
        gathered_decode_attention_reference(
            q,
            k_buffer,
            v_buffer,
            plan,
            indices,
            counts,
            unit=unit,
            page_size=page_size,
            sm_scale=sm_scale,
            logit_cap=logit_cap,
            head_map=head_map,
            out=out,
        )
        return
    check_dtype("q", q, torch.bfloat16, torch.float16)
    for name, tensor in {"k_buffer": k_buffer, "v_buffer": v_buffer, "out": out}.items():
        check_dtype(name, tensor, q.dtype)
        check_contiguous(name, tensor)
    check_dense_rows("q", q)
    check_contiguous("indices", indices)
    check_contiguous("counts", counts)
    if dim not in (64, 128) or group > 16:
        raise ValueError(f"head_dim={dim} must be 64 or 128, and {group} query heads at most 16")
    if workspace is None:
        raise ValueError("impl='triton' needs a workspace")
    from .kernel import gathered_decode_attention_triton

    gathered_decode_attention_triton(
        q,
        k_buffer,
        v_buffer,
        plan,
        indices,
        counts,
        unit=unit,
        page_size=page_size,
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        head_map=head_map,
        out=out,
        workspace=workspace,
    )
