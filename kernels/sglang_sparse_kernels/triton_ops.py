# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Device functions that mean the same compiled and under Triton's interpreter.

The interpreter keeps bfloat16 as raw 16-bit integers: products and comparisons of them are wrong,
and casts to it truncate.
"""

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

OVERLAP_ROW_HEADS = 32

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def overlapping(row_heads: int) -> dict[str, bool]:
    """Launch options of a kernel that calls :func:`begin`, in a batch of so many rows times heads.

    Of few rows a launch comes up while the one before it ends, which saves part of the time
    between them. Programs that come up early are spread unevenly, so a full device waits.
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
    """Let the next launch come up to here; wait until the one before has written everything."""
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_launch_dependents()
        gdc_wait()


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
