# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Device functions that mean the same compiled and under Triton's interpreter.

The interpreter keeps bfloat16 as raw 16-bit integers: products and comparisons of them are wrong,
and casts to it truncate.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
