# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton kernels under the interpreter where there is no GPU, compiled where there is.

Under the interpreter every load and store of every test is checked: an access outside of the
tensors that were passed to the launch is an error, as it is (at times) on a GPU.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent))

_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Tensors among the arguments, and in records of them."""
    found = []
    for argument in arguments:
        if isinstance(argument, tuple):
            found += _tensors(argument)
        elif isinstance(argument, torch.Tensor) and argument.numel():
            found.append(argument)
    return found


def _extents(arguments: tuple[Any, ...]) -> np.ndarray:
    """Memory of a launch's tensors, ``[parts, 2]``: in order, parts that share a byte as one."""
    tensors = _tensors(arguments)
    found = [_extent(tensor) for tensor in tensors]
    for pointers in (tensor for tensor in tensors if tensor.dtype == torch.uint64):
        # Base addresses of layers that look like the first argument.
        size = tensors[0].nbytes
        found += [(base, base + size) for base in pointers.tolist()]
    apart: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if apart and first < apart[-1][1]:  # a view of the same memory
            first, last = apart[-1][0], max(last, apart.pop()[1])
        apart.append((first, last))
    return np.array(apart, dtype=np.uint64).reshape(-1, 2)


def _reduce_halves(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Reduce by halves, as compiled; the interpreter's own takes one element after the other."""
    assert not self.keep_dims
    while inputs[0].shape[self.axis] > 1:
        halves = [(np.split(one.handle.data, 2, self.axis), one.dtype) for one in inputs]
        operands = [self.to_tensor(half[i], dtype) for i in (0, 1) for half, dtype in halves]
        inputs = self.combine_fn.fn(*operands)
    return [self.to_tensor(one.handle.data.squeeze(self.axis), one.dtype) for one in inputs]


def _no_overflow(self: Any, one: Any, other: Any, operation: Callable[..., Any]) -> None:
    """Fail where a sum, difference or product of integers of 32 bits and fewer overflows.

    The interpreter's own check computes as much in Triton tensors and drops the outcome.
    """
    name, pair = operation.__name__, (one.handle.data, other.handle.data)
    kept = pair[0].dtype
    if kept.kind == "b" or kept.itemsize == 8:
        return
    exact, bounds = _EXACT[name](*pair, dtype=np.int64), np.iinfo(kept)
    assert bounds.min <= exact.min() <= exact.max() <= bounds.max, f"{kept} overflows in {name}"


@pytest.fixture(autouse=True)
def accesses_stay_inside_the_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test whose kernels touch memory that they were not given."""
    if not INTERPRETED:
        yield
        return
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps

    allowed = np.empty((0, 2), dtype=np.uint64)
    launch, patch = GridExecutor.__call__, interpreter._patch_lang
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    patched: set[int] = set()
    dtype_of = cache(interpreter._get_np_dtype)

    def numpy_dtype(kind: Any) -> np.dtype:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else dtype_of(kind.scalar)

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal allowed
        allowed = _extents(arguments)
        patched.clear()
        launch(self, *arguments, **options)

    def patch_once(function: Any) -> Any:
        """Patch the language for a file's functions once a launch, not at each of their calls."""
        file = id(function.__globals__)
        if file in patched:
            return None
        patched.add(file)
        return patch(function)

    def check(pointers: Any, mask: Any) -> None:
        addresses = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)].astype(np.uint64)
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        if not addresses.size:
            return
        # Of the part that begins last at or before an address; -1, the last one, is too high.
        first, last = allowed[np.searchsorted(allowed[:, 0], addresses, "right") - 1].T
        inside = (addresses >= first) & (addresses + np.uint64(size) <= last)
        assert inside.all(), f"{(~inside).sum()} accesses outside of the launch's tensors"

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", _no_overflow)
    monkeypatch.setattr(ReduceOps, "generic_reduce", _reduce_halves)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    yield
