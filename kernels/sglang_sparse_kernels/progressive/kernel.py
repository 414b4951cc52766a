# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of attention that stops when enough of the mass is reached.

Where a row stops is known only once it has been attended to up to there. But a row usually stops
near the place where it stopped in its last step. So there are four launches:

1. *Attend* takes as many microbatches of each row and KV head as the last step took. Its programs
   share the work of all rows equally, and no program waits for another.
2. *Finish* has one program for each row and KV head that finds where it stops, or the latest point
   where it can stop. Meanwhile other programs merge all chunks, which mostly end near the stop.
3. *Extend* attends up to the latest stop, for the rows that go on.
4. *Finish* checks again for those rows, and merges them and the rows that stop earlier.

Where every row stopped as expected, the last two launches return at once. A chunk has the same
result whichever program attends to it, and a merge depends on nothing after the stop. So the
expectation only changes the time, never the result.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import next_power_of_2
from ..device import programs_to_fill
from ..plan import DecodePlan
from ..records import KVView, Lists, Softmax
from ..triton_ops import begin, constants, overlapping
from .finish_kernel import SLICES, Checks, Progress, progressive_finish_kernel
from .types import MAX_PROLOGUE_CHUNKS, MassStop, ProgressiveWorkspace, StopState
from .work_kernel import (
    Chunks,
    Layout,
    Queries,
    Ranking,
    Rows,
    Tiles,
    Work,
    attend_split,
    candidate_units,
    chunk_plan,
    row_plan,
)

# Measured on one H200 (132 multiprocessors), as are CTAS_PER_SM, REGISTERS, SPARE and what follows.
# Both launches that attend take as many warps and the same tile: sums over it must round alike.
WARPS = 4
TILE = 128
# Three stages of loads run ahead: units of tokens, then their pages, then K and V.
STAGES = 3
# Tiles that a program could attend to while it turns to another row and KV head.
ROW_COST = 1
# Programs that attend, a multiprocessor, and registers a thread with which they run at once.
CTAS_PER_SM = 3
REGISTERS = 168
# Programs that would idle add one microbatch for so many microbatches of the last step.
SPARE = 4
# Checks and merges are small, and synchronise two warps faster than four.
FINISH_WARPS = 2
# Numbers that a program merges at once, and the channels of them.
MERGED, CHANNELS = 2048, 32
# Stop checks at once: as many as a warp has threads, so that no sum over them waits for another.
CHECKS = 32
# Rows times KV heads that one compiled kernel serves, or four times as many, and so on: a batch
# that is larger than any before it must not wait for a compiler.
LEAST_ROW_HEADS = 256


def num_programs(device: torch.device) -> int:
    """Programs that share the work of all rows."""
    return programs_to_fill(device, CTAS_PER_SM)


def row_heads_tile(count: int) -> int:
    """Rows times KV heads that a program holds at once: ``count``, rounded up to few sizes."""
    size = LEAST_ROW_HEADS
    while size < count:
        size *= 4
    return size


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=SLICES)
def progressive_attend_kernel(
    work,
    k_units,
    ranked,
    expected,
    request_slots,
    attended,
    candidates,
    count,
    L: tl.constexpr,
    T: tl.constexpr,
    SPARE: tl.constexpr,
):
    rows, windows = work.rows, work.windows
    programs = tl.num_programs(0)
    o_r = tl.arange(0, T.BR)
    m_r = o_r < count
    o_r = tl.where(m_r, o_r, 0)
    # [BR]: tiles that each row and KV head is expected to take.
    i_e = tl.load(request_slots + o_r // L.H).to(tl.int64) * L.H + o_r % L.H
    b_expected = tl.maximum(tl.load(expected + i_e), 1)
    b_candidates = candidate_units(
        k_units, rows.list_rows, ranked, windows, o_r, work.ranking.capacity, L.H
    )
    _, _, b_prologue, b_total, _, _, _ = row_plan(rows, windows, o_r, b_candidates, L)
    b_first_tiles, _, b_first_chunks, b_batches, b_all = chunk_plan(b_prologue, b_total, L)
    b_taken = tl.minimum(b_expected, b_batches)
    b_tiles = tl.minimum(b_first_tiles + b_taken * L.BATCH_TILES, b_all)
    tiles = tl.sum(tl.where(m_r, b_tiles, 0))
    # Programs that would have nothing to do attend to a little more of each row.
    spare = tl.maximum(programs - tiles - count * T.ROW_COST, 0) // (count * L.BATCH_TILES)
    b_taken = tl.minimum(b_taken + tl.minimum(spare, tl.cdiv(b_taken, SPARE)), b_batches)
    b_tiles = tl.where(m_r, tl.minimum(b_first_tiles + b_taken * L.BATCH_TILES, b_all), 0)
    if tl.program_id(0) == 0:
        tl.store(attended + o_r, b_first_chunks + b_taken, mask=m_r)
        tl.store(candidates + o_r, b_candidates, mask=m_r)
    attend_split(b_tiles, b_candidates, tl.zeros_like(b_tiles), work, L, T)


@triton.jit(do_not_specialize=["count"])
def progressive_extend_kernel(
    work,
    attended,
    candidates,
    extended,
    count,
    L: tl.constexpr,
    T: tl.constexpr,
):
    begin()
    o_r = tl.arange(0, T.BR)
    m_r = o_r < count
    b_attended = tl.load(attended + o_r, mask=m_r, other=0)
    b_candidates = tl.load(candidates + o_r, mask=m_r, other=0)
    b_more = tl.load(extended + o_r, mask=m_r, other=0) - b_attended
    b_tiles = b_more * L.BATCH_TILES
    attend_split(b_tiles, b_candidates, b_attended, work, L, T)


class Launch(NamedTuple):
    """Arguments of all launches: records and constants, made from those of the operator."""

    row_heads: int
    work: Work
    progress: Progress
    layout: Layout
    tiles: Tiles
    checks: Checks

    @property
    def attend(self) -> dict[str, Any]:
        """Constants of kernels that attend."""
        shape, tiles = constants(self.layout), constants(self.tiles)
        return {"L": shape, "T": tiles, "num_warps": WARPS, "maxnreg": REGISTERS}

    @property
    def finish(self) -> dict[str, Any]:
        """Constants of kernels that check and merge."""
        shape, checks = constants(self.layout), constants(self.checks)
        return {"L": shape, "C": checks, "num_warps": FINISH_WARPS}


def layout_of(ranking: Lists, stop: MassStop, group: int, dim: int, *, output: bool) -> Layout:
    """How rows of lists are cut into tiles and chunks."""
    tile = min(stop.microbatch, max(TILE, ranking.unit))
    return Layout(
        H=ranking.indices.shape[1], G=group, D=dim, UNIT=ranking.unit, BN=tile,
        BATCH_TILES=stop.microbatch // tile, MAX_PROLOGUE=MAX_PROLOGUE_CHUNKS, OUTPUT=output,
    )  # fmt: skip


def progress_of(workspace: ProgressiveWorkspace) -> Progress:
    """The numbers of each row and KV head."""
    w = workspace
    return Progress(w.attended, w.extended, w.stop, w.candidates)


def make_launch(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop, *,
    softmax: Softmax, output: bool, workspace: ProgressiveWorkspace,
) -> Launch:  # fmt: skip
    """What all launches of one call take."""
    count, dim, w = plan.num_rows * kv.num_heads, q.shape[2], workspace
    group, always = kv.group_of(q), stop.always
    group_tile = next_power_of_2(group)
    tiles = Tiles(
        BG=max(16, group_tile), BR=row_heads_tile(count), PAGE=kv.page_size,
        HAS_CAP=softmax.logit_cap > 0, STAGES=STAGES, ROW_COST=ROW_COST,
    )  # fmt: skip
    checks = Checks(
        BG=group_tile, BC=CHECKS, BM=MERGED // (group_tile * CHANNELS), BD=CHANNELS,
        BOUNDED=stop.residual is not None, MEAN=stop.share == "mean",
    )  # fmt: skip
    rows = Rows(plan.seq_lens, plan.tail_start, ranking.rows, always.sink, always.recent)
    chunks = Chunks(w.partial, w.lse, w.min_block, w.lse.shape[3])
    work = Work(
        Queries(q, q.stride(0), kv.logits(softmax).scale_log2, softmax.logit_cap),
        kv.args, rows, ranking.window_args, Ranking(ranking.indices, ranking.capacity), chunks,
    )  # fmt: skip
    layout = layout_of(ranking, stop, group, dim, output=output)
    return Launch(count, work, progress_of(w), layout, tiles, checks)


def check_arguments(
    launch: Launch, plan: DecodePlan, stop: MassStop, state: StopState, out: torch.Tensor | None
) -> tuple[Any, ...]:
    """Arguments of kernels that check and merge."""
    work, residual = launch.work, stop.residual
    return (
        work.rows, work.windows, work.out, launch.progress, state.reached, state.expected,
        plan.request_slots, stop.epsilons, residual, 0 if residual is None else residual.shape[3],
        out, state.counters,
    )  # fmt: skip


def progressive_decode_attention_triton(
    q: torch.Tensor, kv: KVView, plan: DecodePlan, ranking: Lists, stop: MassStop,
    state: StopState, *, softmax: Softmax, out: torch.Tensor | None,
    workspace: ProgressiveWorkspace,
) -> None:  # fmt: skip
    """Launch the kernels of this module and of :mod:`.finish_kernel` in turn."""
    w = workspace
    made = make_launch(
        q, kv, plan, ranking, stop, softmax=softmax, output=out is not None, workspace=w
    )
    check = check_arguments(made, plan, stop, state, out)
    count, slices = made.row_heads, 0 if out is None else q.shape[2] // CHANNELS
    programs = num_programs(q.device)
    # Launches after the first come up while the one before ends, in batches of any size: measured.
    tail = overlapping(0)
    progressive_attend_kernel[(programs,)](
        made.work, plan.k_units, ranking.counts, state.expected, plan.request_slots, w.attended,
        w.candidates, count, SPARE=SPARE, **made.attend,
    )  # fmt: skip
    progressive_finish_kernel[(count, 1 + slices)](*check, AGAIN=False, **made.finish, **tail)
    progressive_extend_kernel[(programs,)](
        made.work, w.attended, w.candidates, w.extended, count, **made.attend, **tail
    )
    progressive_finish_kernel[(count, max(slices, 1))](*check, AGAIN=True, **made.finish, **tail)
