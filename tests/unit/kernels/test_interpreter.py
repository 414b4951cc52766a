# SPDX-License-Identifier: Apache-2.0
"""What the interpreter is made to check of every kernel: accesses, and sums that overflow."""

import pytest
import torch
import triton
import triton.language as tl
from conftest import INTERPRETED
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled where a GPU is")


@triton.jit
def copy_kernel(source, target, first, last, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < last, 0), at < last)


@triton.jit
def product_kernel(source, target, factor):
    tl.store(target, tl.load(source) * factor)


def test_an_access_outside_of_the_tensors_is_an_error() -> None:
    memory = torch.arange(36, dtype=torch.int32)
    source, target = memory[2:18], torch.zeros(16, dtype=torch.int32)
    copy_kernel[(1,)](source, target, 0, 16, BLOCK=32)
    assert torch.equal(source, target)
    # Parts of one memory that overlap count as one.
    copy_kernel[(1,)](memory[:20], memory[16:], 0, 16, BLOCK=32)
    for first, last in ((0, 17), (-1, 16), (15, 40), (-3, 0)):
        with pytest.raises(InterpreterError, match="outside of the launch's tensors"):
            copy_kernel[(1,)](source, target, first, last, BLOCK=64)


def test_a_product_that_overflows_is_an_error() -> None:
    source, target = torch.tensor([2**16], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    product_kernel[(1,)](source, target, 2**15 - 1)
    assert target.tolist() == [2**31 - 2**16]
    with pytest.raises(InterpreterError, match="int32 overflows in mul"):
        product_kernel[(1,)](source, target, 2**15)
    wide = torch.zeros(1, dtype=torch.int64)
    product_kernel[(1,)](source.long(), wide, 2**40)
    assert wide.tolist() == [2**56]
