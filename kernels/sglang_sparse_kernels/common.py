# SPDX-License-Identifier: Apache-2.0
"""What every operator shares: the implementation switch and argument checks."""

from typing import Literal, get_args

import torch

Impl = Literal["triton", "cpu", "torch"]
"""Triton kernels for a GPU; code that is fast on a CPU; the references.

Where the reference of an operator is fast enough on a CPU, "cpu" and "torch" are the same.
"""

Reduce = Literal["max", "sum"]

PAGE_SIZES = (16, 32, 64)
"""Tokens that a physical page may hold."""

FP8 = torch.float8_e4m3fn
"""The one quantized dtype of K and V rows."""

Device = torch.device | str

IMPLS: tuple[str, ...] = get_args(Impl)
REDUCES: tuple[str, ...] = get_args(Reduce)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError, listing the valid names, unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


def check_fits(rows: int, scratch: torch.Tensor) -> None:
    """Raise ValueError if ``scratch``, of a workspace, has fewer than ``rows`` rows."""
    if rows > scratch.shape[0]:
        raise ValueError(f"batch of {rows} rows does not fit a workspace of {scratch.shape[0]}")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape`` (-1 matches any extent)."""
    fits = tensor.dim() == len(shape) and all(
        want in (-1, have) for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} (-1: any)")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise ValueError unless ``tensor.dtype`` is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name} is {tensor.dtype}, expected {names}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous (kernels address it without strides)."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_dense_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless each ``tensor[r]`` is contiguous; rows may lie apart."""
    if not tensor[0].is_contiguous():
        raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision a reference computes in: float64 for float64 inputs, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Index = torch.Tensor | tuple[torch.Tensor | slice | int, ...]


def take(stored: torch.Tensor, at: Index) -> torch.Tensor:
    """``stored[at]``, of any dtype."""
    # Indexing fp8 is not implemented on every device; its bytes can be indexed on all.
    return stored.view(torch.uint8)[at].view(FP8) if stored.dtype == FP8 else stored[at]


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, in float32 if it is fp8, which has no arithmetic."""
    return tensor.float() if tensor.dtype == FP8 else tensor


def put(stored: torch.Tensor, at: Index, values: torch.Tensor) -> None:
    """``stored[at] = values``, converted to the dtype of ``stored``."""
    values = values.to(stored.dtype)
    if stored.dtype == FP8:
        stored, values = stored.view(torch.uint8), values.view(torch.uint8)
    stored[at] = values


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``, which the host does not wait for."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def rankable(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``scores`` in ``dtype`` as selection ranks them: NaN is -inf, +inf the largest finite."""
    largest = torch.finfo(dtype).max
    return scores.to(dtype).nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def group_size(query_heads: int, kv_heads: int) -> int:
    """Query heads per KV head (G); raises ValueError if they do not divide."""
    if kv_heads <= 0 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads do not divide over {kv_heads} KV heads")
    return query_heads // kv_heads


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is at least ``value`` (1 for values below 1)."""
    return 1 << max(value - 1, 0).bit_length()
