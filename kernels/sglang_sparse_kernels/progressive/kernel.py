# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention that stops when enough of the mass is reached.

Where a row stops is known only when it has been attended to so far, but it is much where it stopped
in its last step. So a first launch attends to as many microbatches as were taken then, of all rows
and KV heads together, in equal shares for the programs that run at once: no program waits for a
number of another's. A second launch, one program a row and KV head, finds the exact stop, attends
to what is missing until then, and merges what lies before it. A microbatch comes to the same in
either launch, and those after the stop are left out, so what was expected decides the time alone.
"""

import torch
import triton
import triton.language as tl

from ..common import group_size, next_power_of_2
from ..plan import DecodePlan
from .finish_kernel import progressive_finish_kernel
from .types import MAX_PARTS, ProgressiveWorkspace, num_programs
from .work_kernel import attend_tiles, cuts, next_piece, work

# Both launches take as many warps and the same tile: sums over a tile must round alike.
WARPS = 4
STAGES = 2
TILE = 128
# Microbatches attended to beyond those of the last step, and the part of those that programs
# which would idle may add.
MARGIN = 1
SPARE = 4
# Microbatches that the second launch attends to between two looks, at first.
CHUNK = 4
MERGE_ENTRIES = 64


@triton.jit
def progressive_attend_kernel(
    q,
    k_buffer,
    v_buffer,
    page_table,
    seq_lens,
    tail_start,
    k_units,
    list_rows,
    indices,
    ranked,
    expected,
    expected_rows,
    partial,
    lse,
    least,
    there,
    stride_q,
    stride_table,
    capacity,
    pieces,
    count,
    sink,
    recent,
    scale_log2,
    logit_cap,
    BR: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BG: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MARGIN: tl.constexpr,
    SPARE: tl.constexpr,
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(0)
    o_r = tl.arange(0, BR)
    m_r = o_r < count
    o_r = tl.where(m_r, o_r, 0)
    # [BR]: tiles that each row and KV head is expected to take.
    i_e = tl.load(expected_rows + o_r // H).to(tl.int64) * H + o_r % H
    b_last = tl.maximum(tl.load(expected + i_e), 0)
    _l, _t, _n, b_prologue, b_total, _u, _c, _f = work(
        seq_lens, tail_start, k_units, list_rows, ranked, o_r, capacity, sink, recent, H, UNIT
    )
    b_front, _p, b_parts, b_most, b_tiles = cuts(b_prologue, b_total, BN, TILES, PARTS)
    b_taken = tl.minimum(b_last, b_most) + MARGIN
    b_amount = tl.minimum(b_front + b_taken * TILES, b_tiles)
    amount = tl.sum(tl.where(m_r, b_amount, 0))
    # A program that would have nothing to do attends to a little more of a row.
    spare = (tl.cdiv(amount, programs) * programs - amount) // (count * TILES)
    b_taken = tl.minimum(b_taken + tl.minimum(spare, b_taken // SPARE), b_most)
    b_amount = tl.where(m_r, tl.minimum(b_front + b_taken * TILES, b_tiles), 0)
    amount = tl.sum(b_amount)
    b_end = tl.cumsum(b_amount, 0)
    if tl.program_id(0) == 0:
        tl.store(there + o_r, b_parts + b_taken, mask=m_r)

    share = tl.cdiv(amount, programs)
    at = tl.program_id(0) * share
    end = tl.minimum(at + share, amount)
    while at < end:
        i_rh = tl.sum((b_end <= at).to(tl.int32))
        row_first = tl.max(tl.where(b_end <= at, b_end, 0))
        row_last = tl.min(tl.where(b_end > at, b_end, amount))
        row_last = tl.minimum(row_last, amount)
        i_l, tail, tail_tokens, prologue, total, _units, _listed, _forced = work(
            seq_lens, tail_start, k_units, list_rows, ranked, i_rh, capacity, sink, recent, H, UNIT
        )
        front, part, _parts, _most, _tiles = cuts(prologue, total, BN, TILES, PARTS)
        until = tl.minimum(end, row_last)
        attend_tiles(
            q, k_buffer, v_buffer, page_table, indices, partial, lse, least, i_rh, i_l,
            next_piece(at - row_first, front, part, row_last - row_first, TILES),
            next_piece(until - row_first, front, part, row_last - row_first, TILES),
            tail, tail_tokens, prologue, total, stride_q, stride_table, capacity, pieces,
            scale_log2, logit_cap, H, G, BG, D, PAGE, UNIT, BN, TILES, PARTS, HAS_CAP, STAGES,
        )  # fmt: skip
        at = until


def progressive_decode_attention_triton(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: DecodePlan,
    indices: torch.Tensor,
    ranked: torch.Tensor,
    reached: torch.Tensor,
    *,
    unit: int,
    page_size: int,
    sink: int,
    recent: int,
    microbatch: int,
    epsilons: torch.Tensor,
    share: str,
    rest_bounds: torch.Tensor | None,
    sm_scale: float,
    logit_cap: float,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    expected: torch.Tensor,
    expected_rows: torch.Tensor,
    workspace: ProgressiveWorkspace,
) -> None:
    """Launch :func:`progressive_attend_kernel`, then :func:`progressive_finish_kernel`."""
    rows, query_heads, dim = q.shape
    heads = k_buffer.shape[1]
    group = group_size(query_heads, heads)
    capacity, pieces = indices.shape[2], workspace.lse.shape[2]
    tile = min(microbatch, max(TILE, unit))
    attention = {
        "H": heads,
        "G": group,
        "BG": max(16, next_power_of_2(group)),
        "D": dim,
        "PAGE": page_size,
        "UNIT": unit,
        "BN": tile,
        "TILES": microbatch // tile,
        "PARTS": MAX_PARTS,
        "HAS_CAP": logit_cap > 0,
        "STAGES": STAGES,
        "num_warps": WARPS,
    }
    scale_log2 = sm_scale * 1.4426950408889634
    progressive_attend_kernel[(num_programs(q.device),)](
        q,
        k_buffer,
        v_buffer,
        plan.page_table,
        plan.seq_lens,
        plan.tail_start,
        plan.k_units,
        plan.list_rows,
        indices,
        ranked,
        expected,
        expected_rows,
        workspace.partial,
        workspace.lse,
        workspace.least,
        workspace.there,
        q.stride(0),
        plan.page_table.stride(0),
        capacity,
        pieces,
        rows * heads,
        sink,
        recent,
        scale_log2,
        logit_cap,
        BR=next_power_of_2(rows * heads),
        MARGIN=MARGIN,
        SPARE=SPARE,
        **attention,
    )
    progressive_finish_kernel[(rows * heads,)](
        q,
        k_buffer,
        v_buffer,
        plan.page_table,
        plan.seq_lens,
        plan.tail_start,
        plan.k_units,
        plan.list_rows,
        indices,
        ranked,
        reached,
        expected,
        expected_rows,
        epsilons,
        rest_bounds,
        workspace.partial,
        workspace.lse,
        workspace.least,
        workspace.there,
        out,
        counters,
        q.stride(0),
        plan.page_table.stride(0),
        capacity,
        pieces,
        0 if rest_bounds is None else rest_bounds.shape[3],
        sink,
        recent,
        scale_log2,
        logit_cap,
        BS=next_power_of_2(group),
        BI=next_power_of_2(MAX_PARTS + -(-capacity * unit // microbatch)),
        BM=MERGE_ENTRIES // next_power_of_2(group),
        UPPER=rest_bounds is not None,
        MEAN=share == "mean",
        CHUNK=CHUNK,
        **attention,
    )
