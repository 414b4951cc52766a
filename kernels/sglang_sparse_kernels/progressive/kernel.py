# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention that stops when enough of the mass is reached.

Where a row stops is known only when it has been attended to so far, but it is much where it stopped
in its last step. So a first launch attends to as many microbatches as were taken then, of all rows
and KV heads together, in equal shares for the programs that run at once: no program waits for a
number of another's. In a second one some programs find the exact stop, or where a row stops at the
latest, while others merge all that was attended to: much is it what lies before the stop. A third
attends up to the latest stop, again in equal shares, and a fourth looks again at the rows that went
on, and merges those and the ones that stop earlier; where everything stopped as expected, these two
return at once. A microbatch comes to the same whoever attends to it, and a merge depends on nothing
after the stop, so what was expected decides the time alone.
"""

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..device import programs_to_fill
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from ..triton_ops import begin, overlapping
from .finish_kernel import SLICES, progressive_finish_kernel
from .types import MAX_PROLOGUE_CHUNKS, MassStop, ProgressiveWorkspace, StopState
from .work_kernel import attend_shares, cuts, listed_units, work

# Both launches that attend take as many warps and the same tile: sums over it must round alike.
WARPS = 4
TILE = 128
# One each for the units that tokens are of, for their pages, and for K and V: all run ahead.
STAGES = 3
# Tiles that a program could attend to while it turns to another row and KV head.
ROW_COST = 1
# Programs that attend, a multiprocessor, and registers a thread with which they run at once.
CTAS_PER_SM = 3
REGISTERS = 168
# Programs that would idle may add one for so many of the last step's microbatches.
SPARE = 4
# What looks or merges is small, and waits less for two warps than for four: measured.
FINISH_WARPS = 2
# Numbers that a program merges at once, and the channels of them.
MERGED, CHANNELS = 2048, 32
# Looks at once: as many as a warp has threads, so that no sum over them waits for another warp.
LOOKS = 32
# Rows times KV heads that one compiled kernel serves, or four times as many, and so on: a batch
# that is larger than any before it must not wait for a compiler.
LEAST_ROW_HEADS = 256


def num_programs(device: torch.device) -> int:
    """Programs that share the work of all rows."""
    return programs_to_fill(device, CTAS_PER_SM)


def row_heads_tile(count: int) -> int:
    """Rows times KV heads, ``count`` or more, that a program looks over at once."""
    size = LEAST_ROW_HEADS
    while size < count:
        size *= 4
    return size


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=SLICES)
def progressive_attend_kernel(
    q,
    k_buffer,
    v_buffer,
    page_table,
    seq_lens,
    tail_start,
    list_rows,
    indices,
    k_units,
    ranked,
    expected,
    expected_rows,
    partial,
    lse,
    least,
    there,
    listed,
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
    OUTPUT: tl.constexpr,
    SPARE: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_COST: tl.constexpr,
):
    programs = tl.num_programs(0)
    o_r = tl.arange(0, BR)
    m_r = o_r < count
    o_r = tl.where(m_r, o_r, 0)
    # [BR]: tiles that each row and KV head is expected to take.
    i_e = tl.load(expected_rows + o_r // H).to(tl.int64) * H + o_r % H
    b_last = tl.maximum(tl.load(expected + i_e), 1)
    b_listed = listed_units(k_units, list_rows, ranked, o_r, capacity, H)
    _, _, b_prologue, b_total, _, _, _ = work(
        seq_lens, tail_start, o_r // H, b_listed, sink, recent, UNIT, BN * TILES // UNIT
    )
    b_front, _, b_parts, b_most, b_tiles = cuts(b_prologue, b_total, BN, TILES, PARTS)
    b_taken = tl.minimum(b_last, b_most)
    b_amount = tl.minimum(b_front + b_taken * TILES, b_tiles)
    amount = tl.sum(tl.where(m_r, b_amount, 0))
    # Programs that would have nothing to do attend to a little more of each row.
    spare = tl.maximum(programs - amount - count * ROW_COST, 0) // (count * TILES)
    b_taken = tl.minimum(b_taken + tl.minimum(spare, tl.cdiv(b_taken, SPARE)), b_most)
    b_amount = tl.where(m_r, tl.minimum(b_front + b_taken * TILES, b_tiles), 0)
    if tl.program_id(0) == 0:
        tl.store(there + o_r, b_parts + b_taken, mask=m_r)
        tl.store(listed + o_r, b_listed, mask=m_r)
    attend_shares(
        b_amount, b_listed, tl.zeros_like(b_amount), q, k_buffer, v_buffer, page_table, seq_lens,
        tail_start, list_rows, indices, partial, lse, least, stride_q, stride_table, capacity,
        pieces, sink, recent, scale_log2, logit_cap, H, G, BG, D, PAGE, UNIT, BN, TILES, PARTS,
        HAS_CAP, OUTPUT, STAGES, ROW_COST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def progressive_extend_kernel(
    q,
    k_buffer,
    v_buffer,
    page_table,
    seq_lens,
    tail_start,
    list_rows,
    indices,
    partial,
    lse,
    least,
    there,
    listed,
    until,
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
    OUTPUT: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_COST: tl.constexpr,
):
    begin()
    o_r = tl.arange(0, BR)
    m_r = o_r < count
    b_there = tl.load(there + o_r, mask=m_r, other=0)
    b_listed = tl.load(listed + o_r, mask=m_r, other=0)
    b_more = tl.load(until + o_r, mask=m_r, other=0) - b_there
    attend_shares(
        b_more * TILES, b_listed, b_there, q, k_buffer, v_buffer, page_table, seq_lens, tail_start,
        list_rows, indices, partial, lse, least, stride_q, stride_table, capacity, pieces, sink,
        recent, scale_log2, logit_cap, H, G, BG, D, PAGE, UNIT, BN, TILES, PARTS, HAS_CAP, OUTPUT,
        STAGES, ROW_COST,
    )  # fmt: skip


def progressive_decode_attention_triton(
    q: torch.Tensor,
    kv: KVView,
    plan: DecodePlan,
    ranking: Lists,
    stop: MassStop,
    state: StopState,
    *,
    softmax: Softmax,
    out: torch.Tensor | None,
    workspace: ProgressiveWorkspace,
) -> None:
    """Launch the kernels of this module and of :mod:`.finish_kernel` in turn."""
    rows, _, dim = q.shape
    heads, group, unit = kv.num_heads, kv.group_of(q), ranking.unit
    chunks, w = workspace.lse.shape[3], workspace
    tile = min(stop.microbatch, max(TILE, unit))
    rows_of = (q, kv.k, kv.v, kv.page_table)
    lies = (plan.seq_lens, plan.tail_start, ranking.rows)
    found = (w.partial, w.lse, w.min_block, w.attended)
    sizes = (q.stride(0), kv.page_table.stride(0), ranking.capacity, chunks, rows * heads)
    forced = (stop.always.sink, stop.always.recent)
    factors = (*forced, softmax.scale_log2, softmax.logit_cap)
    cut = {
        "H": heads,
        "G": group,
        "D": dim,
        "UNIT": unit,
        "BN": tile,
        "TILES": stop.microbatch // tile,
        "PARTS": MAX_PROLOGUE_CHUNKS,
        "OUTPUT": out is not None,
    }
    shares = cut | {
        "BG": max(16, next_power_of_2(group)),
        "BR": row_heads_tile(rows * heads),
        "PAGE": kv.page_size,
        "HAS_CAP": softmax.logit_cap > 0,
        "STAGES": STAGES,
        "ROW_COST": ROW_COST,
        "num_warps": WARPS,
        "maxnreg": REGISTERS,
    }
    slices = 0 if out is None else dim // CHANNELS
    group_tile = next_power_of_2(group)
    ends = cut | {
        "BS": group_tile,
        "BI": LOOKS,
        "BM": MERGED // (group_tile * CHANNELS),
        "BD": CHANNELS,
        "UPPER": stop.residual is not None,
        "MEAN": stop.share == "mean",
        "num_warps": FINISH_WARPS,
    }
    # Launches after the first come up while the one before ends, in batches of any size: measured.
    tail = overlapping(0)
    programs = num_programs(q.device)
    expectation = (state.expected, plan.request_slots)
    ended = (
        *lies, state.reached, *expectation, stop.epsilons, stop.residual, *found, w.extended,
        w.stop, w.candidates, out, state.counters, chunks,
        0 if stop.residual is None else stop.residual.shape[3], *forced,
    )  # fmt: skip
    progressive_attend_kernel[(programs,)](
        *rows_of, *lies, ranking.indices, plan.k_units, ranking.counts, *expectation, *found,
        w.candidates, *sizes, *factors, SPARE=SPARE, **shares,
    )  # fmt: skip
    progressive_finish_kernel[(rows * heads, 1 + slices)](*ended, AGAIN=False, **ends, **tail)
    progressive_extend_kernel[(programs,)](
        *rows_of, *lies, ranking.indices, *found, w.candidates, w.extended, *sizes, *factors,
        **shares, **tail,
    )  # fmt: skip
    progressive_finish_kernel[(rows * heads, max(slices, 1))](*ended, AGAIN=True, **ends, **tail)
