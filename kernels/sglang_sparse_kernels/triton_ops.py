# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Device functions that mean the same compiled and under Triton's interpreter.

The interpreter keeps bfloat16 as raw 16-bit integers: products and comparisons of them are wrong,
and casts to it truncate.
"""

from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer
from triton.language.target_info import cuda_capability_geq

from .common import group_size, next_power_of_2

# Rows times KV heads up to which overlapping launches gain, as measured on one H200.
OVERLAP_ROW_HEADS = 32

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


Constants = TypeVar("Constants", bound=tuple[Any, ...])


def constants(record: Constants) -> Constants:
    """A record as a ``constexpr`` argument: its fields stay constants where kernels read them."""
    # The interpreter computes with plain numbers, and the compiler with constants.
    return record if INTERPRETED.value else type(record)(*map(tl.constexpr, record))


class KVArgs(NamedTuple):
    """A :class:`.records.KVView` as kernels take it; its keys' scale is in that of the logits.

    Rows may be fp8 e4m3: a kernel converts what it loaded to the queries' dtype, which is exact.
    ``arriving`` may be None.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    stride_table: int
    v_scale: float
    arriving: torch.Tensor | None


class PlanArgs(NamedTuple):
    """The columns of a :class:`.plan.DecodePlan` that kernels read, a row of the batch each."""

    seq_lens: torch.Tensor
    tail_start: torch.Tensor
    k_units: torch.Tensor
    reselect: torch.Tensor


class WindowArgs(NamedTuple):
    """A :class:`.records.HeadWindows` as kernels take it."""

    streams: torch.Tensor
    sink: int
    local: int


class HeadShape(NamedTuple):
    """Constants: H KV heads with groups of G query heads, D the head dimension.

    BG and BD are powers of two, at least G and D.
    """

    H: int
    G: int
    BG: int
    D: int
    BD: int

    @staticmethod
    def of(q: torch.Tensor, heads: int, least: int = 1) -> "HeadShape":
        """The shape of ``q`` [rows, query heads, D] and so many KV heads; BG >= ``least``."""
        group, dim = group_size(q.shape[1], heads), q.shape[2]
        tile = max(least, next_power_of_2(group))
        return HeadShape(heads, group, tile, dim, next_power_of_2(dim))


def overlapping(row_heads: int) -> dict[str, bool]:
    """Launch options of a kernel that calls :func:`begin`, in a batch of so many rows times heads.

    In a small batch a launch starts while the launch before it ends, which saves part of the time
    between the two. Programs that start early are spread unevenly over the device, so large batches
    do not do this.
    """
    overlap = row_heads <= OVERLAP_ROW_HEADS and _can_overlap()
    return {"launch_pdl": True} if overlap else {}


@cache
def _can_overlap() -> bool:
    """Whether the device is a Hopper GPU or a later one."""
    if INTERPRETED.value:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


@triton.jit
def begin():
    """Let the next launch start; wait until the launch before has written everything."""
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def begin_after():
    """Wait until the launch before has written everything; only then let the next one start.

    The next one may go on beside this one without :func:`begin`: what was written before this one
    is there. It ends with :func:`end_after`.
    """
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_beside():
    """Let the next launch start. This one goes on beside the launch before it."""
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_launch_dependents()


@triton.jit
def end_after():
    """Wait until the launch before has ended, so that whoever waits for this one waits for both."""
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_wait()


@triton.jit
def wait_for_pages(arriving, b_page):
    """Wait until no page of ``b_page`` is on its way any more (:func:`page_arrived`)."""
    waits = 1
    while waits > 0:
        if INTERPRETED:
            b_flag = tl.load(arriving + b_page)
        else:
            b_flag = tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.b32 $0, [$1];",
                "=r,l", [arriving + b_page], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        waits = tl.max(b_flag, 0)
    # All threads go on with what each of them has waited for.
    tl.debug_barrier()


@triton.jit
def page_arrived(arriving, page):
    """Say that a page is there, behind what all threads have stored to it."""
    tl.debug_barrier()
    tl.atomic_xchg(arriving + page, 0, sem="release")


@triton.jit
def read_clock(clock):
    """Nanoseconds of the GPU, which all programs share.

    Or the next of given ones: ``clock`` is int64 [1 + n], how many have been read, then they. The
    interpreter has no other.
    """
    return globaltimer() if clock is None else tl.load(clock + 1 + tl.atomic_add(clock, 1))


@triton.jit
def dot(b_a, b_b, b_acc):
    """``b_a @ b_b + b_acc`` in float32; 16-bit operands are multiplied exactly."""
    if INTERPRETED:
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_acc, input_precision="ieee")


@triton.jit
def cast(b_x, dtype: tl.constexpr):
    """float32 to ``dtype``, rounding to nearest, halves to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits += 0x7FFF + ((b_bits >> 16) & 1)
        b_x = (b_bits & -65536).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def widened(b_x, dtype: tl.constexpr):
    """Rows as they were loaded, in the 16-bit ``dtype`` of the queries. Of fp8 that is exact.

    A Hopper GPU unpacks fp8 to float16 alone. From there to bfloat16 the compiler takes one slow
    conversion a number; through float32 it takes two that are fast.
    """
    if b_x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        b_x = b_x.to(tl.float16).to(tl.float32)
    return b_x.to(dtype)


@triton.jit
def halved(b_x, dtype: tl.constexpr):
    """Rows of V as they were loaded, for a product with weights; of fp8 in float16, exactly.

    A weight is at most 1, so float16 holds it with more bits than bfloat16. The unpacking is no
    pure operation to the compiler, which otherwise moves it behind the change of layout and reads
    the rows of V from shared memory byte by byte.
    """
    if b_x.dtype != tl.float8e4nv:
        b_y = b_x.to(dtype)
    elif INTERPRETED:
        b_y = b_x.to(tl.float16)
    else:
        b_y = tl.inline_asm_elementwise(
            "{.reg .b16 lo, hi; mov.b32 {lo, hi}, $2;"
            "cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi;}",
            "=r,=r,r", [b_x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return b_y


@triton.jit
def pages_of(p_table, o_p, m_p, PAGE: tl.constexpr):
    """Physical pages of logical positions ``o_p`` of a row; 0 where ``m_p``, if any, is not set.

    ``p_table`` points at the row's part of the page table.
    """
    if m_p is None:
        b_page = tl.load(p_table + o_p // PAGE)
    else:
        b_page = tl.load(p_table + o_p // PAGE, mask=m_p, other=0)
    return b_page


@triton.jit
def row_table(kv, i_r):
    """The part of a view's page table that is row ``i_r``'s."""
    return kv.page_table + i_r.to(tl.int64) * kv.stride_table


@triton.jit
def slots_of(p_table, o_p, m_p, PAGE: tl.constexpr):
    """KV slots of logical positions ``o_p`` of a row; slots of page 0 where ``m_p`` is not set.

    No other function computes where a position lies. A plane with one entry for several tokens uses
    it too: ``o_p`` then counts entries, and ``PAGE`` is the number of entries in a page.
    """
    return pages_of(p_table, o_p, m_p, PAGE) * PAGE + o_p % PAGE


@triton.jit
def scaled_logits(b_s, scale_log2, logit_cap, HAS_CAP: tl.constexpr):
    """Products as logits in units of log 2, as exp2 takes them."""
    if HAS_CAP:
        # tanh through exp.
        b_s = scale_log2 * b_s / logit_cap
        b_s = logit_cap * (1.0 - 2.0 / (tl.exp2(2.0 * b_s) + 1.0)) * 1.4426950408889634
    else:
        b_s *= scale_log2
    return b_s


@triton.jit
def online_softmax(b_s, b_max, b_sum):
    """One tile of a softmax: (weights, factor of what came before, largest logit, sum of weights).

    ``b_s`` are logits for exp2. ``b_max`` and ``b_sum`` are the result of the tiles before.
    """
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # A tile whose rows are all masked must not turn -inf - -inf into NaN.
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_alpha = tl.exp2(b_max - b_shift)
    return b_p, b_alpha, b_new, b_sum * b_alpha + tl.sum(b_p, 1)


@triton.jit
def selects_anew(plan, i_r):
    """Whether row ``i_r`` selects anew at this step."""
    return (tl.load(plan.reselect + i_r) != 0) & (tl.load(plan.k_units + i_r) > 0)


@triton.jit
def is_read(unread, i_list):
    """Whether any head attends to list ``i_list``; ``unread`` may be None, when all are read."""
    read = True
    if unread is not None:
        read = tl.load(unread + i_list) == 0
    return read


@triton.jit
def head_tail(windows, streams, seq_len, tail):
    """(where the tail of a KV head starts, sinks behind it); ``tail`` is where the plan's starts.

    The tail of a head that ``streams`` is its window. The sinks follow, as if positions went on
    after the row's end (:func:`tail_positions`).
    """
    sink = tl.minimum(windows.sink, seq_len)
    start = tl.where(streams, tl.maximum(seq_len - windows.local, sink), tail)
    return start, tl.where(streams, sink, 0)


@triton.jit
def tail_positions(tail, o_n, end, WINDOWS: tl.constexpr):
    """Positions of the ``o_n``-th tokens of a tail; with ``WINDOWS`` sinks follow its ``end``."""
    b_pos = tail + o_n
    if WINDOWS:
        b_pos = tl.where(b_pos >= end, b_pos - end, b_pos)
    return b_pos


@triton.jit
def finite_scores(b_s):
    """Scores as selection needs them: NaN as -inf, +inf, which forced units have, as finite."""
    return tl.minimum(tl.where(b_s == b_s, b_s, float("-inf")), FLOAT32_MAX)


@triton.jit
def store_scores(
    out, block_max, b_score, o_t, n, base, base_block, BT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write scores of units ``o_t`` below ``n``, side by side, and their block maxima."""
    m_t = o_t < n
    b_score = finite_scores(b_score)
    tl.store(out + base + o_t, b_score, mask=m_t)
    if block_max is not None:
        # [BT / BLOCK, BLOCK]
        b_block = tl.reshape(tl.where(m_t, b_score, float("-inf")), (BT // BLOCK, BLOCK))
        o_b = tl.min(o_t, 0) // BLOCK + tl.arange(0, BT // BLOCK)
        tl.store(block_max + base_block + o_b, tl.max(b_block, 1), mask=o_b * BLOCK < n)
